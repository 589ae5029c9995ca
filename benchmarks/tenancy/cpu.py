"""The same on the real CPU engine, in real time and smaller: how the scripted engine's figures compare with vLLM's own scheduler."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.tenancy.desk import Asked, Desk
from benchmarks.tenancy.scenarios import Load, background, percentile, quiet_beside, stream_beside
from services.worker.governor import Governor
from services.worker.vllm_engine import VllmEngine
from services.worker.vllm_setup import VllmSettings
from shared.contracts.tenancy import TenantLimits
from shared.policy.engine_room import EngineShape, shape_of

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
SEATS = 32
MAX_MODEL_LEN = 1024
PATIENCE_S = 3600.0

_numbers = itertools.count(1)


def unseen(tokens: int) -> list[int]:
    """A prompt that no other begins like, so that no cache has any of it."""
    number = next(_numbers)
    return [10 + number % 251, 10 + number // 251 % 251, *(10 + (number * 7 + i * 13) % 199 for i in range(tokens - 2))]


@asynccontextmanager
async def engine(*, fair: bool) -> AsyncIterator[Desk]:
    plain = {} if fair else {"scheduler_cls": None, "long_prefill_token_threshold": 0}
    governor = Governor()
    made = VllmEngine(
        VllmSettings(
            model=str(BASE),
            cluster_secret=b"bench",
            max_loras=1,
            max_lora_rank=8,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=SEATS,
            engine_args=plain,
        ),
        governor,
    )
    await made.start()
    try:
        limits = made.limits
        governor.admission.use(limits, shape_of(limits.max_num_seqs, limits.max_batched_tokens) if fair else EngineShape())
        for tenant in ("a", "b"):
            governor.admission.set_tenant(tenant, TenantLimits(queue_limit=1000, queue_deadline_s=PATIENCE_S), None)
        yield Desk(made, governor)
    finally:
        await made.stop()


def waited_steps(quiet: list[Asked], others: list[Asked]) -> list[float]:
    """Engine steps between asking and the step of the first token, read off a neighbour's stream: it gets a token in every step."""
    waits: list[float] = []
    for asked in quiet:
        between = [sum(asked.started_s < at_s <= asked.token_s[0] for at_s in other.token_s) for other in others]
        waits.append(float(max(0, max(between, default=0) - 1)))
    return waits


async def measure(seconds: float) -> dict[str, Any]:
    load = Load(
        prompt=unseen,
        flood=100,
        long_prompt=400,
        long_output=100,
        quiet_prompt=24,
        quiet_output=4,
        quiet_every_s=0.5,
        warm_up_s=5.0,
        measure_s=seconds,
    )
    found: dict[str, Any] = {}
    async with engine(fair=True) as desk:
        found["step_tokens"] = desk.engine.limits.max_batched_tokens
        flooded, waits = await _flooded(desk, load)
        held = await quiet_beside(desk, load, SEATS - 1)
        alone = await quiet_beside(desk, load, 0)
        gaps = {
            "beside_decoding": await _gaps(desk, load, 4, 0),
            "beside_decoding_and_long_prompts": await _gaps(desk, load, 4, 4),
            "alone": await _gaps(desk, load, 0, 0),
        }
    async with engine(fair=False) as desk:
        plain, plain_waits = await _flooded(desk, load)
        gaps["plain_beside_decoding_and_long_prompts"] = await _gaps(desk, load, 4, 4)
    ttft = {
        name: percentile([asked.ttft_ms for asked in beside.quiet], 95)
        for name, beside in (("flooded", flooded), ("held", held), ("alone", alone), ("plain", plain))
    }
    rate = {"flooded": flooded.rate, "plain": plain.rate}
    return {
        **found,
        "quiet_requests": len(flooded.quiet),
        "quiet_p95_ttft_ratio": ttft["flooded"] / ttft["held"],
        "quiet_wait_steps_p95": percentile(waits, 95),
        "quiet_wait_steps_p95_plain": percentile(plain_waits, 95),
        "quiet_itl_p99_ratio": gaps["beside_decoding_and_long_prompts"] / gaps["beside_decoding"],
        "throughput_kept": rate["flooded"] / rate["plain"],
        "quiet_ttft_p95_ms": ttft,
        "itl_p99_ms": gaps,
        "tokens_per_s": rate,
    }


async def _flooded(desk: Desk, load: Load) -> tuple[Any, list[float]]:
    others: list[Asked] = []

    async def collect() -> None:
        """Every request that is ever open, A's among them."""
        seen: set[str] = set()
        while True:
            for request_id, asked in desk.open.items():
                if request_id not in seen and asked.attempt.handle.tenant_id == "a":
                    seen.add(request_id)
                    others.append(asked)
            await asyncio.sleep(0.05)

    async with background(collect()):
        flooded = await quiet_beside(desk, load, load.flood)
    return flooded, waited_steps(flooded.quiet, others)


async def _gaps(desk: Desk, load: Load, decoding: int, prompts: int) -> float:
    gaps = await stream_beside(desk, load, decoding=decoding, prompts=prompts, prompt_tokens=900, stream_tokens=240)
    return percentile(gaps, 99)


def figures(seconds: float = 20.0) -> dict[str, Any]:
    return asyncio.run(measure(seconds))
