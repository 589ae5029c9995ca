"""The figures on the scripted engine: its step model and the worker's own governor, in virtual time."""

import asyncio
from functools import partial
from typing import Any

from benchmarks.tenancy import virtual_time
from benchmarks.tenancy.desk import Desk
from benchmarks.tenancy.scenarios import Beside, Load, background, backlogs, percentile, quiet_beside, stream_beside
from services.worker.governor import Governor
from services.worker.scripted_engine import ScriptedEngine, ScriptedSettings
from services.worker.scripted_steps import Sequence, StepModel
from shared.contracts.tenancy import Share, TenantLimits
from shared.policy.engine_room import EngineShape, shape_of

SEATS = 32
MAX_MODEL_LEN = 32_768
MAX_PROMPT_TOKENS = MAX_MODEL_LEN - 4  # with four tokens to make
PATIENCE_S = 3600.0  # the flood waits as long as it takes
_ORDERS = (("flooded", True), ("plain", False))
WEIGHTS = {"one": 1, "two": 2, "four": 4}


async def desk_with(*, fair: bool) -> tuple[Desk, dict[str, int]]:
    """A desk, and the engine's steps that each request's first prompt tokens waited for, by request id.

    Unfair is plain vLLM: everything goes into the engine as it comes, which serves first come, first served.
    """
    model = StepModel()
    shape = shape_of(SEATS, model.step_tokens)
    model = StepModel(shared_prefill_tokens=shape.shared_prefill_tokens if fair else 0)
    governor = Governor()
    engine = ScriptedEngine(ScriptedSettings(concurrency=SEATS, max_model_len=MAX_MODEL_LEN, steps=model), governor)
    await engine.start()
    governor.admission.use(engine.limits, shape if fair else EngineShape())
    for tenant in ("a", "b", *WEIGHTS):
        limits = TenantLimits(weight=WEIGHTS.get(tenant, 1), queue_limit=1000, queue_deadline_s=PATIENCE_S)
        governor.admission.set_tenant(tenant, limits, None)
    desk = Desk(engine, governor)
    waits: dict[str, int] = {}
    asked_at: dict[str, int] = {}
    stepper = engine.stepper
    assert stepper is not None
    begin = governor.begin

    def note_arrival(attempt: Any) -> None:
        asked_at[attempt.request_id] = stepper.steps
        begin(attempt)

    def note_first(sequence: Sequence) -> None:
        asked = asked_at.pop(sequence.name, None)
        if asked is not None:  # the first of its samples
            waits[sequence.name] = stepper.steps - asked

    governor.begin = note_arrival
    stepper.on_first_step = note_first
    return desk, waits


def load(**changes: Any) -> Load:
    return Load(prompt=lambda tokens: f"<{tokens}>", **changes)


def quiet(outstanding: int, *, fair: bool, **changes: Any) -> tuple[Beside, list[int]]:
    async def measure() -> tuple[Beside, list[int]]:
        desk, waits = await desk_with(fair=fair)
        beside = await quiet_beside(desk, load(**changes), outstanding)
        return beside, [waits[asked.attempt.request_id] for asked in beside.quiet]

    return virtual_time.run(measure())


def stream(*, fair: bool, decoding: int, prompts: int, stream_tokens: int = 1500, samples: int = 1) -> list[float]:
    async def measure() -> list[float]:
        desk, _ = await desk_with(fair=fair)
        return await stream_beside(
            desk,
            load(),
            decoding=decoding,
            prompts=prompts,
            prompt_tokens=MAX_PROMPT_TOKENS,
            stream_tokens=stream_tokens,
            samples=samples,
        )

    return virtual_time.run(measure())


def most_over_reserved(seconds: float) -> int:
    """The most blocks that the engine ever had in use beyond what the ledger held in the same step."""

    async def measure() -> int:
        desk, _ = await desk_with(fair=True)
        over: list[int] = []
        stepper = desk.engine.stepper  # type: ignore[attr-defined]
        stepper.on_blocks = lambda blocks: over.append(blocks - desk.governor.admission.queue.ledger.held)
        work = [
            desk.keep_asking(tenant, 30, partial("<{}>".format, tokens), 60, 50) for tenant, tokens in (("a", 700), ("b", 33), ("one", 1))
        ]
        async with background(*work):
            await asyncio.sleep(seconds)
        return max(over)

    return virtual_time.run(measure())


def weights(**changes: Any) -> dict[str, int]:
    async def measure() -> dict[str, int]:
        desk, _ = await desk_with(fair=True)
        return await backlogs(desk, load(**changes), WEIGHTS, outstanding=64, prompt_tokens=400, output=200)

    return virtual_time.run(measure())


def only_those_that_ask(tenants: tuple[str, ...], limited: dict[str, int] | None = None, **changes: Any) -> float:
    """Tokens a second while these keep 64 requests open each; `limited`: of some, how many may run at once."""

    async def measure() -> int:
        desk, _ = await desk_with(fair=True)
        for tenant, concurrent in (limited or {}).items():
            limits = TenantLimits(weight=WEIGHTS[tenant], queue_limit=1000, queue_deadline_s=PATIENCE_S, max_concurrent=concurrent)
            desk.governor.admission.set_tenant(tenant, limits, Share(incarnation="i", concurrent=concurrent))
        asking = dict.fromkeys(tenants, 1)
        return sum((await backlogs(desk, load(**changes), asking, outstanding=64, prompt_tokens=400, output=200)).values())

    return virtual_time.run(measure()) / load(**changes).measure_s


def weights_error(tokens: dict[str, int]) -> float:
    """The largest relative distance of a tenant's part from what its weight says."""
    every, all_weights = sum(tokens.values()), sum(WEIGHTS.values())
    return max(abs(tokens[tenant] / every / (weight / all_weights) - 1.0) for tenant, weight in WEIGHTS.items())


def figures(**changes: Any) -> dict[str, Any]:
    """All of them; `changes` are Load's, for shorter runs."""
    held_at = SEATS - shape_of(SEATS, StepModel().step_tokens).reserved_seats
    flooded, waits = quiet(200, fair=True, **changes)
    held, _ = quiet(held_at, fair=True, **changes)
    plain, plain_waits = quiet(200, fair=False, **changes)
    alone, _ = quiet(0, fair=True, **changes)
    ttft = {
        name: percentile([asked.ttft_ms for asked in beside.quiet], 95)
        for name, beside in (("flooded", flooded), ("held", held), ("plain", plain), ("alone", alone))
    }
    gaps = {
        "beside_decoding": percentile(stream(fair=True, decoding=20, prompts=0), 99),
        "beside_decoding_and_long_prompts": percentile(stream(fair=True, decoding=20, prompts=8), 99),
        "plain_beside_decoding_and_long_prompts": percentile(stream(fair=False, decoding=20, prompts=8), 99),
        "alone": percentile(stream(fair=True, decoding=0, prompts=0), 99),
        "beside_long_prompts": percentile(stream(fair=True, decoding=0, prompts=8), 99),
    }
    tokens = weights(**changes)
    heavy = {name: quiet(200, fair=fair, long_prompt=4000, long_output=100, **changes)[0] for name, fair in _ORDERS}
    rate = {"flooded": flooded.rate, "plain": plain.rate}
    return {
        "quiet_p95_ttft_ratio": ttft["flooded"] / ttft["held"],
        "quiet_wait_steps_p95": percentile([float(wait) for wait in waits], 95),
        "quiet_itl_p99_ratio": gaps["beside_decoding_and_long_prompts"] / gaps["beside_decoding"],
        "throughput_kept": rate["flooded"] / rate["plain"],
        "weights_error": weights_error(tokens),
        "details": {
            "quiet_ttft_p95_ms": ttft,
            "quiet_wait_steps_p95_plain": percentile([float(wait) for wait in plain_waits], 95),
            "quiet_wait_steps_max": max(waits),
            "quiet_requests": len(waits),
            "itl_p99_ms": gaps,
            "itl_p99_ratio_to_alone": gaps["beside_long_prompts"] / gaps["alone"],
            "tokens_per_s": rate,
            "throughput_kept_with_prompts_of_4000_and_answers_of_100": heavy["flooded"].rate / heavy["plain"].rate,
            "tokens_by_weight": tokens,
        },
    }
