"""Following a whole stream on a real server: in order, once each, from any place, whatever breaks in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from shared.bus import Bus, Stored, ensure_stream, follow, forget_before, open_bucket, publish_durable, stream_state
from shared.bus.embedded import EmbeddedNats


@pytest.fixture
async def stream(bus: Bus) -> str:
    await ensure_stream(bus, "NOTES", ("notes.*",))
    return "NOTES"


async def write(bus: Bus, *texts: str) -> None:
    for text in texts:
        await publish_durable(bus, f"notes.{text[0]}", text.encode())


async def read(following: AsyncIterator[list[Stored]], count: int) -> list[Stored]:
    found: list[Stored] = []
    async with asyncio.timeout(20):
        async for batch in following:
            found += batch
            if len(found) >= count:
                break
    return found


async def test_every_message_comes_once_in_order_with_the_servers_stamp(bus: Bus, stream: str) -> None:
    texts = [f"{number}" for number in range(600)]
    await write(bus, *texts)
    async with aclosing(follow(bus, stream, 0, batch=100)) as following:
        found = await read(following, 600)
        assert [message.data.decode() for message in found] == texts
        assert [message.sequence for message in found] == list(range(1, 601))
        assert [message.stamp_ms for message in found] == sorted(message.stamp_ms for message in found)
        await write(bus, "late")
        assert [message.data for message in await read(following, 1)] == [b"late"]


async def test_a_reader_goes_on_where_it_was(bus: Bus, stream: str) -> None:
    await write(bus, "a", "b", "c")
    async with aclosing(follow(bus, stream, 2)) as following:
        assert [(message.sequence, message.subject) for message in await read(following, 1)] == [(3, "notes.c")]


async def test_a_server_killed_and_started_again_costs_no_message_and_doubles_none(
    bus: Bus, stream: str, nats_server: EmbeddedNats
) -> None:
    await write(bus, "a", "b")
    async with aclosing(follow(bus, stream, 0)) as following:
        await read(following, 2)
        await nats_server.kill()
        await nats_server.start()
        async with asyncio.timeout(20):
            while not bus.connected:
                await asyncio.sleep(0.01)
        await write(bus, "c", "d")
        assert [message.data for message in await read(following, 2)] == [b"c", b"d"]


async def test_what_was_cut_off_is_passed_over_and_the_state_says_so(bus: Bus, stream: str) -> None:
    await write(bus, "a", "b", "c")
    await forget_before(bus, stream, 3)
    state = await stream_state(bus, stream)
    assert (state.first, state.last, state.messages) == (3, 3, 1)
    async with aclosing(follow(bus, stream, 0)) as following:
        assert [message.sequence for message in await read(following, 1)] == [3]


async def test_a_keys_stamp_is_the_servers_and_a_deleted_key_has_none(bus: Bus) -> None:
    bucket = await open_bucket(bus, "things", create=True)
    assert await bucket.stamped("thing") is None
    revision = await bucket.put("thing", b"one")
    first = await bucket.stamped("thing")
    assert first is not None
    assert (first.value, first.revision) == (b"one", revision)
    async with bucket.watch("thing") as watch:
        change = await watch.next(5)
    assert change.entry is not None
    assert abs(change.entry.stamp_s - first.stamp_s) < 0.000_002
    await bucket.delete("thing")
    assert await bucket.stamped("thing") is None
