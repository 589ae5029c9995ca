"""The router as a process: starts, says what is wrong in one line, and stops in order."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from shared.bus import BusSettings, connect, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import state
from tests.router_fakes import SALES_KEY, Attempt, FakeRegistry, FakeWorker, keys, mount, pool_entry, tenants, until, until_ready


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def spawn(nats: EmbeddedNats, **settings: str) -> asyncio.subprocess.Process:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENANTRY_")}
    environment |= {"TENANTRY_NATS_URL": nats.url} | {f"TENANTRY_ROUTER_{key.upper()}": value for key, value in settings.items()}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def process(nats: EmbeddedNats, **settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, FakeWorker, httpx.AsyncClient]]:
    bus = await connect(BusSettings(url=nats.url, name="fakes"))
    registry = FakeRegistry(bus, await open_bucket(bus, state.STATE_BUCKET, create=True))
    for tenant in tenants("sales", "cs").values():
        await registry.put_tenant(tenant)
    for secret, key in keys().items():
        await registry.put_key(secret, key)
    await registry.put_pool(pool_entry(mount("tone", "sales")))
    worker = FakeWorker(bus)
    port = free_port()
    router = await spawn(nats, port=str(port), **settings)
    try:
        async with (
            asyncio.TaskGroup() as group,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
        ):
            await worker.start(group)
            await worker.hold(mount("tone", "sales").adapter_id)
            beating = group.create_task(registry.run())

            async def listening() -> bool:
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.ConnectError:
                    return False

            await until(listening, 30)
            await until_ready(client)
            yield router, worker, client
            beating.cancel()
            for attempt in worker.attempts:
                attempt.cancelled.set()
    finally:
        if router.returncode is None:
            router.kill()
        await router.communicate()
        await bus.close()


def asks(client: httpx.AsyncClient) -> object:
    headers = {"authorization": f"Bearer {SALES_KEY}"}
    return client.stream("POST", "/v1/chat/completions", json={"model": "tone", "stream": True}, headers=headers)


async def test_a_stopped_router_lets_its_streams_end_first(nats_server: EmbeddedNats) -> None:
    go_on = asyncio.Event()

    async def slow(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.token("one")
        await go_on.wait()
        await attempt.token("[DONE]")
        await attempt.end()

    async with process(nats_server) as (router, worker, client):
        worker.behaviour = slow
        async with asks(client) as response:  # type: ignore[attr-defined]
            lines = response.aiter_lines()
            assert await anext(lines) == "data: one"
            router.send_signal(signal.SIGTERM)
            await until(lambda: _refuses(client))
            go_on.set()
            assert [line async for line in lines if line] == ["data: [DONE]"]
        assert await asyncio.wait_for(router.wait(), 15) == 0


async def test_streams_that_outlast_the_grace_end_in_an_explicit_error(nats_server: EmbeddedNats) -> None:
    async def endless(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        while not attempt.cancelled.is_set():
            await attempt.token("more")
            await asyncio.sleep(0.02)

    async with process(nats_server, grace_s="0.5") as (router, worker, client):
        worker.behaviour = endless
        text = ""
        incomplete = False
        try:
            async with asks(client) as response:  # type: ignore[attr-defined]
                router.send_signal(signal.SIGTERM)
                async for piece in response.aiter_text():
                    text += piece
        except httpx.RemoteProtocolError:
            incomplete = True
        assert incomplete
        assert "[DONE]" not in text
        assert "the router is stopping" in text
        assert await asyncio.wait_for(router.wait(), 15) == 0
        assert worker.attempts[0].cancel_reason == "router_stopping"


async def test_a_killed_router_ends_its_connections_without_a_terminating_chunk(nats_server: EmbeddedNats) -> None:
    async def endless(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        while not attempt.cancelled.is_set():
            await attempt.token("more")
            await asyncio.sleep(0.02)

    async with process(nats_server) as (router, worker, client):
        worker.behaviour = endless
        incomplete = False
        try:
            async with asks(client) as response:  # type: ignore[attr-defined]
                async for _ in response.aiter_text():
                    if router.returncode is None:
                        router.kill()
        except httpx.ReadError:
            incomplete = True
        except httpx.RemoteProtocolError:
            incomplete = True
        assert incomplete


async def test_a_taken_port_is_one_clear_line(nats_server: EmbeddedNats) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        router = await spawn(nats_server, port=str(port))
        _, errors = await asyncio.wait_for(router.communicate(), 30)
    lines = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    assert router.returncode == 1
    assert len(lines) == 1
    assert str(port) in lines[0]
    assert "Traceback" not in errors.decode()


async def test_an_unknown_setting_is_refused(nats_server: EmbeddedNats) -> None:
    router = await spawn(nats_server, prot="1")
    _, errors = await asyncio.wait_for(router.communicate(), 30)
    assert router.returncode == 2
    assert "TENANTRY_ROUTER_PROT" in errors.decode()


async def _refuses(client: httpx.AsyncClient) -> bool:
    """Nothing listens any more."""
    try:
        await client.get("/health", headers={"connection": "close"})
    except httpx.TransportError:
        return True
    return False
