"""What a registry makes of the counts it hears: one trial's trouble is no other's, and a router that counts slowly is counted."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.registry import canary_watch
from services.registry.canary_watch import CanaryWatch
from shared.bus import BusUnavailable, Entry, Message
from shared.contracts import adapters
from shared.contracts.adapters import Canary, CanaryStop
from shared.contracts.canary import CanaryCounts, VersionCounts, encode
from shared.policy.lifecycle import AdapterState
from tests.unit.pool_values import BASE

WINDOW_S = 60.0


def mount(adapter_id: str, tenant: str) -> adapters.Mount:
    return adapters.Mount(
        adapter_id=adapter_id,
        tenant_id=tenant,
        tenant=tenant,
        name="tone",
        version=1,
        digest="sha256:1",
        worker_id="w1",
        state=AdapterState.READY,
        rank=8,
        rank_class=8,
        slot_bytes=1,
        true_bytes=1,
    )


class Pools:
    """A store of one pool in which two tenants have trials; the first one's was stopped, and its record cannot be read."""

    def __init__(self) -> None:
        stop = CanaryStop(window_s=WINDOW_S, min_requests=5)
        entry = adapters.PoolEntry(
            pool_id="main",
            base=BASE,
            mounts={name: mount(name, tenant) for name, tenant in (("old_a", "a"), ("new_a", "a"), ("old_b", "b"), ("new_b", "b"))},
            aliases={"a": {"tone": "old_a"}, "b": {"tone": "old_b"}},
            canaries={
                "a": {"tone": Canary(adapter_id="new_a", share_ppm=100_000, stop=stop, stopped="it failed")},
                "b": {"tone": Canary(adapter_id="new_b", share_ppm=100_000, stop=stop)},
            },
        )
        self.live_mirror = SimpleNamespace(entries={"pool.main": Entry(adapters.encode(entry), 1)})

    async def record(self, _: str) -> None:
        raise BusUnavailable("no answer", retry_after_s=1.0)


class Changes:
    def __init__(self) -> None:
        self.pools: list[str] = []

    async def change(self, pool_id: str, _: object) -> None:
        self.pools.append(pool_id)


class Loop:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


def told(router: str, requests: int, number: int) -> Message:
    row = VersionCounts(trial="new_b", adapter_id="new_b", requests=requests, errors=requests, first_byte={}, number=number)
    return Message("", encode(CanaryCounts(router_id=router, versions=(row,))), "", "")


async def test_a_stop_that_cannot_be_told_keeps_no_other_trial_from_its_verdict() -> None:
    changes = Changes()
    watch = CanaryWatch(cast("Any", Pools()), cast("Any", changes), 0.001)
    for number in range(2):
        watch.heard(told("r1", 10 * (number + 1), number))
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run())
        async with asyncio.timeout(10):
            while not changes.pools:
                await asyncio.sleep(0.001)
        running.cancel()
    assert set(changes.pools) == {"main"}


async def test_routers_that_see_a_trial_less_than_once_a_window_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Loop()
    monkeypatch.setattr(canary_watch.asyncio, "get_running_loop", lambda: clock)
    watch = CanaryWatch(cast("Any", Pools()), cast("Any", Changes()), 1.0)
    canary = adapters.decode_pool(Pools().live_mirror.entries["pool.main"].value).canaries["b"]["tone"]
    most = 0
    for number in range(4):
        for router in range(60):
            clock.now_s += 130.0 / 60
            watch.heard(told(f"r{router}", number + 1, number))
            await watch._round()  # pyright: ignore[reportPrivateUsage]
            most = max(most, watch.figures(canary, "new_b").requests)
    assert most >= 20
