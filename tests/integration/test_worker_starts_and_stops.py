"""A worker's start and end when others are late, away or gone: real NATS, real processes where exit codes count."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.worker import health
from services.worker.hello import say_hello
from shared.bus import Bus, Message
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, inference, workers
from shared.contracts.adapters import AdapterDrained
from shared.contracts.base import BaseDescription, EngineLimits
from shared.contracts.errors import ErrorInfo
from shared.contracts.workers import WorkerHello
from shared.errors import RegistryUnavailable
from tests.worker_peers import FakeRegistry, FakeRouter, eventually, worker_here

HELLO = WorkerHello(
    worker_id="w1",
    incarnation="i1",
    pool_id="main",
    base=BaseDescription(identity="demo@" + "0" * 64, label="demo", architecture="A", model_type="a", dtype="float32"),
    limits=EngineLimits(slots=1, max_rank=8, bytes_per_rank=1),
    engine="scripted",
)


@pytest.fixture
async def registry(bus: Bus, tmp_path: Path) -> FakeRegistry:
    registry = FakeRegistry(bus)
    registry.use_scratch(tmp_path / "registry")
    await registry.start()
    return registry


async def process(nats_url: str, folder: Path, **settings: str) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "TENANTRY_NATS_URL": nats_url,
        "TENANTRY_WORKER_WORKER_ID": "w1",
        "TENANTRY_WORKER_ENGINE": "scripted",
        "TENANTRY_WORKER_CACHE_DIR": str(folder),
        **{f"TENANTRY_WORKER_{name.upper()}": value for name, value in settings.items()},
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def ended(running: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Its exit code and what it said on stderr."""
    async with asyncio.timeout(20):
        _, said = await running.communicate()
    return running.returncode, said.decode()


async def test_hello_is_repeated_until_a_registry_answers_and_while_it_says_come_again(bus: Bus) -> None:
    said: list[WorkerHello] = []

    async def answer(message: Message) -> None:
        said.append(workers.decode_hello(message.data))
        reply = (
            admin.Reply(error=ErrorInfo(code="bus_unavailable", message="not now"))
            if len(said) == 1
            else admin.Reply(result={"generation": 7})
        )
        await bus.publish(message.reply, admin.encode(reply))

    async with asyncio.TaskGroup() as group:
        saying = group.create_task(say_hello(bus, HELLO, patience_s=10))
        await asyncio.sleep(0)
        await bus.subscribe(workers.HELLO_SUBJECT, answer)
        assert await saying == 7
    assert said == [HELLO, HELLO]


async def test_without_any_registry_the_hello_gives_up_with_a_reason(bus: Bus) -> None:
    with pytest.raises(RegistryUnavailable, match="nobody listens"):
        await say_hello(bus, HELLO, patience_s=0.2)


async def test_a_worker_that_still_waits_for_its_registry_stops_at_once_with_0(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> None:
    running = await process(nats_server.url, tmp_path / "w1")
    await eventually_pinged(bus)
    running.send_signal(signal.SIGTERM)
    code, said = await ended(running)
    assert code == 0, said


async def eventually_pinged(bus: Bus) -> None:
    """Returns once the worker is on the bus."""
    async with asyncio.timeout(20):
        while True:
            try:
                await bus.request(inference.worker_ping_subject("w1"), b"", timeout_s=1)
                return
            except Exception:
                await asyncio.sleep(0.05)


async def test_a_refused_worker_exits_with_1_and_one_line_that_says_why(
    nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path
) -> None:
    registry.refuse = ErrorInfo(code="base_mismatch", message="pool main serves other@1; worker w1 has scripted@2")
    code, said = await ended(await process(nats_server.url, tmp_path / "w1"))
    assert code == 1
    assert "worker: the registry refuses this worker: pool main serves other@1" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"engine": "magic"}, "TENANTRY_WORKER_ENGINE='magic'"),
        ({"speed": "fast"}, "unknown setting TENANTRY_WORKER_SPEED"),
    ],
)
async def test_bad_settings_are_one_line_and_exit_code_2(tmp_path: Path, settings: dict[str, str], line: str) -> None:
    code, said = await ended(await process("nats://127.0.0.1:1", tmp_path / "w1", **settings))
    assert code == 2
    assert line in said
    assert "Traceback" not in said


async def test_no_bus_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    code, said = await ended(await process("nats://127.0.0.1:1", tmp_path / "w1", nats_patience_s="0.1"))
    assert code == 1
    assert "cannot connect to NATS at nats://127.0.0.1:1" in said.splitlines()[-1]


async def test_a_worker_whose_bus_is_away_still_stops(nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path) -> None:
    running = await process(nats_server.url, tmp_path / "w1")
    await eventually(lambda: "w1" in registry.reports and registry.reports["w1"].state == "ready", timeout_s=20)
    await nats_server.kill()
    running.send_signal(signal.SIGTERM)
    code, said = await ended(running)
    assert code == 0, said


async def test_an_adapter_drained_while_the_bus_was_away_is_not_heard_again_after_the_reconnect(
    nats_server: EmbeddedNats, registry: FakeRegistry, bus: Bus, tmp_path: Path
) -> None:
    router = FakeRouter(bus)
    await router.start()
    async with worker_here(nats_server, tmp_path / "w1") as worker:
        mount = await registry.mount("ad_one")
        await registry.ready("ad_one")
        await nats_server.kill()
        async with asyncio.TaskGroup() as group:
            closing = group.create_task(worker.worker.service.close("ad_one"))
            await eventually(lambda: not worker.bus.connected)
            await nats_server.start()
            await closing
        heard: list[str] = []
        await eventually(lambda: bus.connected)
        await bus.subscribe("test.reply", lambda message: heard.append(message.status))
        await bus.publish(inference.infer_subject("ad_one", "w1"), b"", reply="test.reply")
        await eventually(lambda: heard or worker.worker.service.served_adapters)
        assert heard == ["503"] or worker.worker.service.served_adapters == {"ad_one"}, "not heard, unless reconciliation serves it again"
        await registry.drain(mount)
        await eventually(lambda: registry.acked(AdapterDrained, "ad_one"))


async def test_a_ready_worker_says_so_in_its_health_file_as_long_as_it_runs(
    nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    async with worker_here(nats_server, tmp_path / "w1", health_file=str(state)):
        await eventually(lambda: state.exists() and state.read_text() == "ready")
        state.unlink()
        await eventually(state.exists)
    assert health.trouble(state, state.stat().st_mtime + 60.0) != ""
