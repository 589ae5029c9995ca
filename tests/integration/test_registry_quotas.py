"""Limits of a tenant as managers set and see them, and the two that are enforced where uploads come in."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.registry.store import Store
from shared.bus import Bucket, Bus, BusSettings, Entry, connect, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, state, tenancy
from shared.contracts.tenancy import TenantLimits
from shared.errors import (
    ArtifactQuotaExceeded,
    Conflict,
    HostCacheExceeded,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    TenantryError,
)
from tests.integration.registry_rig import LIMITS, POOL, Admin, FakeWorker, obeying, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until_async

WITH_KV = msgspec.structs.replace(LIMITS, kv_blocks=100, kv_block_bytes=10)


async def limited(manager: Admin, name: str, **limits: Any) -> admin.TenantView:
    return msgspec.convert(await manager.ask(admin.UpdateTenant(name=name, limits=limits)), admin.TenantView)


async def shown(manager: Admin, name: str) -> admin.TenantView:
    return msgspec.convert(await manager.ask(admin.ShowTenant(name=name)), admin.TenantView)


def figure(view: admin.TenantView, resource: str) -> tuple[int, int, int | None]:
    found = next(figure for figure in view.figures if figure.resource == resource)
    return found.asked, found.held, found.allowed


async def shares_of(bus: Bus, tenant_id: str) -> tenancy.TenantShares | None:
    found = await (await open_bucket(bus, state.STATE_BUCKET)).get(tenancy.shares_key(POOL, tenant_id))
    return tenancy.decode_shares(found.value) if found is not None else None


async def test_limits_are_set_changed_one_by_one_and_taken_away(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        made = await manager.tenant("sales", limits={"max_concurrent": 4, "weight": 3})
        assert made.limits == TenantLimits(max_concurrent=4, weight=3)
        assert (await limited(manager, "sales", requests_per_minute=60)).limits.max_concurrent == 4
        after = await limited(manager, "sales", max_concurrent=None)
        assert after.limits == TenantLimits(weight=3, requests_per_minute=60)
        assert figure(after, "requests_per_minute") == (0, 0, 60)
        assert figure(after, "concurrent") == (0, 0, None)
        entry = await shares_of(bus, made.tenant_id)
        assert entry is not None
        assert entry.limits == after.limits, "workers know at once"


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_concurrent": -1}, "limits.max_concurrent"),
        ({"kv_quota_bytes": 2**60}, "limits.kv_quota_bytes"),
        ({"weight": "heavy"}, "limits.weight"),
        ({"concurrency": 1}, "limits.concurrency"),
    ],
)
async def test_wrong_limits_are_refused_by_name_and_change_nothing(bus: Bus, limits: dict[str, Any], field: str) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        for request in (admin.CreateTenant(name="new", limits=limits), admin.UpdateTenant(name="sales", limits=limits)):
            if isinstance(request, admin.UpdateTenant):
                await manager.tenant("sales")
            with pytest.raises(InvalidRequest) as caught:
                await manager.ask(request)
            assert caught.value.fields["field"] == field
        assert (await shown(manager, "sales")).limits == TenantLimits()
        with pytest.raises(NotFound):
            await shown(manager, "new")


@pytest.mark.parametrize("changes", [{"vram_quota_bytes": 2**62}, {"upgrade_headroom_bytes": -1}, {"adapter_ceilings": {"tone": 2**62}}])
async def test_absurd_quotas_are_refused_by_name(bus: Bus, changes: dict[str, Any]) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        with pytest.raises(InvalidRequest) as caught:
            await manager.ask(admin.UpdateTenant(name="sales", **changes))
        assert caught.value.fields["field"].startswith(next(iter(changes)))


async def test_what_is_guaranteed_in_sum_fits_the_pools_kv_cache(bus: Bus) -> None:
    async with small_cluster(bus, limits=WITH_KV) as (manager, _):
        sales = await manager.tenant("sales", limits={"kv_quota_bytes": 600})
        await manager.tenant("cs")
        with pytest.raises(QuotaExceeded) as caught:
            await limited(manager, "cs", kv_quota_bytes=401)
        assert {name: caught.value.fields[name] for name in ("asked_bytes", "held_bytes", "limit_bytes", "field")} == {
            "asked_bytes": 401,
            "held_bytes": 600,
            "limit_bytes": 1000,
            "field": "limits.kv_quota_bytes",
        }
        assert (await shown(manager, "cs")).limits.kv_quota_bytes is None
        with pytest.raises(QuotaExceeded):
            await manager.tenant("hr", limits={"kv_quota_bytes": 401})
        assert (await manager.pool()).guaranteed == {sales.tenant_id: 600}
        await limited(manager, "cs", kv_quota_bytes=400)
        assert (await limited(manager, "sales", kv_quota_bytes=100)).notes == ()
        await limited(manager, "cs", kv_quota_bytes=900)
        await manager.ask(admin.DeleteTenant(name="cs"))
        assert (await manager.pool()).guaranteed == {sales.tenant_id: 100}


async def test_a_kv_quota_is_refused_while_a_worker_has_not_said_what_it_has(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        with pytest.raises(QuotaExceeded, match="has not said how large its KV cache is") as caught:
            await manager.tenant("sales", limits={"kv_quota_bytes": 1})
        assert (caught.value.fields["field"], caught.value.fields["asked_bytes"]) == ("limits.kv_quota_bytes", 1)
        await manager.tenant("sales", limits={"max_concurrent": 1})


async def test_a_worker_that_does_not_say_what_it_has_is_told_beside_a_tenants_kv_quota(bus: Bus) -> None:
    async with small_cluster(bus, limits=WITH_KV) as (manager, _):
        await manager.tenant("sales", limits={"kv_quota_bytes": 100})
        await FakeWorker(bus, "w2").hello()
        assert "w2 has not said" in (await shown(manager, "sales")).notes[0]


async def test_a_pool_that_shrinks_below_what_it_guarantees_says_so_and_grows_out_of_it(bus: Bus) -> None:
    async with small_cluster(bus, limits=WITH_KV) as (manager, _):
        await FakeWorker(bus, "w2", limits=WITH_KV).hello()
        made = await manager.tenant("sales", limits={"kv_quota_bytes": 1500})
        assert made.notes == ()
        await manager.ask(admin.RemoveWorker(pool_id=POOL, worker_id="w2"))
        assert (
            "1500 bytes of KV cache are guaranteed, its workers have 1000; each guarantee counts for 67%"
            in (await shown(manager, "sales")).notes[0]
        )
        (pool,) = msgspec.convert(await manager.ask(admin.ListPools()), list[admin.PoolView])
        assert (pool.kv_cache_bytes, pool.kv_guaranteed_bytes, len(pool.notes)) == (1000, 1500, 1)
        entry = await shares_of(bus, made.tenant_id)
        assert entry is not None
        assert {w: (share.kv_bytes, share.assured_kv_bytes) for w, share in entry.workers.items()} == {"w1": (1000, 1000)}
        with pytest.raises(QuotaExceeded):
            await manager.tenant("cs", limits={"kv_quota_bytes": 1})
        await FakeWorker(bus, "w3", limits=WITH_KV).hello()
        assert (await shown(manager, "sales")).notes == ()


async def test_a_pool_that_comes_later_guarantees_what_fits_and_the_rest_is_told(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales", limits={"kv_quota_bytes": 700})
        await manager.tenant("cs", limits={"kv_quota_bytes": 700})
        async with obeying(FakeWorker(bus, limits=WITH_KV)):

            async def guaranteed() -> bool:
                return list((await manager.pool()).guaranteed.values()) == [700]

            await until_async(guaranteed, what="one of them fits")
            notes = [(await shown(manager, name)).notes for name in ("sales", "cs")]
            assert sorted(map(len, notes)) == [0, 1]


async def test_files_beyond_the_artifact_quota_are_refused_and_room_comes_back_with_what_is_removed(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        size = figure(await shown(manager, "sales"), "artifact_bytes")[1]
        assert size > 0
        await limited(manager, "sales", artifact_bytes=2 * size - 1)
        mail = adapter(tmp_path, 2)
        with pytest.raises(ArtifactQuotaExceeded) as caught:
            await manager.add("sales", "mail", mail, tmp_path)
        assert caught.value.fields["asked_bytes"] + caught.value.fields["held_bytes"] > caught.value.fields["limit_bytes"]
        assert caught.value.fields["held_bytes"] == size
        assert figure(await shown(manager, "sales"), "artifact_bytes") == (0, size, 2 * size - 1)
        assert (await shown(manager, "sales")).over_quota == ()
        lowered = await limited(manager, "sales", artifact_bytes=size - 1)
        assert (lowered.over_quota, figure(lowered, "artifact_bytes")) == (("artifact_bytes",), (0, size, size - 1))
        await limited(manager, "sales", artifact_bytes=2 * size - 1)
        with pytest.raises(Conflict, match="unload it first"):
            await manager.ask(admin.RemoveAdapter(tenant="sales", name="tone"))
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        await manager.ask(admin.RemoveAdapter(tenant="sales", name="tone"))
        assert figure(await shown(manager, "sales"), "artifact_bytes")[1] == 0
        with pytest.raises(NotFound):
            await manager.show("sales", "tone")
        assert (await manager.add("sales", "mail", mail, tmp_path)).state == "ready"


async def test_uploads_at_the_same_time_do_not_pass_the_artifact_quota_together(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    """One registry takes a tenant's uploads one after the other; several do not wait for each other."""
    async with AsyncExitStack() as stack:
        manager, _ = await stack.enter_async_context(small_cluster(bus, limits=msgspec.structs.replace(LIMITS, slots=8)))
        for number in range(3):
            own = await connect(BusSettings(url=nats_server.url, name=f"registry{number}"))
            stack.push_async_callback(own.close)
            await stack.enter_async_context(running_registry(own))
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        size = figure(await shown(manager, "sales"), "artifact_bytes")[1]
        await limited(manager, "sales", artifact_bytes=3 * size + size // 2)
        folders = [tmp_path / f"at-once-{i}" for i in range(8)]
        for folder in folders:
            folder.mkdir()

        async def add(number: int) -> bool:
            try:
                await manager.add("sales", f"a{number}", adapter(folders[number], 10 + number), folders[number])
            except ArtifactQuotaExceeded:
                return False
            return True

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(add(number)) for number in range(len(folders))]
        assert sum(task.result() for task in tasks) == 2
        asked, held, allowed = figure(await shown(manager, "sales"), "artifact_bytes")
        assert held <= (allowed or 0)
        assert asked == 0


async def test_more_than_a_workers_host_cache_may_keep_of_a_tenant_is_refused_with_the_figures(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        held = figure(await shown(manager, "sales"), "host_cache_bytes")[1]
        await limited(manager, "sales", host_cache_bytes=held)
        with pytest.raises(HostCacheExceeded) as caught:
            await manager.add("sales", "mail", adapter(tmp_path, 2), tmp_path)
        assert caught.value.fields["asked_bytes"] > 0
        assert (caught.value.fields["held_bytes"], caught.value.fields["limit_bytes"]) == (held, held)
        assert len(worker.commands) == 1
        over = await limited(manager, "sales", host_cache_bytes=held - 1)
        assert over.over_quota == ("host_cache_bytes",)


@pytest.mark.parametrize(
    ("prefix", "changes", "error"),
    [
        (state.POOL_PREFIX, {"vram_quota_bytes": 0}, QuotaExceeded),
        (state.POOL_PREFIX, {"limits": {"host_cache_bytes": 0}}, HostCacheExceeded),
        (state.STORED_PREFIX, {"limits": {"artifact_bytes": 1}}, ArtifactQuotaExceeded),
    ],
)
async def test_what_was_decided_before_a_limit_was_lowered_is_not_written_after_it(
    bus: Bus, tmp_path: Path, prefix: str, changes: dict[str, Any], error: type[TenantryError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered, whole, between the decision to let an adapter in and its compare-and-set."""
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        change, left = Store.change, [1]

        async def with_a_pause(self: Store, bucket: Bucket, key: str, decide: Callable[[Entry | None], Awaitable[bytes | None]]) -> int:
            async def decided(entry: Entry | None) -> bytes | None:
                value = await decide(entry)
                if key.startswith(prefix) and value is not None and (entry is None or value != entry.value) and left:
                    left.pop()
                    await manager.ask(admin.UpdateTenant(name="sales", **changes))
                return value

            return await change(self, bucket, key, decided)

        monkeypatch.setattr(Store, "change", with_a_pause)
        with pytest.raises(error):
            await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        assert left == []
        assert worker.commands == []
        assert await manager.held("sales") == 0


async def test_the_ledger_of_stored_files_is_put_right(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        made = await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        size = figure(await shown(manager, "sales"), "artifact_bytes")[1]
        catalog = await open_bucket(bus, state.CATALOG_BUCKET)
        await catalog.put(state.STORED_PREFIX + made.tenant_id, state.encode(state.StoredFiles(files={"ad_gone": 5})))

        async def right() -> bool:
            return figure(await shown(manager, "sales"), "artifact_bytes")[1] == size

        await until_async(right, what="the ledger says what is stored")


async def test_an_adapter_of_another_tenant_cannot_be_removed_and_is_not_told_from_one_that_does_not_exist(
    bus: Bus, tmp_path: Path
) -> None:
    async with small_cluster(bus) as (manager, _):
        for name in ("sales", "cs"):
            await manager.tenant(name)
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        refusals: list[TenantryError] = []
        for name in ("tone", "none"):
            with pytest.raises(NotFound) as caught:
                await manager.ask(admin.RemoveAdapter(tenant="cs", name=name))
            refusals.append(caught.value)
        assert refusals[0].message.replace("tone", "none") == refusals[1].message


async def test_shares_go_with_their_tenant_and_come_back_when_lost(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, worker):
        made = await manager.tenant("sales", limits={"max_concurrent": 4})
        bucket = await open_bucket(bus, state.STATE_BUCKET)
        await bucket.delete(tenancy.shares_key(POOL, made.tenant_id))

        async def back() -> bool:
            entry = await shares_of(bus, made.tenant_id)
            return entry is not None and entry.workers[worker.worker_id].concurrent == 4

        await until_async(back, what="the reconciler made it again")
        await manager.ask(admin.DeleteTenant(name="sales"))
        assert await shares_of(bus, made.tenant_id) is None
        await bucket.put(tenancy.shares_key(POOL, "tn_gone"), tenancy.encode(LEFT_OVER))

        async def gone() -> bool:
            return await bucket.get(tenancy.shares_key(POOL, "tn_gone")) is None

        await until_async(gone, what="what belongs to nobody is deleted")


async def test_a_workers_parts_stand_before_its_hello_is_answered_and_go_when_it_is_removed(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        tenants = [await manager.tenant(f"t{i}", limits={"max_concurrent": 5}) for i in range(20)]
        second = FakeWorker(bus, "w2")
        await second.hello()
        for tenant in tenants:
            entry = await shares_of(bus, tenant.tenant_id)
            assert entry is not None
            assert entry.workers["w2"].incarnation == second.incarnation
        await manager.ask(admin.RemoveWorker(pool_id=POOL, worker_id="w1"))
        for tenant in tenants:
            entry = await shares_of(bus, tenant.tenant_id)
            assert entry is not None
            assert {worker_id: share.concurrent for worker_id, share in entry.workers.items()} == {"w2": 5}


async def test_gateway_traffic_without_a_tenant_has_shares_too_and_is_not_limited(bus: Bus) -> None:
    async with small_cluster(bus) as (_, worker):
        entry = await shares_of(bus, tenancy.GATEWAY_TENANT)
        assert entry is not None
        assert entry.workers[worker.worker_id].concurrent is None
        assert entry.limits == TenantLimits()


LEFT_OVER = tenancy.TenantShares(tenant_id="tn_gone", tenant="gone", limits=TenantLimits())
