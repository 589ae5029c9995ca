"""Two workers, four routers, several registries: what a tenant uses of the pool is never more than its quota, and follows its work."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from shared.bus import Bus, BusSettings, connect, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, state, tenancy
from shared.contracts.tenancy import TenantShares
from shared.runtime import end
from tests.integration.registry_rig import POOL, QUICK, Admin, running_registry
from tests.share_pool import ShareWorker, Tally, route, watching
from tests.waiting import until, until_async

SETTINGS = msgspec.structs.replace(QUICK, shares_s=0.03)
KV, CONCURRENT = 1000, 10


@asynccontextmanager
async def registries(server: EmbeddedNats, count: int) -> AsyncIterator[Admin]:
    async with AsyncExitStack() as stack:
        buses: list[Bus] = []
        for number in range(count):
            bus = await connect(BusSettings(url=server.url, name=f"registry{number}"))
            stack.push_async_callback(bus.close)
            buses.append(bus)
        for bus in buses:
            await stack.enter_async_context(running_registry(bus, SETTINGS))
        yield Admin(buses[0])


@asynccontextmanager
async def working(*workers: ShareWorker) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            await worker.hello()
        tasks = [group.create_task(worker.run()) for worker in workers]
        await until(lambda: all(worker.share is not None and worker.share.concurrent for worker in workers), what="everybody has a part")
        try:
            yield
        finally:
            await end(tasks)


async def entry_of(bus: Bus, tenant_id: str) -> TenantShares:
    found = await (await open_bucket(bus, state.STATE_BUCKET)).get(tenancy.shares_key(POOL, tenant_id))
    assert found is not None
    return tenancy.decode_shares(found.value)


async def test_the_sum_over_the_pool_is_never_above_the_quota_and_room_follows_the_work(nats_server: EmbeddedNats, bus: Bus) -> None:
    async with registries(nats_server, 3) as manager:
        tenant = await manager.tenant("sales", limits={"kv_quota_bytes": KV, "max_concurrent": CONCURRENT})
        pool = [ShareWorker(bus, f"w{number}", tenant.tenant_id) for number in (1, 2)]
        tally = Tally(KV, CONCURRENT)
        async with working(*pool), watching(bus, tenant.tenant_id, tally):
            async with asyncio.TaskGroup() as routers:
                for number in range(4):
                    routers.create_task(route(pool, tally, 400, random.Random(number), favourite_every=200))
            await until(lambda: sum(worker.running for worker in pool) == 0)
        assert tally.overdrafts == 0
        assert tally.attempts == 1600
        assert min(tally.admitted.values()) > 50
        assert tally.entries > 4, "parts moved"


async def test_a_worker_that_dies_leaves_its_part_to_its_successor_and_a_removed_one_to_the_others(
    nats_server: EmbeddedNats, bus: Bus
) -> None:
    async with registries(nats_server, 2) as manager:
        tenant = await manager.tenant("sales", limits={"kv_quota_bytes": KV, "max_concurrent": CONCURRENT})
        first, second = (ShareWorker(bus, f"w{number}", tenant.tenant_id) for number in (1, 2))
        async with working(first, second):
            while first.admit(1):
                pass
        again = ShareWorker(bus, "w1", tenant.tenant_id)
        async with working(again, second):
            assert again.share is not None
            assert again.share.held_concurrent == again.share.concurrent
            await manager.ask(admin.RemoveWorker(pool_id=POOL, worker_id="w2"))
            await until(lambda: again.share is not None and again.share.concurrent == CONCURRENT, what="it has all of it")


@pytest.mark.parametrize(
    ("limit", "lowered", "resource", "each"), [("max_concurrent", 4, "concurrent", 1), ("kv_quota_bytes", 400, "kv_bytes", 100)]
)
async def test_a_lowered_quota_lets_nothing_in_until_less_is_held_and_is_told_as_over(
    nats_server: EmbeddedNats, bus: Bus, limit: str, lowered: int, resource: str, each: int
) -> None:
    async with registries(nats_server, 2) as manager:
        tenant = await manager.tenant("sales", limits={"kv_quota_bytes": KV, "max_concurrent": CONCURRENT})
        pool = [ShareWorker(bus, f"w{number}", tenant.tenant_id) for number in (1, 2)]
        part, held_part = ("concurrent", "held_concurrent") if resource == "concurrent" else ("kv_bytes", "held_kv_bytes")

        def parts() -> int:
            return sum(getattr(worker.share, part) or 0 for worker in pool if worker.share)

        async with working(*pool):
            before = parts()
            for worker in pool:
                while worker.admit(each):
                    pass
            assert sum(worker.running for worker in pool) == CONCURRENT
            view = msgspec.convert(await manager.ask(admin.UpdateTenant(name="sales", limits={limit: lowered})), admin.TenantView)
            assert getattr(view.limits, limit) == lowered < before
            await until(lambda: parts() == lowered)
            assert sum(worker.running for worker in pool) == CONCURRENT, "nothing was cut off"
            assert not any(worker.admit(each) for worker in pool)

            async def told() -> bool:
                shown = msgspec.convert(await manager.ask(admin.ShowTenant(name="sales")), admin.TenantView)
                figure = next(figure for figure in shown.figures if figure.resource == resource)
                return shown.over_quota == (resource,) and (figure.held, figure.allowed) == (CONCURRENT * each, lowered)

            await until_async(told, what="it is reported as over quota")
            for worker in pool:
                while worker.running:
                    worker.leave(each)

            async def agreed() -> bool:
                entry = await entry_of(bus, tenant.tenant_id)
                return sum(getattr(share, held_part) for share in entry.workers.values()) == lowered

            await until_async(agreed, what="what is held has come down")
            assert any(worker.admit(each) for worker in pool)
