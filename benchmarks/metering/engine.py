"""The real engine with two of the demo's adapters, and loads on it whose requests are known beforehand."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.tenancy.cpu import unseen
from benchmarks.tenancy.desk import Asked, Desk
from services.worker.governor import Governor
from services.worker.vllm_engine import VllmEngine
from services.worker.vllm_setup import VllmSettings
from shared.contracts.usage import EngineTime

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
SEATS = 32
ADAPTERS = {"ad_sales": ("lora_sales", 8), "ad_cs": ("lora_cs", 4)}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """So many requests of one tenant, so many of them at a time."""

    tenant: str
    requests: int
    at_once: int
    prompt: int
    output: int
    samples: int = 1
    adapter_id: str = ""


@asynccontextmanager
async def engine(*, meters: bool = True, dtype: str = "float32", engine_args: dict[str, Any] | None = None) -> AsyncGenerator[Desk]:
    governor = Governor()
    settings = VllmSettings(
        model=str(DEMO / "base"),
        label="demo",
        cluster_secret=b"bench",
        dtype=dtype,
        max_loras=2,
        max_lora_rank=8,
        max_model_len=1024,
        max_num_seqs=SEATS,
        meters_steps=meters,
        engine_args=engine_args or {},
    )
    made = VllmEngine(settings, governor)
    await made.start()
    try:
        for adapter_id, (folder, rank) in ADAPTERS.items():
            await made.add_adapter(adapter_id, DEMO / "adapters" / folder, rank)
        yield Desk(made, governor)
    finally:
        await made.stop()


async def run(desk: Desk, *works: Work) -> list[Asked]:
    """All requests of all works, from the same moment on."""
    asked: list[Asked] = []

    async def one(work: Work, numbers: Any) -> None:
        for _ in numbers:
            asked.append(await desk.ask(work.tenant, unseen(work.prompt), work.output, samples=work.samples, adapter_id=work.adapter_id))

    async with asyncio.TaskGroup() as group:
        for work in works:
            numbers = iter(range(work.requests))
            for _ in range(work.at_once):
                group.create_task(one(work, numbers))
    failed = [one.failed for one in asked if one.failed or not one.token_s]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0] or 'no answer'}")
    return asked


async def account(desk: Desk) -> EngineTime:
    """Once everything that was asked has been told, which an idle engine has."""
    first_idle_us = 0
    for turn in itertools.count():
        time = desk.governor.steps.engine_time("bench", "bench", "main", 1)
        assert time is not None, "the engine does not tell of its steps"
        if not turn:
            first_idle_us = time.idle_us
        elif time.idle_us > first_idle_us + 200_000:
            return time
        await asyncio.sleep(0.05)
    raise AssertionError


def billed_us(asked: list[Asked], tenant: str = "") -> int:
    return sum(one.attempt.gpu_us for one in asked if not tenant or one.attempt.handle.tenant_id == tenant)
