"""Counter streams: exact whoever writes at the same time, forgotten by nobody's restart, and no counter without a number."""

import asyncio

import pytest

from shared.bus import (
    INCREMENT_HEADER,
    Bus,
    BusSettings,
    Message,
    Moved,
    connect,
    counted,
    decode_moved,
    ensure_counters,
    ensure_stream,
)
from shared.bus.connection import BusUnavailable
from shared.bus.embedded import EmbeddedNats
from tests.waiting import until, until_async

STREAM, SUBJECTS = "COUNTERS", ("count.>",)


async def move(bus: Bus, subject: str, *increments: str) -> list[Moved]:
    """The server's answers."""
    answers: list[Moved] = []

    def heard(message: Message) -> None:
        answers.append(decode_moved(message.data))

    inbox = f"{bus.inbox_prefix}.moved.{id(answers)}"
    subscription = await bus.subscribe(inbox, heard)
    await bus.flush()
    for increment in increments:
        await bus.publish(subject, b"", inbox, {INCREMENT_HEADER: increment})
    await until(lambda: len(answers) == len(increments), what="every answer")
    await subscription.drain()
    return answers


async def test_a_counter_says_where_it_stands_after_each_move(bus: Bus) -> None:
    await ensure_counters(bus, STREAM, SUBJECTS, 60.0)
    assert await counted(bus, STREAM, "count.a") == 0
    assert [moved.val for moved in await move(bus, "count.a", "+5", "-2", "+10")] == ["5", "3", "13"]
    assert await counted(bus, STREAM, "count.a") == 13
    assert await counted(bus, STREAM, "count.b") == 0


async def test_what_is_no_number_moves_nothing_and_is_an_error(bus: Bus) -> None:
    await ensure_counters(bus, STREAM, SUBJECTS, 60.0)
    (answer,) = await move(bus, "count.a", "many")
    assert answer.error is not None
    assert answer.val == ""
    assert await counted(bus, STREAM, "count.a") == 0


async def test_many_writers_at_once_lose_nothing(nats_server: EmbeddedNats, bus: Bus) -> None:
    await ensure_counters(bus, STREAM, SUBJECTS, 60.0)
    writers = [await connect(BusSettings(url=nats_server.url, name=f"writer{number}")) for number in range(4)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(move(writer, "count.a", *["+1"] * 200)) for writer in writers]
    seen = sorted(int(moved.val) for task in tasks for moved in task.result())
    assert seen == list(range(1, 801))
    for writer in writers:
        await writer.close()


async def test_a_counter_stands_where_it_stood_after_the_servers_restart(nats_server: EmbeddedNats, bus: Bus) -> None:
    await ensure_counters(bus, STREAM, SUBJECTS, 60.0)
    await move(bus, "count.a", "+7")
    await nats_server.stop()
    await nats_server.start()

    async def stands() -> bool:
        try:
            return await counted(bus, STREAM, "count.a") == 7
        except BusUnavailable:
            return False

    await until_async(stands, what="it is read again")
    assert [moved.val for moved in await move(bus, "count.a", "+1")] == ["8"]


async def test_making_it_twice_is_once_and_another_kind_of_stream_of_the_name_is_an_error(bus: Bus) -> None:
    await ensure_counters(bus, STREAM, SUBJECTS, 60.0)
    await move(bus, "count.a", "+7")
    await ensure_counters(bus, STREAM, SUBJECTS, 120.0)
    assert await counted(bus, STREAM, "count.a") == 7
    await ensure_stream(bus, "OTHER", ("other.>",))
    with pytest.raises(BusUnavailable):
        await ensure_counters(bus, "OTHER", ("other.>",), 60.0)
