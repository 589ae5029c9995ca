"""Workers that come, restart, shrink, fall silent and leave."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus, open_bucket, open_objects, publish_durable
from shared.contracts import adapters, admin, state, workers
from shared.contracts.adapters import AdapterState, DrainAdapter, LoadAdapter
from shared.errors import BaseMismatch, Conflict, InvalidRequest, LoadFailed
from tests.integration.registry_rig import (
    BASE,
    LIMITS,
    POOL,
    SLOT_BYTES,
    Admin,
    FakeWorker,
    base_of,
    obeying,
    running_registry,
    small_cluster,
)
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until, until_async


async def test_a_workers_hello_makes_the_pool_and_names_the_revision_it_stands_in(bus: Bus) -> None:
    async with running_registry(bus):
        worker = FakeWorker(bus)
        generation = await worker.hello()
        entry = await (await open_bucket(bus, state.STATE_BUCKET)).get(f"pool.{POOL}")
        assert entry is not None
        assert entry.revision == generation
        pool = await Admin(bus).pool()
        assert pool.base == BASE.identity
        assert pool.workers["w1"].incarnation == worker.incarnation
        assert await worker.hello() == generation, "the same hello again changes nothing"


async def test_the_bases_own_label_is_known_unless_an_operator_has_said_what_it_means(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        other = base_of("tiny", "9")
        await FakeWorker(bus).hello()
        matrix = msgspec.convert(await manager.ask(admin.GetMatrix()), state.Matrix)
        assert matrix.labels == {"tiny": (BASE.identity,)}
        await manager.ask(admin.RemoveLabel(label="tiny"))
        await manager.ask(admin.SetLabel(label="tiny", base=other.identity))
        await FakeWorker(bus).hello()
        matrix = msgspec.convert(await manager.ask(admin.GetMatrix()), state.Matrix)
        assert matrix.labels == {"tiny": (other.identity,)}


async def test_a_worker_with_another_base_is_refused_by_the_pool(bus: Bus) -> None:
    async with running_registry(bus):
        await FakeWorker(bus).hello()
        before = await Admin(bus).pool()
        with pytest.raises(BaseMismatch) as caught:
            await FakeWorker(bus, "w2", base=base_of("tiny", "9")).hello()
        assert caught.value.fields["expected"] == BASE.identity
        assert await Admin(bus).pool() == before


async def test_a_hello_that_is_malformed_is_refused(bus: Bus) -> None:
    async with running_registry(bus):
        reply = admin.decode_reply(await bus.request(workers.HELLO_SUBJECT, b"\x00", 5.0))
        assert reply.error is not None
        assert reply.error.code == "invalid_request"
        with pytest.raises(InvalidRequest):
            await FakeWorker(bus, "w.1").hello()


async def test_after_a_restart_the_workers_adapters_load_again_and_the_alias_stays(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        worker.open.clear()
        old = worker.incarnation
        await worker.restart()
        pool = await manager.pool()
        assert pool.mounts[view.adapter_id].state is AdapterState.LOADING
        assert pool.aliases["sales"] == {"tone": view.adapter_id}
        await worker.acknowledge(LoadAdapter(pool_id=POOL, adapter_id=view.adapter_id, generation=1 << 40), incarnation=old)
        worker.open.set()
        await manager.in_state("sales", "tone", "ready")
        assert [type(command) for command in worker.commands] == [LoadAdapter, LoadAdapter]
        assert await manager.held("sales") == SLOT_BYTES


async def test_a_drain_under_way_when_its_worker_restarts_is_ordered_again(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        worker.deaf = True
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone"))
        await until(lambda: any(isinstance(command, DrainAdapter) for command in worker.commands), what="the drain was ordered")
        worker.deaf = False
        await worker.restart()
        await manager.in_state("sales", "tone", "unloaded")
        assert (await manager.pool()).mounts == {}


async def test_a_restart_that_offers_fewer_slots_than_are_mounted_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        for n in (1, 2):
            await manager.add("sales", f"tone{n}", adapter(tmp_path, n), tmp_path)
        before = await manager.pool()
        worker.limits = msgspec.structs.replace(LIMITS, slots=1)
        with pytest.raises(Conflict) as caught:
            await worker.restart()
        assert (caught.value.fields["field"], caught.value.fields["asked"], caught.value.fields["allowed"]) == ("slots", 2, 1)
        assert await manager.pool() == before


async def test_adapters_spread_over_the_workers_by_reserved_slots(bus: Bus, tmp_path: Path) -> None:
    first, second = FakeWorker(bus, "w1"), FakeWorker(bus, "w2")
    async with running_registry(bus), obeying(first, second):
        manager = Admin(bus)
        await manager.tenant("sales")
        placed = [(await manager.add("sales", f"tone{n}", adapter(tmp_path, n), tmp_path)).worker_id for n in range(4)]
        assert placed == ["w1", "w2", "w1", "w2"]


async def test_a_removed_workers_adapters_fail_and_their_room_is_free(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        view = msgspec.convert(await manager.ask(admin.RemoveWorker(pool_id=POOL, worker_id="w1")), admin.PoolView)
        assert (view.workers, view.mounts) == ((), ())
        shown = await manager.in_state("sales", "tone", "failed")
        assert shown.error is not None
        assert "w1 was removed" in shown.error.message
        assert await manager.held("sales") == 0


async def test_whoever_waits_for_an_adapter_whose_worker_is_removed_is_told(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        worker.open.clear()
        async with asyncio.TaskGroup() as group:
            adding = group.create_task(_failure(manager, tmp_path))
            await manager.in_state("sales", "tone", "loading")
            await manager.ask(admin.RemoveWorker(pool_id=POOL, worker_id="w1"))
        assert "w1 was removed" in adding.result()
        worker.open.set()


async def _failure(manager: Admin, folder: Path) -> str:
    with pytest.raises(LoadFailed) as caught:
        await manager.add("sales", "tone", adapter(folder), folder)
    return caught.value.message


async def test_a_command_that_was_lost_is_sent_again(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        worker.deaf = True
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path, wait_s=0.0)
        await until(lambda: len(worker.commands) >= 2, what="the load was repeated")
        worker.deaf = False
        await manager.in_state("sales", "tone", "ready")
        generations = [command.generation for command in worker.commands]
        assert generations == sorted(generations)
        assert {command.adapter_id for command in worker.commands} == {view.adapter_id}


async def test_pools_show_workers_reports_and_what_each_tenant_holds(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        report = workers.WorkerReport(
            worker_id="w1",
            incarnation=worker.incarnation,
            pool_id=POOL,
            generation=1,
            state="ready",
            in_flight=3,
            waiting=0,
            capacity=8,
            base=workers.AdapterUse(adapter_id="", residency="device"),
        )
        await bus.publish(workers.report_subject("w1"), b"\x00 not a report")
        await bus.publish(workers.report_subject("w1"), workers.encode(report))

        async def shown() -> bool:
            (pool,) = msgspec.convert(await manager.ask(admin.ListPools()), list[admin.PoolView])
            (seen,) = pool.workers
            assert (seen.slots, seen.slots_held) == (4, 1)
            assert [(t.tenant, t.vram_held_bytes) for t in pool.tenants] == [("sales", SLOT_BYTES)]
            assert [mount.adapter_id for mount in pool.mounts] == [view.adapter_id]
            return seen.report == report and seen.report_age_s >= 0

        await until_async(shown, what="the report is shown")


async def test_what_nobody_owns_is_cleared_away(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        orphan = tmp_path / "orphan"
        orphan.write_bytes(b"x")
        artifacts = await open_objects(bus, adapters.ARTIFACTS_BUCKET)
        await artifacts.put_file("tn_gone.ad_gone", orphan)
        await (await open_bucket(bus, state.CATALOG_BUCKET)).delete(state.ADAPTER_PREFIX + view.adapter_id)

        async def cleared() -> bool:
            return (await manager.pool()).mounts == {} and await artifacts.names() == []

        await until_async(cleared, what="the mount without a record drained, the artifacts without one went")
        assert isinstance(worker.commands[-1], DrainAdapter)


async def test_the_heartbeat_moves_while_a_registry_lives(bus: Bus) -> None:
    async with running_registry(bus):
        bucket = await open_bucket(bus, state.STATE_BUCKET)
        seen: set[bytes] = set()

        async def moved() -> bool:
            entry = await bucket.get(state.HEARTBEAT_KEY)
            seen.update([entry.value] if entry else [])
            return len(seen) >= 3

        await until_async(moved, what="the heartbeat moved")


async def test_an_acknowledgement_that_is_malformed_or_about_nothing_stops_nothing(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await publish_durable(bus, adapters.ack_subject("loaded", "w1"), b"{")
        for pool_id, adapter_id in ((POOL, "ad_unknown"), ("unknown", "ad_unknown"), ("no pool", "a b"), (POOL, "> *")):
            await worker.acknowledge(LoadAdapter(pool_id=pool_id, adapter_id=adapter_id, generation=1 << 40))
        await manager.tenant("sales")
        assert (await manager.add("sales", "tone", adapter(tmp_path), tmp_path)).state == "ready"
