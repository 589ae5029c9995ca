"""Registries killed with kill -9 at random moments, under uploads, upgrades and unloads: nothing is lost, nothing stays half done."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus, open_bucket, open_objects, publish_durable
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, admin, state
from shared.contracts.adapters import AdapterState, OnboardAdapter
from shared.contracts.state import AdapterRecord, Intake
from shared.errors import NoFreeSlot, QuotaExceeded, TenantryError
from shared.policy.admission import held_bytes
from shared.policy.placement import slots_held
from tests import adapters_factory as factory
from tests.integration.registry_rig import BASE, SLOT_BYTES, Admin, FakeWorker, obeying
from tests.integration.test_registry_adapters import adapter
from tests.integration.test_registry_audit import all_is_told, records_of
from tests.waiting import until_async

ENDS = frozenset({AdapterState.READY, AdapterState.UNLOADED, AdapterState.FAILED, AdapterState.REJECTED})
SETTINGS = {
    "TENANTRY_REGISTRY_RECONCILE_S": "0.1",
    "TENANTRY_REGISTRY_REISSUE_S": "0.5",
    "TENANTRY_REGISTRY_ABANDONED_S": "1.5",
    "TENANTRY_REGISTRY_HOUSEKEEPING_S": "0.5",
}


class RegistryProcess:
    """`python -m services.registry`, killed and started again at will."""

    def __init__(self, server: EmbeddedNats, folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENANTRY_")}
        self._env = {**kept, **SETTINGS, "TENANTRY_NATS_URL": server.url, "TENANTRY_REGISTRY_WORK_DIR": str(folder)}
        self._log = folder / "registry.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.registry", env=self._env, stdout=log, stderr=log
            )

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 20)


class SlowWorker(FakeWorker):
    """Takes its time over every command, so that kills fall between order and acknowledgement."""

    def __init__(self, bus: Bus, moments: random.Random) -> None:
        super().__init__(bus)
        self._moments = moments

    async def acknowledge(self, command: adapters.Command, **changes: object) -> None:
        await asyncio.sleep(self._moments.uniform(0.0, 0.15))
        await super().acknowledge(command, **changes)


async def answers(manager: Admin) -> bool:
    try:
        await manager.ask(admin.GetMatrix(), timeout_s=1.0)
    except TenantryError:
        return False
    return True


async def quiet(manager: Admin) -> None:
    """Nothing is under way any more: every record has ended or serves, and every mount serves."""

    async def is_quiet() -> bool:
        pool = await manager.pool()
        records = await records_of(manager.bus)
        return all(mount.state is AdapterState.READY for mount in pool.mounts.values()) and all(r.state in ENDS for r in records)

    await until_async(is_quiet, timeout_s=30, what="all is quiet")


async def nothing_is_half_done(manager: Admin, quotas: dict[str, int]) -> None:
    pool, records = await manager.pool(), {record.adapter_id: record for record in await records_of(manager.bus)}
    for adapter_id, mount in pool.mounts.items():
        record = records[adapter_id]
        assert (record.state, record.version, record.digest) == (mount.state, mount.version, mount.digest)
        assert pool.aliases[mount.tenant][mount.name] == adapter_id
    assert {r.adapter_id for r in records.values() if r.state is AdapterState.READY} == set(pool.mounts)
    for record in records.values():
        assert record.state is not AdapterState.FAILED, record.error
        assert (record.error is not None) == (record.state is AdapterState.REJECTED)
    for tenant, quota in quotas.items():
        held = sum(mount.slot_bytes for mount in pool.mounts.values() if mount.tenant == tenant)
        assert await manager.held(tenant) == held <= quota
    for worker in pool.workers.values():
        assert slots_held(pool, worker.worker_id) <= worker.limits.slots
    by_bytes = [(record.tenant, record.name, record.digest) for record in records.values() if record.digest]
    assert len(by_bytes) == len(set(by_bytes)), "the same bytes under one name are one version"
    versions = [(record.tenant, record.name, record.version) for record in records.values() if record.version]
    assert len(versions) == len(set(versions))
    kept = await (await open_objects(manager.bus, adapters.ARTIFACTS_BUCKET)).names()
    assert set(kept) == {record.artifact for record in records.values() if record.artifact}
    for mount in pool.mounts.values():
        assert held_bytes(pool, mount.tenant_id, mount.name) == mount.slot_bytes


@pytest.fixture
async def cluster(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> AsyncIterator[tuple[Admin, list[RegistryProcess]]]:
    """Two registry processes, of which the first is up."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    registries = [RegistryProcess(nats_server, folder) for folder in folders]
    manager = Admin(bus)
    await registries[0].start()
    await until_async(lambda: answers(manager), timeout_s=30, what="the registry answers")
    yield manager, registries
    for registry in registries:
        if registry.process is not None and registry.process.returncode is None:
            await registry.end()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_registry_killed_at_random_moments_loses_nothing_and_leaves_nothing_half_done(
    cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path, seed: int
) -> None:
    manager, (registry, _) = cluster
    moments = random.Random(seed)
    quotas = {"sales": 3 * SLOT_BYTES, "cs": 2 * SLOT_BYTES}
    archives = [factory.pack(adapter(tmp_path, n), "tar.gz") for n in range(6)]
    for name, quota in quotas.items():
        await manager.tenant(name, quota=quota)
    accepted: set[tuple[str, str, str]] = set()

    async def meddle() -> None:
        tenant, name = moments.choice(["sales", "cs"]), moments.choice(["one", "two"])
        try:
            if moments.random() < 0.75:
                view = await manager.add(
                    tenant, name, moments.choice(archives), tmp_path, drain_first=moments.random() < 0.5, wait_s=moments.choice([0.0, 2.0])
                )
                accepted.add((tenant, name, view.digest))
            else:
                await manager.ask(admin.UnloadAdapter(tenant=tenant, name=name))
        except TenantryError:
            return  # refused, or its registry died: either is legitimate, what counts is what is left

    async with obeying(SlowWorker(manager.bus, moments)):
        manager.patience_s = 3.0  # a killed registry answers nobody
        for _ in range(5):
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(meddle())
                await asyncio.sleep(moments.uniform(0.02, 0.5))
                await registry.end()
                await registry.start()
                await until_async(lambda: answers(manager), timeout_s=30, what="the registry answers again")
        manager.patience_s = 20.0
        await quiet(manager)
        await nothing_is_half_done(manager, quotas)
        await all_is_told(manager)
        known = {(record.tenant, record.name, record.digest) for record in await records_of(manager.bus)}
        assert accepted <= known
        final = (
            await manager.add("sales", "last", factory.pack(adapter(tmp_path, 99), "tar"), tmp_path) if await _has_room(manager) else None
        )
        assert final is None or final.state == "ready"


async def _has_room(manager: Admin) -> bool:
    return await manager.held("sales") + SLOT_BYTES <= 3 * SLOT_BYTES and len((await manager.pool()).mounts) < 4


async def test_an_upload_whose_registry_died_is_taken_up_by_another(cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path) -> None:
    manager, (registry, other) = cluster
    made = await manager.tenant("sales")
    await other.start()
    async with obeying(FakeWorker(manager.bus)):
        staged = await manager.stage(adapter(tmp_path), tmp_path)
        # as a registry leaves it that dies right after it has taken the request
        record = AdapterRecord(
            adapter_id="ad_abandoned",
            tenant_id=made.tenant_id,
            tenant="sales",
            name="tone",
            version=0,
            digest="",
            pool_id="main",
            state=AdapterState.VALIDATING,
            intake=Intake(bucket=adapters.STAGING_BUCKET, object=staged, starts=1, beat=3),
            history=(state.HistoryStep(state=AdapterState.VALIDATING, at="2026-01-01T00:00:00.000000Z"),),
        )
        catalog = await open_bucket(manager.bus, state.CATALOG_BUCKET)
        await catalog.create("adapter.ad_abandoned", state.encode(record))
        await registry.end()
        view = await manager.in_state("sales", "tone", "ready")
        assert (view.adapter_id, view.version) == ("ad_abandoned", 1)
        await nothing_is_half_done(manager, {"sales": made.vram_quota_bytes})


async def test_an_abandoned_upload_that_cannot_be_taken_up_is_rejected_with_the_reason(
    cluster: tuple[Admin, list[RegistryProcess]],
) -> None:
    manager, _ = cluster
    made = await manager.tenant("sales")
    async with obeying(FakeWorker(manager.bus)):
        record = AdapterRecord(
            adapter_id="ad_abandoned",
            tenant_id=made.tenant_id,
            tenant="sales",
            name="tone",
            version=0,
            digest="",
            pool_id="main",
            state=AdapterState.UPLOADED,
            intake=Intake(bucket=adapters.STAGING_BUCKET, object="never-arrived"),
            history=(state.HistoryStep(state=AdapterState.UPLOADED, at="2026-01-01T00:00:00.000000Z"),),
        )
        catalog = await open_bucket(manager.bus, state.CATALOG_BUCKET)
        await catalog.create("adapter.ad_abandoned", state.encode(record))
        view = await manager.in_state("sales", "tone", "rejected")
        assert view.error is not None
        assert view.error.code == "not_found"


async def test_an_onboarding_whose_registry_died_ends_in_an_outcome(cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path) -> None:
    manager, (registry, _) = cluster
    made = await manager.tenant("sales", nats_password=True)
    async with obeying(FakeWorker(manager.bus)):
        staged = await manager.stage(adapter(tmp_path), tmp_path, bucket=adapters.uploads_bucket(made.tenant_id))
        request = OnboardAdapter(name="tone", object=staged, request="r1")
        await publish_durable(manager.bus, adapters.onboard_subject(made.tenant_id), adapters.encode(request))
        await registry.end()
        await registry.start()

        async def told() -> bool:
            try:
                events = await manager.events("sales", "tone")
            except TenantryError:
                return False
            return any(event.state is AdapterState.READY and event.request == "r1" for event in events)

        await until_async(told, timeout_s=60, what="the tenant is told that it is ready")
        await quiet(manager)
        await nothing_is_half_done(manager, {"sales": made.vram_quota_bytes})


async def test_two_registries_at_once_give_no_room_twice(cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path) -> None:
    manager, (_, other) = cluster
    await other.start()
    await manager.tenant("sales", quota=2 * SLOT_BYTES)
    await manager.tenant("cs", quota=10 * SLOT_BYTES)
    archives = [factory.pack(adapter(tmp_path, n), "tar") for n in range(8)]
    refusals: list[TenantryError] = []

    async def add(tenant: str, n: int) -> None:
        try:
            await manager.add(tenant, f"tone{n}", archives[n], tmp_path)
        except TenantryError as error:
            refusals.append(error)

    async with obeying(FakeWorker(manager.bus)):
        async with asyncio.TaskGroup() as group:
            for n in range(8):
                group.create_task(add("sales" if n < 4 else "cs", n))
        await quiet(manager)
        pool = await manager.pool()
        assert await manager.held("sales") <= 2 * SLOT_BYTES
        assert len(pool.mounts) == 4, "every slot is used, none twice"
        assert len(refusals) == 4
        assert all(isinstance(error, QuotaExceeded | NoFreeSlot) for error in refusals)


async def test_a_registry_told_to_stop_ends_cleanly_and_its_folder_is_gone(
    cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path
) -> None:
    manager, (registry, _) = cluster
    await manager.tenant("sales")
    async with obeying(FakeWorker(manager.bus)):
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        assert await registry.end(signal.SIGTERM) == 0
        assert list((tmp_path / "one").glob("tenantry-*")) == []
    assert BASE.identity in msgspec.json.encode(await manager.pool()).decode()
