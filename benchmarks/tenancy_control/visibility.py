"""How soon every router answers by a change of what stands in the bucket: router processes, asked over HTTP all the time."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from time import perf_counter

import httpx
import msgspec

from benchmarks.tenancy_control.configuration import secret
from benchmarks.tenancy_control.processes import free_port, running
from benchmarks.tenancy_control.router_cost import percentile
from shared.bus import Bucket, Bus, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, state
from shared.runtime import end

ROUTERS = 4
_BEAT_S = 0.25
_PATIENCE_S = 30.0


@contextlib.asynccontextmanager
async def routers(server: EmbeddedNats, bucket: Bucket, count: int) -> AsyncIterator[list[httpx.AsyncClient]]:
    """As many processes, all ready, and a heartbeat for them."""

    async def beat() -> None:
        number = 0
        while True:
            number += 1
            await bucket.put(state.HEARTBEAT_KEY, str(number).encode())
            await asyncio.sleep(_BEAT_S)

    ports = [free_port() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        stack.push_async_callback(end, [group.create_task(beat())])
        for port in ports:
            settings = {"TENANTRY_ROUTER_PORT": str(port), "TENANTRY_ROUTER_GRACE_S": "1"}
            await stack.enter_async_context(running("services.router", server.url, settings))
        clients: list[httpx.AsyncClient] = []
        for port in ports:
            url = f"http://127.0.0.1:{port}"
            clients.append(await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=10)))
        async with asyncio.timeout(_PATIENCE_S):
            for client in clients:
                while not await _is_ready(client):
                    await asyncio.sleep(0.05)
        yield clients


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def visible(bus: Bus, server: EmbeddedNats, values: dict[str, bytes], rounds: int) -> dict[str, float]:
    """From the beginning of a write until the last router has answered by it: a key, what a tenant may use, an alias of a pool."""
    bucket = await open_bucket(bus, state.STATE_BUCKET, create=True)
    for key, value in values.items():
        await bucket.put(key, value)
    found: dict[str, float] = {}
    async with routers(server, bucket, ROUTERS) as clients:
        for name, change in (("key", _change_key), ("tenant", _change_tenant), ("pool", _change_pool)):
            taken: list[float] = []
            for number in range(rounds):
                key, value, shows = change(values, number % 2 == 0)
                started = perf_counter()
                await bucket.put(key, value)
                async with asyncio.timeout(_PATIENCE_S), asyncio.TaskGroup() as group:
                    for client in clients:
                        group.create_task(_until_shown(client, shows))
                taken.append((perf_counter() - started) * 1000)
                await asyncio.sleep(0.02)
            found[f"visible_{name}_p50_ms"] = round(percentile(taken, 0.5), 1)
            found[f"visible_{name}_max_ms"] = round(max(taken), 1)
    return found


async def _until_shown(client: httpx.AsyncClient, shows: Callable[[httpx.Response], bool]) -> None:
    while not shows(await client.get("/v1/models", headers={"authorization": f"Bearer {secret(0)}"})):
        pass


_Change = tuple[str, bytes, Callable[[httpx.Response], bool]]


def _change_key(values: dict[str, bytes], revoked: bool) -> _Change:
    key = state.KEY_PREFIX + hashlib.sha256(secret(0).encode()).hexdigest()
    value = state.encode(msgspec.structs.replace(state.decode_key(values[key]), revoked=revoked))
    return key, value, lambda answer: answer.status_code == (401 if revoked else 200)


def _change_tenant(values: dict[str, bytes], forbidden: bool) -> _Change:
    """Whether it may use the bare base, which it then sees as a model."""
    key = state.TENANT_PREFIX + "team0"
    value = state.encode(msgspec.structs.replace(state.decode_tenant(values[key]), base_allowed=not forbidden))
    return key, value, lambda answer: answer.status_code == 200 and (b'"id":"base0"' in answer.content) is not forbidden


def _change_pool(values: dict[str, bytes], gone: bool) -> _Change:
    key = state.POOL_PREFIX + "pool0"
    pool = adapters.decode_pool(values[key])
    mine = {alias: adapter_id for alias, adapter_id in pool.aliases["team0"].items() if not (gone and alias == "adapter3")}
    value = adapters.encode(msgspec.structs.replace(pool, aliases={**pool.aliases, "team0": mine}))
    return key, value, lambda answer: answer.status_code == 200 and (b'"id":"adapter3"' in answer.content) is not gone
