"""Client -> router -> NATS -> worker around an engine that runs in this process: what the bus, the router and HTTP add to it."""

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.serving import engines
from benchmarks.serving.driver import random_prompts
from benchmarks.serving.figures import Stream
from benchmarks.serving.stand_in import POOL, WORKER, StandIn
from services.worker.settings import WorkerSettings
from services.worker.worker import Worker
from shared.bus import BusSettings, connect
from shared.bus.embedded import EmbeddedNats
from shared.runtime import Stop

_READY_LIMIT_S = 60.0
_ANSWER_LIMIT_S = 150.0
_decode = msgspec.json.Decoder(list[Stream]).decode


class HttpDriver:
    """As Driver.batch, over HTTP from a process of its own; `models` are asked in turn."""

    def __init__(self, port: int, key: str, models: Sequence[str], vocabulary: int) -> None:
        self._arguments = ["127.0.0.1", str(port), key]
        self._models = list(models)
        self._vocabulary = vocabulary
        self._process: asyncio.subprocess.Process | None = None

    async def batch(self, size: int, prompt_tokens: int, output_tokens: int, seed: str) -> list[Stream]:
        return await self._sent(random_prompts(size, prompt_tokens, self._vocabulary, seed), output_tokens, [])

    async def arrivals(self, rate: float, seconds: float, prompt_tokens: int, output_tokens: int, seed: str) -> list[Stream]:
        """`rate` requests a second on average, independent of each other and of the answers."""
        times = poisson(rate, seconds, seed)
        return await self._sent(random_prompts(len(times), prompt_tokens, self._vocabulary, seed), output_tokens, times)

    async def _sent(self, prompts: list[list[int]], output_tokens: int, arrivals: list[float]) -> list[Stream]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.serving.http_load", *self._arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=64 << 20,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"models": self._models, "prompts": prompts, "output_tokens": output_tokens, "arrivals": arrivals}
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            line = await self._process.stdout.readline()
        assert line, "the load's process ended; its log says why"
        return _decode(line)

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def around(running: engines.Running, plan: engines.Plan, folder: Path) -> AsyncIterator[HttpDriver]:
    """The engine's adapters stay where they are: the worker finds them loaded."""
    key, port = "sk-" + secrets.token_urlsafe(24), _free_port()
    nats = EmbeddedNats(folder / "nats", dies_with_parent=True)
    await nats.start()
    bus = await connect(BusSettings(url=nats.url, name="stand-in"))
    worker_bus = await connect(BusSettings(url=nats.url, name="worker"))
    folders = {engines.adapter_id(seed): engines.adapter_folder(plan, seed).name for seed in plan.adapter_seeds}
    stand_in = StandIn(bus, folders, plan.rank, key)
    await stand_in.start()
    stop = Stop()
    settings = WorkerSettings(worker_id=WORKER, pool_id=POOL, max_loras=len(folders), max_lora_rank=plan.rank, grace_s=1.0)
    worker = Worker(settings, running.tenantry, running.governor, worker_bus, Path(plan.adapters).parent)
    router = await _router(nats.url, port)
    driver = HttpDriver(port, key, list(folders), plan.config["vocab_size"])
    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(stand_in.beat())
            working = group.create_task(worker.run(stop))
            async with asyncio.timeout(_READY_LIMIT_S):
                await stand_in.all_ready.wait()
                await _answers(port)
            yield driver
            stop.set("measured")
            await working
            beating.cancel()
    finally:
        await driver.close()
        router.kill()
        await router.wait()
        await bus.close()
        await worker_bus.close()
        await nats.stop()


async def _router(nats_url: str, port: int) -> asyncio.subprocess.Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TENANTRY_")}
    environment |= {
        "TENANTRY_NATS_URL": nats_url,
        "TENANTRY_ROUTER_PORT": str(port),
        "TENANTRY_ROUTER_ADMIN_KEY_SHA256": hashlib.sha256(secrets.token_bytes(32)).hexdigest(),
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "services.router", env=environment, stdout=2, stderr=2)


async def _answers(port: int) -> None:
    """Returns once the router says that it is ready."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(0.1)


def poisson(rate: float, seconds: float, seed: str) -> list[float]:
    """Arrival times of a Poisson process."""
    chooser = random.Random(seed)
    times: list[float] = []
    at_s = chooser.expovariate(rate)
    while at_s < seconds:
        times.append(at_s)
        at_s += chooser.expovariate(rate)
    return times


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
