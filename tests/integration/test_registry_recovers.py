"""Every place at which a registry can die between the pool's entry and what follows from it, as it is found afterwards; and the bus
that goes away under a living one."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.registry.acks import catch_up
from services.registry.mounting import Mounting
from services.registry.store import open_store
from shared.bus import Bus, open_bucket, open_objects
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, admin, state
from shared.contracts.adapters import AdapterFailed, AdapterState, PoolEntry
from shared.contracts.errors import ErrorInfo
from shared.contracts.state import AdapterRecord, HistoryStep
from shared.errors import InternalError, TenantryError
from tests import adapters_factory as factory
from tests.integration.registry_rig import POOL, QUICK, SLOT_BYTES, Admin, FakeWorker, obeying, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until_async


async def rewrite_record(bus: Bus, adapter_id: str, change: Callable[[AdapterRecord], AdapterRecord]) -> None:
    catalog = await open_bucket(bus, state.CATALOG_BUCKET)
    entry = await catalog.get(state.ADAPTER_PREFIX + adapter_id)
    assert entry is not None
    await catalog.put(state.ADAPTER_PREFIX + adapter_id, state.encode(change(state.decode_record(entry.value))))


async def rewrite_pool(bus: Bus, change: Callable[[PoolEntry], PoolEntry]) -> int:
    live = await open_bucket(bus, state.STATE_BUCKET)
    entry = await live.get(state.POOL_PREFIX + POOL)
    assert entry is not None
    return await live.put(state.POOL_PREFIX + POOL, adapters.encode(change(adapters.decode_pool(entry.value))))


def without_mounts(pool: PoolEntry) -> PoolEntry:
    return msgspec.structs.replace(pool, mounts={}, aliases={})


@pytest.mark.parametrize("said", [AdapterState.VALIDATING, AdapterState.LOADING])
async def test_a_record_that_fell_behind_its_mount_catches_up(bus: Bus, tmp_path: Path, said: AdapterState) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await rewrite_record(bus, view.adapter_id, lambda record: msgspec.structs.replace(record, state=said, generation=0, version=0))
        store = await open_bucket(bus, state.CATALOG_BUCKET)

        async def caught_up() -> bool:
            entry = await store.get(state.ADAPTER_PREFIX + view.adapter_id)
            return entry is not None and state.decode_record(entry.value).state is AdapterState.READY

        await until_async(caught_up, what="the record says ready again")
        assert (await manager.show("sales", "tone")).version == 1
        assert len(worker.commands) == 1
        assert await manager.held("sales") == SLOT_BYTES


@pytest.mark.parametrize(
    ("said", "end"),
    [(AdapterState.LOADING, "failed"), (AdapterState.READY, "failed"), (AdapterState.DRAINING, "unloaded")],
)
async def test_a_record_whose_reservation_is_gone_takes_its_end(bus: Bus, tmp_path: Path, said: AdapterState, end: str) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await rewrite_pool(bus, without_mounts)
        await rewrite_record(bus, view.adapter_id, lambda record: msgspec.structs.replace(record, state=said))
        shown = await manager.in_state("sales", "tone", end)
        assert (shown.error is not None) == (end == "failed")
        again = msgspec.convert(await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0)), admin.AdapterView)
        assert (again.state, again.version) == ("ready", 1)


async def test_a_failure_whose_registry_died_after_releasing_keeps_its_reason(bus: Bus, tmp_path: Path) -> None:
    never = msgspec.structs.replace(QUICK, abandoned_s=1000.0)
    async with small_cluster(bus, never) as (manager, worker):
        await manager.tenant("sales")
        worker.deaf = True
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path, wait_s=0.0)
        await rewrite_pool(bus, without_mounts)
        ack = AdapterFailed(
            pool_id=POOL,
            adapter_id=view.adapter_id,
            worker_id="w1",
            incarnation=worker.incarnation,
            generation=1 << 40,
            error=ErrorInfo(code="load_failed", message="the probe saw no difference"),
        )
        store = await open_store(bus)
        await catch_up(store, Mounting(store), ack)
        shown = await manager.in_state("sales", "tone", "failed")
        assert shown.error == ack.error
        assert (await manager.events("sales", "tone"))[-1].error == ack.error


async def test_an_admitted_version_whose_room_has_come_free_is_loaded(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        worker.open.clear()
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path, wait_s=0.0)

        def admitted(pool: PoolEntry) -> PoolEntry:
            mount = msgspec.structs.replace(pool.mounts[view.adapter_id], state=AdapterState.ADMITTED, waits_for="ad_gone")
            return msgspec.structs.replace(pool, mounts={view.adapter_id: mount})

        await rewrite_pool(bus, admitted)
        worker.commands.clear()
        worker.open.set()
        await manager.in_state("sales", "tone", "ready")


async def test_only_the_newest_refusals_are_kept_and_staged_leftovers_go(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, msgspec.structs.replace(QUICK, refusals_kept=2, staged_max_s=0.5)) as (manager, _):
        await manager.tenant("sales")
        forgotten = await manager.stage(b"never asked for", tmp_path)
        for n in range(4):
            with pytest.raises(TenantryError):
                await manager.add("sales", f"bad{n}", b"not an archive", tmp_path)
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        staging = await open_objects(bus, adapters.STAGING_BUCKET)

        async def cleared() -> bool:
            listed = await manager.ask(admin.ListAdapters(tenant="sales", all_versions=True))
            return sorted(v["name"] for v in listed) == ["bad2", "bad3", "tone"] and forgotten not in await staging.names()

        await until_async(cleared, what="old refusals and staged leftovers are gone")
        assert (await manager.show("sales", "tone")).adapter_id == view.adapter_id


async def test_a_fault_of_the_machine_is_told_as_such_and_the_registry_lives_on(bus: Bus, tmp_path: Path) -> None:
    work_dir = tmp_path / "work"
    async with small_cluster(bus, msgspec.structs.replace(QUICK, work_dir=str(work_dir), registry_id="r1")) as (manager, _):
        await manager.tenant("sales")
        (work_dir / "tenantry-r1").rmdir()
        (work_dir / "tenantry-r1").write_bytes(b"in the way")  # as on a full disk: no folder can be made
        with pytest.raises(InternalError, match="could not validate"):
            await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        (work_dir / "tenantry-r1").unlink()
        (work_dir / "tenantry-r1").mkdir()
        assert (await manager.add("sales", "tone", adapter(tmp_path), tmp_path)).state == "ready"


async def test_a_registry_outlives_its_bus(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        made = await manager.tenant("sales", nats_password=True)
        first = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        await nats_server.kill()
        await nats_server.start()

        async def serves_again() -> bool:
            try:
                return await manager.held("sales") == SLOT_BYTES
            except TenantryError:
                return False

        await until_async(serves_again, timeout_s=30, what="the registry answers again")
        assert (await manager.show("sales", "tone")).adapter_id == first.adapter_id
        second = await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path)
        assert (second.state, second.version) == ("ready", 2)
        await manager.in_state("sales", "tone", "unloaded", version=1)
        staged = await manager.stage(factory.pack(adapter(tmp_path, 3), "zip"), tmp_path, bucket=adapters.uploads_bucket(made.tenant_id))
        onboard = adapters.OnboardAdapter(name="other", object=staged)
        await bus.publish(adapters.onboard_subject(made.tenant_id), adapters.encode(onboard))
        await manager.in_state("sales", "other", "ready")


async def test_the_state_of_a_stopped_cluster_is_there_when_it_starts_again(bus: Bus, tmp_path: Path) -> None:
    worker = FakeWorker(bus)
    async with running_registry(bus), obeying(worker):
        manager = Admin(bus)
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
    async with running_registry(bus):
        manager = Admin(bus)
        shown = await manager.show("sales", "tone")
        assert (shown.adapter_id, shown.state) == (view.adapter_id, "ready")
        steps = [HistoryStep(**step).state for step in shown.history]
        assert steps[-1] == "ready"
