"""A router must not serve from routes that may be old: silent watches, a registry that is down, a bus that is frozen."""

import asyncio
import signal
from typing import Any

import pytest
from nats.js.errors import NotFoundError

from services.router.freshness import Doubt
from shared.bus import Bus, BusSettings, connect, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import state
from shared.contracts.state import STATE_BUCKET
from tests.router_fakes import ADMIN_KEY, CS_KEY, SALES_KEY, Cluster, cluster, mount, pool_entry, until

REVOKED = state.ApiKey(key_id="k1", label="", tenants=("sales",), revoked=True)


async def silence_the_watch(running: Cluster, bus: Bus) -> None:
    """Deletes the router's own consumers on the state bucket: nothing tells the router."""
    stream = f"KV_{STATE_BUCKET}"
    for info in await bus.js.consumers_info(stream):
        try:
            await bus.js.delete_consumer(stream, info.name)
        except NotFoundError:
            continue


@pytest.fixture
async def other_bus(nats_server: EmbeddedNats) -> Any:
    bus = await connect(BusSettings(url=nats_server.url, name="saboteur"))
    yield bus
    await bus.close()


async def test_a_key_revoked_while_the_watch_was_silent_is_refused_within_a_second(nats_server: EmbeddedNats, other_bus: Bus) -> None:
    async with cluster(nats_server) as running:
        assert (await running.ask("tone")).status_code == 200
        loop = asyncio.get_running_loop()
        await silence_the_watch(running, other_bus)
        await running.registry.put_key(SALES_KEY, REVOKED)
        revoked_s = loop.time()
        last_served_s = 0.0
        while (await running.ask("tone")).status_code != 401:
            last_served_s = loop.time() - revoked_s
            assert last_served_s < 5, "the revoked key went on for ever"
        assert last_served_s < 1.0
        assert running.router.mirror is not None
        assert running.router.mirror.rebuilds >= 1
        await until(lambda: running.router.freshness is not None and running.router.freshness.doubt is Doubt.NONE)


async def test_a_watch_that_cannot_be_rebuilt_makes_the_router_unready(nats_server: EmbeddedNats, other_bus: Bus) -> None:
    async with cluster(nats_server, stale_after_s=1.0) as running:
        assert running.router.mirror is not None
        running.router.mirror.rebuild = lambda: None  # type: ignore[method-assign]
        await silence_the_watch(running, other_bus)

        async def stale() -> bool:
            return (await running.client.get("/ready")).json().get("reason") == "routes_stale"

        await until(stale)
        response = await running.ask("tone")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "routes_stale")
        assert response.headers["retry-after"]
        assert running.worker.attempts == []


async def test_with_the_registry_down_the_data_plane_serves_on(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server) as running:
        running.registry.beating = False
        freshness = running.router.freshness
        assert freshness is not None
        await until(lambda: freshness.doubt is Doubt.REGISTRY_DOWN)
        assert (await running.ask("tone")).status_code == 200
        assert (await running.client.get("/ready")).status_code == 200
        assert "tenantry_registry_down 1.0" in (await running.client.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})).text
        running.registry.beating = True
        await until(lambda: freshness.doubt is Doubt.NONE)


async def test_a_bucket_restored_from_a_backup_is_believed_over_what_was_known(nats_server: EmbeddedNats, other_bus: Bus) -> None:
    async with cluster(nats_server) as running:
        assert (await running.ask("tone")).status_code == 200
        table = running.router.table
        for beat in range(1000):  # revisions far above those of the new bucket
            await running.registry.bucket.put(state.HEARTBEAT_KEY, str(beat).encode())
        await running.worker.hold("ad_cs_help_2")
        running.registry.beating = False
        await other_bus.js.delete_key_value(STATE_BUCKET)
        restored = running.registry.bucket = await open_bucket(other_bus, STATE_BUCKET, create=True)
        for tenant in list(table.tenants.values()):
            await running.registry.put_tenant(tenant)
        await running.registry.put_pool(pool_entry(mount("help", "cs", version=2)))
        await running.registry.put_key(CS_KEY, state.ApiKey(key_id="k2", label="", tenants=("cs",)))
        running.registry.beating = True

        async def believed() -> bool:
            helped = await running.ask("help", key=CS_KEY)
            return (await running.ask("tone")).status_code == 401 and helped.headers.get("x-tenantry-adapter") == "help@2"

        await until(believed)
        assert await restored.get(state.HEARTBEAT_KEY) is not None
        await until(lambda: running.router.freshness is not None and running.router.freshness.doubt is Doubt.NONE)


async def test_a_frozen_bus_makes_the_router_unready(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, stale_after_s=1.0) as running:
        assert nats_server.process is not None
        nats_server.process.send_signal(signal.SIGSTOP)
        try:
            response = await running.ask("tone")
            while response.status_code == 200:
                response = await running.ask("tone")

            async def stale() -> bool:
                return (await running.client.get("/ready")).json().get("reason") == "routes_stale"

            await until(stale)
        finally:
            nats_server.process.send_signal(signal.SIGCONT)

        async def ready() -> bool:
            return (await running.client.get("/ready")).status_code == 200

        await until(ready)
        assert (await running.ask("tone")).status_code == 200


async def test_routes_come_back_by_themselves_after_a_nats_restart(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server) as running:
        await nats_server.kill()
        await nats_server.start()
        await until(lambda: running.registry.bus.connected)
        await running.registry.put_key(SALES_KEY, REVOKED)

        async def refused() -> bool:
            return (await running.ask("tone")).status_code == 401

        await until(refused)
