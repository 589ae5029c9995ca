"""Registries that project the usage stream on a real server: the same answer from each, exactly once whatever breaks, rebuilt the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from services.registry.store import Store, open_store
from services.registry.usage_service import UsageService
from services.registry.usage_snapshots import Snapshots
from shared.bus import Bus, open_objects, publish_durable, stream_state
from shared.contracts import usage
from shared.contracts.usage import USAGE_STREAM, Usage, encode
from shared.contracts.usage_query import GetEngines, GetUsage, UsageReply
from shared.errors import RegistryUnavailable
from shared.policy.usage_rollup import QUARTER_MS
from shared.runtime import end
from tests.usage_records import attempt, ended, engine, outcome, subject_of
from tests.waiting import until_async

EVERYTHING = GetUsage(from_ms=0, to_ms=1 << 42, group_by=("tenant", "version", "key"))
FAR = EVERYTHING.to_ms - EVERYTHING.to_ms % QUARTER_MS
EVERYTHING = msgspec.structs.replace(EVERYTHING, to_ms=FAR)


async def publish(bus: Bus, *records: Usage, message_id: str = "") -> None:
    await publish_durable(bus, subject_of(records[0]), encode(list(records)), message_id)


class Projection:
    """One registry's, without the registry."""

    def __init__(self, service: UsageService, store: Store, snapshots: Snapshots) -> None:
        self.service = service
        self.store = store
        self.snapshots = snapshots

    async def answer(self, request: GetUsage = EVERYTHING) -> UsageReply:
        return await self.service.usage(request)

    async def sums(self) -> dict[str, int]:
        reply = await self.answer(msgspec.structs.replace(EVERYTHING, group_by=()))
        return {name: value for row in reply.rows for name, value in msgspec.structs.asdict(row.amounts).items() if value}


@asynccontextmanager
async def projecting(bus: Bus, path: Path, failpoint: Callable[[str], None] | None = None) -> AsyncIterator[Projection]:
    store = await open_store(bus)
    snapshots = Snapshots(await open_objects(bus, usage.SNAPSHOTS_BUCKET, create=True), path.parent)
    service = UsageService(store, snapshots, path, failpoint)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(service.run())
        try:
            yield Projection(service, store, snapshots)
        finally:
            await end([running])
            service.close()


async def mixed(bus: Bus, count: int, *, start: int = 0) -> None:
    for number in range(start, start + count):
        await publish(bus, attempt(f"r{number}", checkpoint=1, final=False), engine(number + 1))
        if number % 5:
            await publish(bus, attempt(f"r{number}", checkpoint=2, key_id=f"k{number % 3}"))
        await publish(bus, outcome(f"r{number}", key_id=f"k{number % 3}", outcome="complete" if number % 4 else "client_gone"))


async def test_two_registries_give_the_same_answer_and_one_that_starts_over_too(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one, projecting(bus, tmp_path / "b.sqlite") as other:
        await mixed(bus, 30)
        await publish(bus, ended())
        first = await one.answer()
        assert first == await other.answer()
        assert sum(row.amounts.requests for row in first.rows) == 30
        assert sum(row.amounts.attempts for row in first.rows) == 30
        assert sum(row.amounts.partial for row in first.rows) == 6
    async with projecting(bus, tmp_path / "c.sqlite") as third:
        assert await third.answer() == first


async def test_a_registry_goes_on_from_its_file(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await mixed(bus, 5)
        before = await one.sums()
    await mixed(bus, 5, start=5)
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        after = await one.sums()
    assert (before["requests"], after["requests"]) == (5, 10)


async def test_what_is_stored_again_after_the_deduplication_window_counts_once(bus: Bus, tmp_path: Path) -> None:
    """The window is of message ids; a repeat after it is a message like any other."""
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for message_id in ("first", "again", ""):
            await publish(bus, attempt("r1"), message_id=message_id)
            await publish(bus, outcome("r1"), message_id=message_id and message_id + "-outcome")
        assert (await stream_state(bus, USAGE_STREAM)).messages == 6
        assert (await one.sums())["requests"] == 1
        assert (await one.sums())["attempts"] == 1


async def test_one_client_label_sent_a_hundred_times_is_a_hundred_bills(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(100):
            await publish(bus, outcome(f"r{number}", client_label="the-same"))
            await publish(bus, attempt(f"r{number}"))
        sums = await one.sums()
        assert (sums["requests"], sums["attempts"], sums["completion_tokens"]) == (100, 100, 400)


@pytest.mark.parametrize("step", ["fetched", "message", "before commit", "after commit"])
async def test_a_reader_that_dies_at_any_step_counts_everything_once(bus: Bus, tmp_path: Path, step: str) -> None:
    """The reader's transaction ends where the failpoint says; the next reader goes on from what was committed."""
    await open_store(bus)
    await mixed(bus, 12)
    async with projecting(bus, tmp_path / "whole.sqlite") as whole:
        expected = await whole.answer()
    for crash in range(1, 4):
        seen = 0

        class Died(BaseException):
            pass

        def failpoint(name: str, crash: int = crash) -> None:
            nonlocal seen
            seen += name == step
            if seen == crash and name == step:
                raise Died

        with pytest.raises(BaseExceptionGroup):
            async with projecting(bus, tmp_path / "dying.sqlite", failpoint) as dying:
                for number in range(50):
                    await mixed(bus, 1, start=1000 * crash + number)
                    await dying.answer()
    async with projecting(bus, tmp_path / "whole.sqlite") as whole, projecting(bus, tmp_path / "dying.sqlite") as again:
        assert await again.answer() == await whole.answer() != expected


async def test_an_answer_includes_what_was_stored_before_it_was_asked_for(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(20):
            await publish(bus, outcome(f"r{number}"))
            assert (await one.sums())["requests"] == number + 1


async def test_who_has_not_read_the_stream_yet_says_so_instead_of_answering_less(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.registry.usage_service._CATCH_UP_S", 0.05)
    store = await open_store(bus)
    snapshots = Snapshots(await open_objects(bus, usage.SNAPSHOTS_BUCKET, create=True), tmp_path)
    idle = UsageService(store, snapshots, tmp_path / "usage.sqlite")
    with pytest.raises(RegistryUnavailable, match="still reading"):
        await idle.usage(EVERYTHING)


async def test_engines_time_between_two_moments_is_what_grew(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await publish(bus, engine(3), engine(2), engine(5, overhead_us={"schedule": 10, "sample": 4}))
        rows = (await one.service.engines(GetEngines(from_ms=0, to_ms=FAR))).rows
        assert [(row.wall_us, row.steps, row.overhead_us) for row in rows] == [(5_000_000, 50, {"sample": 4, "schedule": 10})]
        later = await one.service.engines(GetEngines(from_ms=FAR - QUARTER_MS, to_ms=FAR))
        assert later.rows == []


async def test_ten_thousand_requests_are_read_in_seconds(bus: Bus, tmp_path: Path) -> None:
    await open_store(bus)
    for start in range(0, 10_000, 250):
        names = [f"r{number}" for number in range(start, start + 250)]
        await publish(bus, *(attempt(name, checkpoint=1, final=False) for name in names))
        await publish(bus, *(attempt(name, checkpoint=2) for name in names))
        await publish(bus, *(outcome(name) for name in names))
    async with asyncio.timeout(60), projecting(bus, tmp_path / "a.sqlite") as one:

        async def read() -> bool:
            try:
                return (await one.sums())["requests"] == 10_000
            except RegistryUnavailable:
                return False

        await until_async(read, timeout_s=60)
        assert (await one.sums())["completion_tokens"] == 80_000


async def test_a_reader_that_stumbles_reads_the_same_messages_again(bus: Bus, tmp_path: Path) -> None:
    stumbles = 0

    def failpoint(name: str) -> None:
        nonlocal stumbles
        if name == "before commit" and stumbles < 2:
            stumbles += 1
            raise ValueError("anything")

    async with projecting(bus, tmp_path / "a.sqlite", failpoint) as one:
        await mixed(bus, 3)
        assert (await one.sums())["requests"] == 3
    assert stumbles == 2
