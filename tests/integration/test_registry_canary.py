"""Trials in a real registry: started, changed, promoted, rolled back, stopped by what routers count, and what others may do meanwhile."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.bus import Bus, connect
from shared.bus.connection import BusSettings
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, canary
from shared.contracts.adapters import AdapterState, CanaryBy, CanaryStop, CanaryTerms, DrainAdapter
from shared.contracts.errors import ErrorInfo
from shared.errors import Conflict, InvalidRequest, LoadFailed, NotFound, QuotaExceeded
from tests.integration.registry_rig import QUICK, SLOT_BYTES, Admin, FakeWorker, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until_async

TENTH = CanaryTerms(share_ppm=100_000, by=CanaryBy.SESSION, stop=CanaryStop(min_requests=20))
SWIFT = msgspec.structs.replace(QUICK, canary_watch_s=0.05)


async def start(manager: Admin, folder: Path, seed: int = 2, terms: CanaryTerms = TENTH, **fields: Any) -> admin.AdapterView:
    return await manager.add("sales", "tone", adapter(folder, seed), folder, trial=terms, **fields)


@asynccontextmanager
async def serving(bus: Bus, folder: Path) -> AsyncIterator[tuple[Admin, FakeWorker, admin.AdapterView]]:
    """tone@1 of sales serves; there is room for one more."""
    async with small_cluster(bus, SWIFT) as (manager, worker):
        await manager.tenant("sales", quota=SLOT_BYTES, upgrade_headroom_bytes=SLOT_BYTES)
        yield manager, worker, await manager.add("sales", "tone", adapter(folder, 1), folder)


async def shown(manager: Admin, **fields: str) -> list[admin.CanaryView]:
    return msgspec.convert(await manager.ask(admin.ListCanaries(**fields)), list[admin.CanaryView])


class Router:
    """Counts as a router would."""

    def __init__(self, bus: Bus, trial: str, stable: str, name: str = "r_1") -> None:
        self.bus = bus
        self.name = name
        self.trial = trial
        self.stable = stable
        self.number = 0

    async def tells(self, trial: tuple[int, int], stable: tuple[int, int], trial_bucket: int = 10) -> None:
        """(requests, errors) of each since the trial began."""
        rows = [self._row(self.trial, trial, trial_bucket), self._row(self.stable, stable, 10)]
        self.number += 1
        counts = canary.CanaryCounts(router_id=self.name, versions=tuple(rows))
        await self.bus.publish(canary.counts_subject(self.name), canary.encode(counts))

    def _row(self, adapter_id: str, counts: tuple[int, int], bucket: int) -> canary.VersionCounts:
        requests, errors = counts
        first_byte = {bucket: requests - errors}
        return canary.VersionCounts(
            trial=self.trial, adapter_id=adapter_id, requests=requests, errors=errors, first_byte=first_byte, number=self.number
        )


async def test_a_trial_is_ready_beside_the_version_that_serves_and_both_are_charged(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        view = await start(manager, tmp_path)
        assert (view.state, view.version, view.serving, view.on_trial) == ("ready", 2, False, True)
        assert (await manager.pool()).aliases["sales"] == {"tone": stable.adapter_id}
        assert await manager.held("sales") == 2 * SLOT_BYTES
        (trial,) = await shown(manager)
        assert (trial.tenant, trial.name, trial.stable_version, trial.version, trial.state) == ("sales", "tone", 1, 2, "ready")
        assert (trial.share_ppm, trial.by, trial.stop, trial.stopped) == (100_000, CanaryBy.SESSION, TENTH.stop, "")
        assert trial.started_at
        assert "on trial: 10% by session" in [event.note for event in await manager.events("sales", "tone")]
        assert await shown(manager, tenant="sales", name="other") == []


async def test_promoting_makes_it_the_aliass_version_and_drains_the_other(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, worker, stable):
        trial = await start(manager, tmp_path)
        before = msgspec.convert(await manager.ask(admin.PromoteCanary(tenant="sales", name="tone", version=2)), admin.CanaryView)
        assert (before.version, before.stable_version) == (2, 1)
        assert (await manager.pool()).aliases["sales"] == {"tone": trial.adapter_id}
        await manager.in_state("sales", "tone", "unloaded", version=1)
        assert await shown(manager) == []
        assert await manager.held("sales") == SLOT_BYTES
        assert [c.adapter_id for c in worker.commands if isinstance(c, DrainAdapter)] == [stable.adapter_id]
        view = await manager.show("sales", "tone")
        assert (view.version, view.serving, view.on_trial) == (2, True, False)
        assert view.history[-1]["note"] == "promoted: it serves now"
        with pytest.raises(NotFound, match="no version of tone on trial"):
            await manager.ask(admin.PromoteCanary(tenant="sales", name="tone"))


async def test_rolling_back_drains_the_trial_and_it_can_be_tried_again(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        await manager.ask(admin.RollBackCanary(tenant="sales", name="tone"))
        await manager.in_state("sales", "tone", "unloaded", version=2)
        assert (await manager.pool()).aliases["sales"] == {"tone": stable.adapter_id}
        assert await manager.held("sales") == SLOT_BYTES
        again = await manager.ask(admin.AddAdapter(tenant="sales", name="tone", trial=TENTH, version=2, wait_s=10.0))
        assert (again["adapter_id"], again["state"], again["on_trial"]) == (trial.adapter_id, "ready", True)


async def test_terms_change_while_it_runs_and_wrong_ones_are_refused_by_name(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, _stable):
        with pytest.raises(InvalidRequest, match="share_ppm is 1000001"):
            await start(manager, tmp_path, terms=CanaryTerms(share_ppm=1_000_001))
        await start(manager, tmp_path)
        change = admin.ChangeCanary(tenant="sales", name="tone", share_ppm=200_000, by=CanaryBy.HEADER, stop={"window_s": 30})
        view = msgspec.convert(await manager.ask(change), admin.CanaryView)
        assert (view.share_ppm, view.by, view.stop.window_s, view.stop.min_requests) == (200_000, CanaryBy.HEADER, 30.0, 20)
        assert (await shown(manager)) == [view]
        with pytest.raises(InvalidRequest, match=r"stop\.window_s"):
            await manager.ask(admin.ChangeCanary(tenant="sales", name="tone", stop={"window_s": 1}))
        with pytest.raises(NotFound):
            await manager.ask(admin.ChangeCanary(tenant="sales", name="other", share_ppm=1))


async def test_a_name_on_trial_takes_no_other_version_and_its_stable_version_is_not_unloaded_alone(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        for fields in ({}, {"trial": TENTH}, {"drain_first": True}):
            with pytest.raises(Conflict, match="on trial: promote it or roll it back first"):
                await manager.add("sales", "tone", adapter(tmp_path, 3), tmp_path, **fields)
        with pytest.raises(Conflict, match="version 2 of tone is on trial"):
            await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", version=1))
        assert set((await manager.pool()).mounts) == {stable.adapter_id, trial.adapter_id}
        with pytest.raises(Conflict, match="unload them first"):
            await manager.ask(admin.DeleteTenant(name="sales"))
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        pool = await manager.pool()
        assert (pool.mounts, pool.canaries) == ({}, {})
        await manager.ask(admin.DeleteTenant(name="sales"))
        assert (await manager.pool()).canaries == {}


async def test_unloading_the_version_on_trial_ends_the_trial(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        await start(manager, tmp_path)
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", version=2, wait_s=10.0))
        pool = await manager.pool()
        assert (pool.canaries, pool.aliases["sales"]) == ({}, {"tone": stable.adapter_id})


async def test_what_cannot_be_a_trial_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, worker, _stable):
        with pytest.raises(Conflict, match="these are the files of version 1"):
            await start(manager, tmp_path, seed=1)
        with pytest.raises(Conflict, match="nothing serves fresh"):
            await manager.add("sales", "fresh", adapter(tmp_path, 3), tmp_path, trial=TENTH)
        with pytest.raises(InvalidRequest, match="drain_first"):
            await start(manager, tmp_path, drain_first=True)
        with pytest.raises(NotFound, match="does not serve already"):
            await manager.ask(admin.AddAdapter(tenant="sales", name="tone", trial=TENTH))
        await manager.ask(admin.UpdateTenant(name="sales", upgrade_headroom_bytes=0))
        with pytest.raises(QuotaExceeded, match="grant upgrade headroom"):
            await start(manager, tmp_path)
        await manager.ask(admin.UpdateTenant(name="sales", upgrade_headroom_bytes=SLOT_BYTES))
        worker.fail_with = ErrorInfo(code="load_failed", message="no module matched")
        with pytest.raises(LoadFailed):
            await start(manager, tmp_path, seed=4)
        pool = await manager.pool()
        assert (pool.canaries, len(pool.mounts)) == ({}, 1)


async def test_a_trial_that_loads_when_its_worker_restarts_is_one_still(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, worker, stable):
        worker.open.clear()
        view = await start(manager, tmp_path, wait_s=0.0)
        await worker.restart()
        worker.open.set()

        async def both_are_back() -> bool:
            mounts = (await manager.pool()).mounts
            return all(mounts[each].state is AdapterState.READY for each in (view.adapter_id, stable.adapter_id))

        await until_async(both_are_back, what="both versions are ready again")
        pool = await manager.pool()
        assert pool.aliases["sales"] == {"tone": stable.adapter_id}
        assert pool.mounts[view.adapter_id].on_trial


async def stops(manager: Admin) -> admin.CanaryView:
    view: admin.CanaryView | None = None

    async def is_stopped() -> bool:
        nonlocal view
        (view,) = await shown(manager)
        return bool(view.stopped)

    await until_async(is_stopped, what="the trial is stopped")
    assert view is not None
    return view


async def test_a_trial_that_fails_is_stopped_with_the_figures_and_stays_mounted(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        router = Router(bus, trial.adapter_id, stable.adapter_id)
        await router.tells((0, 0), (0, 0))
        await router.tells((19, 19), (180, 0))
        await until_async(lambda: _has(manager, 19), what="the registry has heard")
        assert not (await shown(manager))[0].stopped, "too few to judge"
        await router.tells((24, 22), (200, 0))
        view = await stops(manager)
        assert "22 of 24 requests failed" in view.stopped
        assert (view.trial.requests, view.trial.errors, view.stable.requests) == (24, 22, 200)
        pool = await manager.pool()
        assert pool.mounts[trial.adapter_id].state is AdapterState.READY
        assert pool.aliases["sales"] == {"tone": stable.adapter_id}
        with pytest.raises(Conflict, match="roll it back, or resume it first"):
            await manager.ask(admin.PromoteCanary(tenant="sales", name="tone"))
        notes = [event.note for event in await manager.events("sales", "tone")]
        assert sum(note.startswith("trial stopped: 22 of 24") for note in notes) == 1


async def _has(manager: Admin, requests: int) -> bool:
    return (await shown(manager))[0].trial.requests == requests


async def test_counts_of_several_routers_are_judged_together_and_a_slow_trial_is_stopped(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        routers = [Router(bus, trial.adapter_id, stable.adapter_id, f"r_{n}") for n in range(3)]
        for router in routers:
            await router.tells((0, 0), (90, 0))
        for router in routers:
            await router.tells((8, 0), (90, 0), trial_bucket=24)
        assert "24 of 24 answers began later than" in (await stops(manager)).stopped


async def test_a_trial_that_is_resumed_is_judged_by_what_comes_after(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        router = Router(bus, trial.adapter_id, stable.adapter_id)
        await router.tells((30, 30), (200, 0))
        await stops(manager)
        resumed = msgspec.convert(await manager.ask(admin.ChangeCanary(tenant="sales", name="tone", resume=True)), admin.CanaryView)
        assert resumed.stopped == ""
        assert resumed.trial.requests == 0

        async def counts_anew() -> bool:
            await router.tells((30 + router.number, 30), (200 + router.number, 0))
            return (await shown(manager))[0].trial.requests > 3

        await until_async(counts_anew, what="new counts are heard")
        (view,) = await shown(manager)
        assert (view.stopped, view.trial.errors) == ("", 0)


async def test_a_stop_is_one_whichever_of_two_registries_decides_it(bus: Bus, nats_server: EmbeddedNats, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        other = await connect(BusSettings(url=nats_server.url, name="registry2"))
        async with running_registry(other, msgspec.structs.replace(SWIFT, registry_id="second"), asked_by=bus):
            trial = await start(manager, tmp_path)
            router = Router(bus, trial.adapter_id, stable.adapter_id)
            await router.tells((40, 40), (40, 0))
            await stops(manager)
            await manager.ask(admin.RollBackCanary(tenant="sales", name="tone"))
            await manager.in_state("sales", "tone", "unloaded", version=2)
        notes = [event.note for event in await manager.events("sales", "tone")]
        assert sum(note.startswith("trial stopped") for note in notes) == 1
        await other.close()


async def test_malformed_counts_are_passed_over(bus: Bus, tmp_path: Path) -> None:
    async with serving(bus, tmp_path) as (manager, _, stable):
        trial = await start(manager, tmp_path)
        await bus.publish(canary.counts_subject("r_9"), b"\xc1nonsense")
        await Router(bus, trial.adapter_id, stable.adapter_id).tells((30, 30), (200, 0))
        assert (await stops(manager)).stopped
