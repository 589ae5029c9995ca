"""A worker while its peers, its bus or itself break: real NATS, the scripted engine, real processes where signals are sent."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.scripted_app import tokens_of
from services.worker.scripted_engine import ScriptedSettings
from shared.bus import Bus, BusSettings, connect
from shared.bus.embedded import EmbeddedNats
from shared.contracts.adapters import Mount
from shared.contracts.inference import FrameKind, Handle
from shared.policy.lifecycle import AdapterState
from tests.worker_peers import POOL, FakeRegistry, FakeRouter, eventually, worker_here


@pytest.fixture
async def registry(bus: Bus, tmp_path: Path) -> FakeRegistry:
    registry = FakeRegistry(bus)
    registry.use_scratch(tmp_path / "registry")
    await registry.start()
    return registry


@pytest.fixture
async def router(bus: Bus) -> FakeRouter:
    router = FakeRouter(bus)
    await router.start()
    return router


class WorkerProcess:
    """`python -m services.worker` with the scripted engine."""

    def __init__(self, nats: EmbeddedNats, folder: Path, tokens_per_s: float) -> None:
        self._environment = {
            **os.environ,
            "TENANTRY_NATS_URL": nats.url,
            "TENANTRY_WORKER_WORKER_ID": "w1",
            "TENANTRY_WORKER_ENGINE": "scripted",
            "TENANTRY_WORKER_CACHE_DIR": str(folder),
            "TENANTRY_WORKER_SCRIPTED_TOKENS_PER_S": str(tokens_per_s),
            "TENANTRY_WORKER_GRACE_S": "5",
        }
        self._log = folder.with_suffix(".log")
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, registry: FakeRegistry) -> None:
        """Returns once a new incarnation reports ready."""
        registry.reports.clear()
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.worker", env=self._environment, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
            )
        await eventually(
            lambda: (
                "w1" in registry.reports
                and registry.reports["w1"].state == "ready"
                and registry.reports["w1"].incarnation == registry.hellos[-1].incarnation
            ),
            timeout_s=20,
        )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        assert self.process is not None
        async with asyncio.timeout(20):
            return await self.process.wait()

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
async def worker_process(nats_server: EmbeddedNats, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(nats_server, tmp_path / "w1", tokens_per_s=50)
    yield worker
    await worker.kill()


def handle_in(registry: FakeRegistry, mount: Mount | None = None) -> Handle:
    base = registry.hellos[-1].base.identity
    if mount is None:
        return Handle(tenant_id="t1", tenant="sales", pool_id=POOL, base=base)
    return Handle(
        tenant_id="t1",
        tenant="sales",
        pool_id=POOL,
        base=base,
        adapter_id=mount.adapter_id,
        alias=mount.name,
        version=1,
        digest=mount.digest,
    )


async def test_a_router_that_is_gone_has_its_requests_aborted_within_a_second_and_metered(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=20)) as worker:
        dying_bus = await connect(BusSettings(url=nats_server.url, name="dying"))
        dying = FakeRouter(dying_bus, "r2")
        await dying.start()
        lost = await dying.ask(worker.handle(), tokens=100_000)
        kept = await router.ask(worker.handle(), tokens=40)
        await eventually(lambda: len(dying.answers[lost].frames) > 3)
        await dying_bus.close()
        await eventually(lambda: worker.governor.find(*lost) is None, timeout_s=1.0)
        assert (await router.answer(kept)).error == ""
        final = await eventually(lambda: [u for u in registry.usage if u.request_id == lost[0] and u.final])
        assert final[0].outcome == "cancelled:router_gone"
        assert final[0].completion_tokens > 0


async def test_a_bus_that_dies_in_mid_stream_loses_and_doubles_nothing(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=50)) as worker:
        keys = [await router.ask(worker.handle(), prompt=f"q{n}", tokens=200) for n in range(20)]
        await eventually(lambda: all(len(router.answers[key].frames) > 10 for key in keys))
        await nats_server.kill()
        made = sum(attempt.completion_tokens for attempt in worker.governor.attempts())
        await eventually(lambda: sum(a.completion_tokens for a in worker.governor.attempts()) > made + 20 * 20)
        await nats_server.start()
        digest = worker.engine.description.digest
        for n, key in enumerate(keys):
            answer = await router.answer(key, timeout_s=20)
            assert answer.error == ""
            assert answer.text == "".join(tokens_of(digest, f"q{n}", 200))


async def test_an_adapter_mounted_while_the_watch_was_cut_is_loaded_after_the_reconnect(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1") as worker:
        await registry.mount("ad_one")
        await registry.ready("ad_one")
        await nats_server.kill()
        await nats_server.start()
        await eventually(lambda: registry.bus.connected and worker.bus.connected)
        mount = await registry.mount("ad_two")
        await registry.ready("ad_one", "ad_two")
        assert (await router.asked(worker.handle(mount))).error == ""


async def test_what_a_frozen_worker_says_late_is_not_believed(
    worker_process: WorkerProcess, registry: FakeRegistry, router: FakeRouter
) -> None:
    await worker_process.start(registry)
    handle = handle_in(registry)
    running = await router.ask(handle, prompt="runs", tokens=100_000)
    await eventually(lambda: len(router.answers[running].frames) > 5)
    worker_process.send(signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    frozen_until_s = loop.time() + 6.0
    backlog = [await router.ask(handle, prompt=f"in the backlog {n}", tokens=4) for n in range(30)]
    await eventually(lambda: loop.time() >= frozen_until_s, timeout_s=8)
    assert all(not router.answers[key].frames for key in backlog)
    worker_process.send(signal.SIGCONT)
    for key in backlog:
        answer = await router.answer(key)
        assert answer.kinds == [FrameKind.BOUNCED]
        assert answer.error == "stale"
    assert (await router.answer(running)).error == "worker_lost"
    await eventually(lambda: registry.reports["w1"].in_flight == 0)
    again = await router.ask(handle, prompt="awake again", tokens=4, attempt=2)
    assert (await router.answer(again)).error in ("", "stale")
    later = await router.asked(handle, prompt="later", tokens=4)
    assert later.text == "".join(tokens_of(registry.hellos[-1].base.digest, "later", 4))


async def test_a_killed_worker_comes_back_with_what_the_entry_says(
    worker_process: WorkerProcess, registry: FakeRegistry, router: FakeRouter
) -> None:
    await worker_process.start(registry)
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    first = registry.hellos[-1].incarnation
    before = (await router.asked(handle_in(registry, mount), prompt="same")).text
    await worker_process.kill()
    await worker_process.start(registry)
    assert registry.hellos[-1].incarnation != first
    await registry.ready("ad_one")
    assert (await router.asked(handle_in(registry, mount), prompt="same")).text == before
    entry, _ = await registry.entry()
    assert entry.mounts["ad_one"].state is AdapterState.READY


async def test_a_worker_told_to_stop_lets_streams_end_and_exits_with_0(
    worker_process: WorkerProcess, registry: FakeRegistry, router: FakeRouter
) -> None:
    await worker_process.start(registry)
    key = await router.ask(handle_in(registry), tokens=100)
    await eventually(lambda: len(router.answers[key].frames) > 5)
    worker_process.send(signal.SIGTERM)
    answer = await router.answer(key)
    assert answer.error == ""
    assert answer.body.endswith(b"[DONE]\n\n")
    assert await worker_process.ended() == 0
    assert "Traceback" not in worker_process.log()
