"""Who is gone and who is only slow; what is backlog after standing still. Bus and clock are made here."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.worker.liveness import FreezeWatch, RouterWatch
from shared.bus import BusUnavailable, NoResponder, RequestTimeout
from tests.waiting import until


class Pinged:
    """A bus on which each router answers as the test says."""

    def __init__(self) -> None:
        self.connected = True
        self.answers: dict[str, Callable[[], Awaitable[bytes]]] = {}
        self.asked: list[str] = []
        self.flushes = 0
        self.flush_fails = False
        self._reconnected: list[Callable[[], object]] = []

    def on_reconnect(self, listener: Callable[[], object]) -> None:
        self._reconnected.append(listener)

    def reconnect(self) -> None:
        for listener in self._reconnected:
            listener()

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        del data, timeout_s
        router_id = subject.rsplit(".", 1)[-1]
        self.asked.append(router_id)
        return await self.answers[router_id]()

    async def flush(self, timeout_s: float = 5.0) -> None:
        del timeout_s
        self.flushes += 1
        if self.flush_fails:
            raise BusUnavailable("cut")


async def here() -> bytes:
    return b"here"


async def nobody() -> bytes:
    raise NoResponder("nobody")


async def slow() -> bytes:
    raise RequestTimeout("slow")


async def watched(bus: Pinged, rounds: int, *, grace_s: float = 0.0, reconnect_first: bool = False) -> list[str]:
    """Who was called gone after every router was asked `rounds` times."""
    gone: list[str] = []
    watch = RouterWatch(bus, lambda: bus.answers.keys(), gone.append, interval_s=0.005, misses=3, grace_s=grace_s)  # type: ignore[arg-type]
    if reconnect_first:
        bus.reconnect()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await until(lambda: all(bus.asked.count(router) >= rounds for router in bus.answers))
        running.cancel()
    return gone


async def test_a_router_without_a_responder_three_times_in_a_row_is_gone_and_the_others_are_not() -> None:
    bus = Pinged()
    bus.answers = {"r1": here, "r2": nobody}
    gone = await watched(bus, 4)
    assert set(gone) == {"r2"}


async def test_a_slow_router_is_never_gone() -> None:
    bus = Pinged()
    bus.answers = {"r1": slow}
    assert await watched(bus, 10) == []


async def test_misses_count_only_in_a_row() -> None:
    bus = Pinged()
    turns = iter([nobody, nobody, here] * 10)

    async def flickering() -> bytes:
        return await next(turns)()

    bus.answers = {"r1": flickering}
    assert await watched(bus, 12) == []


@pytest.mark.parametrize("reconnected", [True, False])
async def test_misses_right_after_our_own_reconnect_do_not_count(reconnected: bool) -> None:
    bus = Pinged()
    bus.answers = {"r1": nobody}
    gone = await watched(bus, 6, grace_s=60.0, reconnect_first=reconnected)
    assert bool(gone) is not reconnected


async def test_misses_while_we_are_cut_off_do_not_count() -> None:
    bus = Pinged()
    bus.connected = False
    bus.answers = {"r1": nobody}
    assert await watched(bus, 6) == []


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_after_standing_still_everything_read_is_backlog_until_the_bus_confirms_a_round_trip() -> None:
    bus, clock = Pinged(), Clock()
    thawed: list[float] = []
    bus.flush_fails = True
    watch = FreezeWatch(bus, thawed.append, limit_s=2.0, clock=clock)  # type: ignore[arg-type]
    assert not watch.stale()
    clock.now_s += 1.9
    assert not watch.stale()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        await asyncio.sleep(0)
        clock.now_s += 7.0
        assert watch.stale(), "noticed by the first message read, before any tick"
        await until(lambda: bus.flushes >= 2)
        assert watch.stale(), "not confirmed yet"
        bus.flush_fails = False
        await until(lambda: not watch.stale())
        running.cancel()
    assert thawed == [7.0]
