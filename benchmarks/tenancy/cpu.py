"""The same on the real CPU engine, in real time and smaller: how the scripted engine's figures compare with vLLM's own scheduler."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.tenancy import counting_scheduler
from benchmarks.tenancy.desk import Desk
from benchmarks.tenancy.scenarios import Beside, Load, backlogs, percentile, quiet_beside, stream_beside
from benchmarks.tenancy.scripted import WEIGHTS, weights_error
from services.worker.governor import Governor
from services.worker.vllm_engine import VllmEngine
from services.worker.vllm_setup import VllmSettings
from shared.contracts.tenancy import TenantLimits
from shared.policy.engine_room import EngineShape, shape_of

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
SEATS = 32
MAX_MODEL_LEN = 1024
SHARED_PREFILL_TOKENS = 32  # a prompt token costs this engine more of a step than a GPU
PATIENCE_S = 3600.0
STREAMS = 3

_numbers = itertools.count(1)


def unseen(tokens: int) -> list[int]:
    """A prompt that no other begins like, so that no cache has any of it."""
    number = next(_numbers)
    return [10 + number % 251, 10 + number // 251 % 251, *(10 + (number * 7 + i * 13) % 199 for i in range(tokens - 2))]


@asynccontextmanager
async def engine(waits: Path, *, fair: bool) -> AsyncIterator[Desk]:
    scheduler = f"{counting_scheduler.__name__}.{'fair' if fair else 'plain'}"
    settings = VllmSettings(
        model=str(BASE),
        cluster_secret=b"bench",
        max_loras=1,
        max_lora_rank=8,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=SEATS,
        shared_prefill_tokens=SHARED_PREFILL_TOKENS if fair else 0,
        engine_args={"scheduler_cls": scheduler},
    )
    waits.unlink(missing_ok=True)
    os.environ[counting_scheduler.PATH_VARIABLE] = str(waits)
    governor = Governor()
    made = VllmEngine(settings, governor)
    await made.start()
    try:
        limits = made.limits
        governor.admission.use(
            limits, shape_of(limits.max_num_seqs, limits.max_batched_tokens, SHARED_PREFILL_TOKENS) if fair else EngineShape()
        )
        for tenant in ("a", "b", *WEIGHTS):
            limits = TenantLimits(weight=WEIGHTS.get(tenant, 1), queue_limit=1000, queue_deadline_s=PATIENCE_S)
            governor.admission.set_tenant(tenant, limits, None)
        yield Desk(made, governor)
    finally:
        await made.stop()


async def measure(seconds: float, waits_path: Path) -> dict[str, Any]:
    load = Load(
        prompt=unseen,
        flood=200,
        long_prompt=400,
        long_output=300,
        quiet_prompt=24,
        quiet_output=4,
        quiet_every_s=1.0,
        warm_up_s=8.0,
        measure_s=seconds,
    )
    found: dict[str, Any] = {}
    async with engine(waits_path, fair=True) as desk:
        found["step_tokens"] = desk.engine.limits.max_batched_tokens
        flooded = await quiet_beside(desk, load, load.flood)
        waits = _waits(flooded, waits_path)
        held = await quiet_beside(desk, load, SEATS - 1)
        alone = await quiet_beside(desk, load, 0)
        gaps = {
            "beside_decoding": await _gaps(desk, load, 4, 0),
            "beside_decoding_and_long_prompts": await _gaps(desk, load, 4, 4),
            "alone": await _gaps(desk, load, 0, 0),
        }
        weighted = await backlogs(desk, load, WEIGHTS, outstanding=24, prompt_tokens=100, output=60)
    async with engine(waits_path, fair=False) as desk:
        plain = await quiet_beside(desk, load, load.flood)
        plain_waits = _waits(plain, waits_path)
        gaps["plain_beside_decoding_and_long_prompts"] = await _gaps(desk, load, 4, 4)
    ttft = {
        name: percentile([asked.ttft_ms for asked in beside.quiet], 95)
        for name, beside in (("flooded", flooded), ("held", held), ("alone", alone), ("plain", plain))
    }
    rate = {"flooded": flooded.rate, "plain": plain.rate}
    return {
        **found,
        "shared_prefill_tokens": SHARED_PREFILL_TOKENS,
        "quiet_requests": len(flooded.quiet),
        "quiet_requests_queued": sum(asked.attempt.place.queued_ms > 0 for asked in flooded.quiet),
        "quiet_p95_ttft_ratio": ttft["flooded"] / ttft["held"],
        "quiet_wait_steps_p95": percentile(waits, 95),
        "quiet_wait_steps_p95_plain": percentile(plain_waits, 95),
        "quiet_itl_p99_ratio": gaps["beside_decoding_and_long_prompts"] / gaps["beside_decoding"],
        "weights_error": weights_error(weighted),
        "tokens_by_weight": weighted,
        "throughput_kept": rate["flooded"] / rate["plain"],
        "quiet_ttft_p95_ms": ttft,
        "itl_p99_ms": gaps,
        "tokens_per_s": rate,
    }


def _waits(beside: Beside, path: Path) -> list[float]:
    """Engine steps that B's requests waited for in vLLM's scheduler; none of them waited at the governor where it is fair."""
    found = counting_scheduler.waits(path)
    return [float(found[asked.attempt.request_id]) for asked in beside.quiet]


async def _gaps(desk: Desk, load: Load, decoding: int, prompts: int) -> float:
    gaps: list[float] = []
    for _ in range(STREAMS):
        gaps += await stream_beside(desk, load, decoding=decoding, prompts=prompts, prompt_tokens=MAX_MODEL_LEN - 4, stream_tokens=240)
    return percentile(gaps, 99)


def figures(seconds: float = 20.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as folder:
        return asyncio.run(measure(seconds, Path(folder) / "waits"))
