"""An adapter's way through a real registry: in, served, upgraded, drained, back again."""

import asyncio
import tarfile
from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus, open_objects
from shared.contracts import adapters, admin
from shared.contracts.adapters import AdapterState, DrainAdapter, LoadAdapter
from shared.contracts.errors import ErrorInfo
from shared.errors import Conflict, LoadFailed, NotFound, QuotaExceeded, Unsupported
from tests import adapters_factory as factory
from tests.integration.registry_rig import BASE, SLOT_BYTES, small_cluster
from tests.waiting import until_async


def adapter(folder: Path, seed: int = 0, **changes: object) -> Path:
    return factory.make_adapter(folder / f"adapter{seed}", BASE, seed=seed, base_model_name_or_path="tiny", **changes)


async def test_an_uploaded_adapter_is_mounted_and_served_under_its_name(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        assert (view.state, view.version, view.serving, view.worker_id) == ("ready", 1, True, "w1")
        assert (view.slot_bytes, view.rank, view.rank_class) == (SLOT_BYTES, 4, 8)
        assert (view.base, view.base_label, view.provenance) == (BASE.identity, "tiny", "alias")
        assert [type(command) for command in worker.commands] == [LoadAdapter]
        assert await manager.held("sales") == SLOT_BYTES
        steps = [step["state"] for step in view.history]
        assert steps == ["uploaded", "validating", "admitted", "loading", "ready"]
        told = [event.state for event in await manager.events("sales")]
        assert told == [AdapterState(step) for step in steps]


async def test_the_stored_artifact_is_a_tar_of_the_normalised_files_with_the_digest_that_the_mount_names(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        mount = (await manager.pool()).mounts[view.adapter_id]
        store = await open_objects(bus, adapters.ARTIFACTS_BUCKET)
        size = await store.get_file(mount.artifact, tmp_path / "got.tar", sha256=mount.artifact_sha256)
        assert size == mount.artifact_bytes
        with tarfile.open(tmp_path / "got.tar") as tar:
            assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
        staging = await open_objects(bus, adapters.STAGING_BUCKET)
        assert await staging.names() == []


async def test_the_same_bytes_twice_are_one_version(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        first = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        again = await manager.add("sales", "tone", factory.pack(adapter(tmp_path), "zip", top="x"), tmp_path)
        assert (again.adapter_id, again.version) == (first.adapter_id, 1)
        assert len(worker.commands) == 1
        listed = await manager.ask(admin.ListAdapters(tenant="sales", all_versions=True))
        assert [view["adapter_id"] for view in listed] == [first.adapter_id]
        assert await (await open_objects(bus, adapters.STAGING_BUCKET)).names() == []


async def test_the_same_bytes_uploaded_many_times_at_once_are_one_version(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _worker):
        await manager.tenant("sales")
        folder = adapter(tmp_path)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(manager.add("sales", "tone", folder, tmp_path)) for _ in range(6)]
        assert len({task.result().adapter_id for task in tasks}) == 1
        assert len((await manager.pool()).mounts) == 1


async def test_the_same_bytes_of_another_tenant_are_that_tenants_own_adapter(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.tenant("cs")
        mine = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        theirs = await manager.add("cs", "tone", adapter(tmp_path), tmp_path)
        assert mine.digest == theirs.digest
        assert mine.adapter_id != theirs.adapter_id
        mounts = (await manager.pool()).mounts
        assert mounts[mine.adapter_id].artifact != mounts[theirs.adapter_id].artifact


async def test_new_weights_under_a_name_are_a_new_version_and_the_old_one_drains_after_the_switch(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        old = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        new = await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path)
        assert (new.version, new.serving) == (2, True)
        await manager.in_state("sales", "tone", "unloaded", version=1)
        assert [(type(c), c.adapter_id) for c in worker.commands] == [
            (LoadAdapter, old.adapter_id),
            (LoadAdapter, new.adapter_id),
            (DrainAdapter, old.adapter_id),
        ]
        assert await manager.held("sales") == SLOT_BYTES


async def test_an_upgrade_without_room_is_refused_with_the_figures_and_drain_first_is_offered(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales", quota=SLOT_BYTES)
        old = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        with pytest.raises(QuotaExceeded, match="--drain-first") as refused:
            await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path)
        figures = refused.value.fields
        assert (figures["asked_bytes"], figures["held_bytes"], figures["limit_bytes"], figures["scope"]) == (
            SLOT_BYTES,
            SLOT_BYTES,
            SLOT_BYTES,
            "tenant",
        )
        assert (await manager.show("sales", "tone")).adapter_id == old.adapter_id
        assert len(worker.commands) == 1
        assert await manager.held("sales") == SLOT_BYTES

        await manager.ask(admin.UpdateTenant(name="sales", upgrade_headroom_bytes=SLOT_BYTES))
        new = await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path)
        assert new.serving


async def test_drain_first_gives_the_old_versions_room_to_the_new_one(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales", quota=SLOT_BYTES)
        old = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        worker.open.clear()
        async with asyncio.TaskGroup() as group:
            adding = group.create_task(manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path, drain_first=True))
            await manager.in_state("sales", "tone", "draining", version=1)
            pool = await manager.pool()
            assert pool.aliases["sales"] == {}
            assert {mount.state for mount in pool.mounts.values()} == {AdapterState.DRAINING, AdapterState.ADMITTED}
            assert await manager.held("sales") == SLOT_BYTES
            worker.open.set()
        assert adding.result().version == 2
        assert [type(c) for c in worker.commands] == [LoadAdapter, DrainAdapter, LoadAdapter]
        assert list((await manager.pool()).mounts) == [adding.result().adapter_id]
        assert old.adapter_id != adding.result().adapter_id


async def test_an_unloaded_adapter_leaves_the_routes_at_once_and_its_room_when_drained(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        worker.open.clear()
        (view,) = await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone"))
        assert view["state"] == "draining"
        assert (await manager.pool()).aliases["sales"] == {}
        assert await manager.held("sales") == SLOT_BYTES
        worker.open.set()
        await manager.in_state("sales", "tone", "unloaded")
        assert await manager.held("sales") == 0


async def test_what_was_unloaded_is_mounted_again_from_its_artifact_under_the_same_version(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        first = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        again = msgspec.convert(await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0)), admin.AdapterView)
        assert (again.state, again.version, again.adapter_id) == ("ready", 1, first.adapter_id)
        with pytest.raises(NotFound, match="nothing is uploaded under sales/other"):
            await manager.ask(admin.AddAdapter(tenant="sales", name="other"))


async def test_another_mode_than_draining_is_refused_with_the_reason(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        with pytest.raises(Unsupported, match="by draining") as refused:
            await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", mode="force"))
        assert refused.value.fields["field"] == "mode"
        assert (await manager.pool()).mounts[view.adapter_id].state is AdapterState.READY


async def test_a_load_that_fails_on_the_worker_is_told_and_holds_nothing(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        worker.fail_with = ErrorInfo(code="load_failed", message="no module matched", fields={"reason": "no_module_matched"})
        with pytest.raises(LoadFailed, match="no module matched"):
            await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        view = await manager.in_state("sales", "tone", "failed")
        assert view.error is not None
        assert view.error.fields == {"reason": "no_module_matched"}
        assert (await manager.pool()).mounts == {}
        worker.fail_with = None
        again = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        assert (again.state, again.version) == ("ready", 1)


async def test_a_failed_upgrade_leaves_the_old_version_serving(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        old = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        worker.fail_with = ErrorInfo(code="load_failed", message="the probe saw no difference")
        with pytest.raises(LoadFailed):
            await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path)
        pool = await manager.pool()
        assert pool.aliases["sales"] == {"tone": old.adapter_id}
        assert list(pool.mounts) == [old.adapter_id]


async def test_a_second_upgrade_while_the_first_still_loads_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        worker.open.clear()
        await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path, wait_s=0.0)
        with pytest.raises(Conflict, match="version 2 of tone is still loading"):
            await manager.add("sales", "tone", adapter(tmp_path, 3), tmp_path)
        worker.open.set()
        await manager.in_state("sales", "tone", "ready", version=2)


async def test_a_stale_acknowledgement_changes_nothing(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        old_drain = worker.commands[-1]
        await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0))
        worker.open.clear()
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone"))
        before = await manager.pool()
        await worker.acknowledge(old_drain)
        await worker.acknowledge(worker.commands[0])
        await worker.acknowledge(msgspec.structs.replace(old_drain, generation=1 << 40), incarnation="another")
        await worker.acknowledge(msgspec.structs.replace(old_drain, generation=1 << 40), worker_id="w9")
        await worker.acknowledge(msgspec.structs.replace(old_drain, generation=1 << 40, adapter_id="ad_unknown"))
        acks = bus.js

        async def all_taken() -> bool:
            info = await acks.consumer_info(adapters.ACKS_STREAM, "registry")
            return info.num_pending == 0 and info.num_ack_pending == 0

        await until_async(all_taken, what="the acknowledgements were taken")
        assert await manager.pool() == before
        assert before.mounts[view.adapter_id].state is AdapterState.DRAINING
        worker.open.set()
        await manager.in_state("sales", "tone", "unloaded")
