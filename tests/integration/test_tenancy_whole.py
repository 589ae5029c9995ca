"""Registry, two workers and four routers as they are: a tenant's flood over all of them stays within its quota at every moment.

Each quota is tried where it is the one that binds, and beside it the same flood where every worker is given the whole quota: the
watch must see that.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.router.settings import RouterSettings
from services.router.stack import Router
from services.worker.scripted_engine import KV_BLOCK_BYTES, ScriptedSettings
from shared.bus import Bus, BusSettings, connect
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin
from shared.contracts.tenancy import TenantShares
from shared.contracts.workers import TenantUse
from shared.policy.shares import decide
from shared.runtime import Stop
from tests.integration.registry_rig import QUICK, Admin, running_registry
from tests.router_fakes import until_ready
from tests.waiting import until, until_async
from tests.worker_peers import WorkerHere, worker_here

CONCURRENT, KV_BYTES = 6, 18 * KV_BLOCK_BYTES


@asynccontextmanager
async def routers(server: EmbeddedNats, count: int) -> AsyncIterator[list[httpx.AsyncClient]]:
    clients: list[httpx.AsyncClient] = []
    running: list[tuple[Stop, asyncio.Task[None]]] = []
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            router = Router(RouterSettings(port=0, grace_s=1.0), f"r{number}")
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.listen()}", trust_env=False, timeout=60)
            stop = Stop()
            bus = await connect(BusSettings(url=server.url, name="router"))
            running.append((stop, group.create_task(router.run(bus, stop))))
            clients.append(client)
            await until_ready(client)
        yield clients
        for client in clients:
            await client.aclose()
        for stop, task in running:
            stop.set("the test is over")
            await asyncio.wait([task], timeout=20)


class Watch:
    """Looks at what both governors hold of the tenant, as often as the loop allows."""

    def __init__(self, workers: list[WorkerHere], tenant_id: str) -> None:
        self.most_running = 0
        self.most_kv_bytes = 0
        self.by_worker = [0] * len(workers)
        self._workers = workers
        self._tenant_id = tenant_id

    def _use(self, worker: WorkerHere) -> TenantUse:
        found = [use for use in worker.governor.admission.uses() if use.tenant_id == self._tenant_id]
        return found[0] if found else TenantUse(tenant_id=self._tenant_id)

    async def run(self, over: asyncio.Event) -> None:
        while not over.is_set():
            uses = [self._use(worker) for worker in self._workers]
            self.most_running = max(self.most_running, sum(use.running for use in uses))
            self.most_kv_bytes = max(self.most_kv_bytes, sum(use.kv_bytes for use in uses))
            self.by_worker = [max(most, use.running) for most, use in zip(self.by_worker, uses, strict=True)]
            await asyncio.sleep(0.001)


class Flooded(msgspec.Struct):
    watch: Watch
    statuses: list[int]


async def flood(server: EmbeddedNats, bus: Bus, folder: Path, limits: dict[str, int]) -> Flooded:
    """120 requests of 3 blocks each over four routers."""
    engine = ScriptedSettings(tokens_per_s=200, concurrency=64)
    settings = msgspec.structs.replace(QUICK, shares_s=0.05)
    async with (
        running_registry(bus, settings),
        worker_here(server, folder / "w1", worker_id="w1", engine=engine) as first,
        worker_here(server, folder / "w2", worker_id="w2", engine=engine) as second,
        routers(server, 4) as clients,
    ):
        manager = Admin(bus)
        tenant = await manager.tenant("sales", limits={"queue_limit": 200, **limits})
        key = msgspec.convert(await manager.ask(admin.CreateKey(tenants=("sales",))), admin.KeyView)
        (pool,) = msgspec.convert(await manager.ask(admin.ListPools()), list[admin.PoolView])
        headers = {"authorization": f"Bearer {key.secret}"}
        body = {"model": pool.base, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}

        async def knows(client: httpx.AsyncClient) -> bool:
            return (await client.get("/v1/models", headers=headers)).status_code == 200

        for client in clients:
            await until_async(lambda client=client: knows(client), what="every router knows the key")
        watch, over = Watch([first, second], tenant.tenant_id), asyncio.Event()

        async def ask(client: httpx.AsyncClient) -> int:
            return (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code

        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(over))
            asks = [group.create_task(ask(clients[number % 4])) for number in range(120)]
            await asyncio.wait(asks)
            over.set()
        await until(lambda: sum(use.running for worker in (first, second) for use in worker.governor.admission.uses()) == 0)
        return Flooded(watch, [task.result() for task in asks])


async def test_a_flood_over_four_routers_and_two_workers_stays_within_the_concurrency_quota(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    flooded = await flood(nats_server, bus, tmp_path, {"max_concurrent": CONCURRENT})
    assert flooded.statuses == [200] * 120
    assert CONCURRENT - 1 <= flooded.watch.most_running <= CONCURRENT
    assert min(flooded.watch.by_worker) > 0


async def test_a_flood_over_four_routers_and_two_workers_stays_within_the_kv_quota(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    flooded = await flood(nats_server, bus, tmp_path, {"kv_quota_bytes": KV_BYTES})
    assert flooded.statuses == [200] * 120
    assert KV_BYTES - 3 * KV_BLOCK_BYTES < flooded.watch.most_kv_bytes <= KV_BYTES
    assert min(flooded.watch.by_worker) > 0


@pytest.mark.parametrize("limits", [{"max_concurrent": CONCURRENT}, {"kv_quota_bytes": KV_BYTES}])
async def test_the_watch_sees_workers_that_are_each_given_the_whole_quota(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def undivided(*arguments: Any) -> TenantShares:
        shares = decide(*arguments)
        given = shares.limits
        whole = {
            w: msgspec.structs.replace(share, kv_bytes=given.kv_quota_bytes, assured_kv_bytes=None, concurrent=given.max_concurrent)
            for w, share in shares.workers.items()
        }
        return msgspec.structs.replace(shares, workers=whole)

    monkeypatch.setattr("services.registry.shares.decide", undivided)
    watch = (await flood(nats_server, bus, tmp_path, limits)).watch
    if "kv_quota_bytes" in limits:
        assert watch.most_kv_bytes > KV_BYTES
    else:
        assert watch.most_running > CONCURRENT
