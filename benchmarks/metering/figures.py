"""What metering says of loads whose costs are known otherwise, and what it costs itself."""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.metering.engine import ADAPTERS, SEATS, Work, account, billed_us, engine, run
from benchmarks.tenancy.desk import Desk
from services.worker.governor import Attempt
from services.worker.step_ledger import StepLedger
from services.worker.step_records import decode, encode
from services.worker.vllm_step_hook import StepHook
from shared.contracts.base import EngineLimits
from shared.contracts.inference import Handle
from shared.contracts.usage import EngineTime

SALES, CS = ADAPTERS
_BURSTS = 8


def prefill_heavy(scale: float) -> Work:
    return Work(tenant="prefill", requests=round(72 * scale), at_once=4, prompt=400, output=2, adapter_id=SALES)


def decode_heavy(scale: float) -> Work:
    return Work(tenant="decode", requests=round(16 * scale), at_once=8, prompt=16, output=150, adapter_id=CS)


def mixed(scale: float) -> list[Work]:
    return [
        Work(tenant="a", requests=round(40 * scale), at_once=4, prompt=300, output=20, adapter_id=SALES),
        Work(tenant="b", requests=round(24 * scale), at_once=6, prompt=24, output=100, adapter_id=CS),
        Work(tenant="c", requests=round(24 * scale), at_once=2, prompt=60, output=40, samples=2),
    ]


async def accounts(desk: Desk, scale: float, repeats: int) -> dict[str, Any]:
    """Of one metered engine: what is unaccounted, what one alone pays, and what two together pay beside their Shapley shares."""
    await run(desk, *mixed(scale / 2), prefill_heavy(scale / 8), decode_heavy(scale / 8))  # the cost model is fitted
    before = await account(desk)
    asked = await run(desk, *mixed(scale))
    after = await account(desk)
    whole = _between(before, after)
    found: dict[str, Any] = {
        "gpu_time_unaccounted": whole["unaccounted_us"] / whole["wall_us"],
        "tenants_idle_and_overhead_of_wall": (billed_us(asked) + whole["idle_us"] + sum(whole["overhead_us"].values())) / whole["wall_us"],
        "time": whole,
    }
    alone: list[float] = []
    for work in mixed(scale / 3):
        before = await account(desk)
        asked = await run(desk, work)
        busy_us = _between(before, await account(desk))["busy_us"]  # first: the last steps come with it
        alone.append(billed_us(asked) / busy_us)
    found["alone_billed_of_busy"] = min(alone)
    rounds = [await _round(desk, scale) for _ in range(repeats)]
    found |= shapley(rounds, scale)
    found["rounds"] = rounds
    model = after.cost_model
    assert model is not None
    found["cost_model"] = {name: round(getattr(model, name), 3) for name in model.__struct_fields__}
    return found


async def overhead(scale: float, pairs: int, **options: Any) -> dict[str, Any]:
    """Requests per second, and CPU time of the worker's and the model runner's processes, without metering and with it, engine after
    engine. The engine's own process waits for the model runner by spinning: its CPU time says nothing.
    """
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu_ms: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * pairs):
        meters = number % 4 in (1, 2)  # off, on, on, off
        async with engine(meters=meters, **options) as desk:
            found = [await _burst(desk, scale) for _ in range(_BURSTS)]
            rates[meters].append(max(per_s for per_s, _ in found))
            cpu_ms[meters].append(min(cpu for _, cpu in found))
    return {
        "metering_cpu_overhead": min(cpu_ms[True]) / min(cpu_ms[False]) - 1.0,
        "cpu_ms_per_request": {"metered": cpu_ms[True], "unmetered": cpu_ms[False]},
        "metering_overhead": 1.0 - max(rates[True]) / max(rates[False]),
        "requests_per_s": {"metered": rates[True], "unmetered": rates[False]},
    }


async def rate(desk: Desk, scale: float) -> float:
    """Requests per second of the burst that the rest of the machine disturbed least."""
    return max([(await _burst(desk, scale))[0] for _ in range(_BURSTS)])


async def _burst(desk: Desk, scale: float) -> tuple[float, float]:
    """Requests per second, and CPU milliseconds of a request."""
    work = Work(tenant="a", requests=round(160 * scale), at_once=SEATS, prompt=24, output=8, adapter_id=SALES)
    me = psutil.Process()
    processes = [me, *(one for one in me.children(recursive=True) if "Worker" in one.name())]
    began_s, before_s = time.perf_counter(), _cpu_s(processes)
    asked = await run(desk, work)
    return len(asked) / (time.perf_counter() - began_s), (_cpu_s(processes) - before_s) / len(asked) * 1000.0


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (one.cpu_times() for one in processes))


def us_per_token(steps: int = 3000, rows: int = SEATS) -> dict[str, float]:
    """CPU time of metering itself for each decoded token: in the engine's process, and in the worker's."""
    requests = {
        f"cmpl-01JD0000000000000000000000-1-{row}-0a1b2c3d": SimpleNamespace(
            num_prompt_tokens=10, num_computed_tokens=500, lora_request=SimpleNamespace(lora_int_id=1 + row % 2)
        )
        for row in range(rows)
    }
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(requests, 1))
    hook, told = StepHook(), list[bytes]()
    began_s = time.process_time()
    for number in range(steps):
        hook.switch("schedule")
        hook.scheduled(output, requests)
        hook.received(SimpleNamespace(tenantry_times=([(1, 2), (3, 4)], [("prepare", 1, 2)], [(number * 100, number * 100 + 50)])))
        if number % 10 == 9:
            told.append(encode(hook.queues.take()))
    in_engine_s = time.process_time() - began_s
    ledger = StepLedger()
    ledger.use(EngineLimits(slots=2, max_rank=8, bytes_per_rank=1, kv_blocks=100, kv_block_tokens=16, kv_block_bytes=1 << 20))
    handle = Handle(tenant_id="t", tenant="t", pool_id="main", base="demo@0")
    for name in requests:
        ledger.open(name.rsplit("-", 1)[0], Attempt(name, 1, "bench", handle, "/v1/completions"), 1)
    began_s = time.process_time()
    for batch in told:
        ledger.take(decode(batch))
    in_worker_s = time.process_time() - began_s
    tokens = steps * rows
    return {"engine": in_engine_s / tokens * 1e6, "worker": in_worker_s / tokens * 1e6}


def shapley(rounds: list[dict[str, int]], scale: float) -> dict[str, float]:
    """Charged over Shapley's share of two: halfway between what one adds to nothing and what it adds to the other.

    Times are the least of the rounds, which the rest of the machine disturbed least; parts of a joint run are medians.
    """
    us = {name: min(one[name] for one in rounds) for name in ("prefill_alone", "decode_alone", "both")}
    works = {"prefill": prefill_heavy(scale), "decode": decode_heavy(scale)}
    tokens = {name: work.requests * (work.prompt + work.output) for name, work in works.items()}
    found: dict[str, float] = {}
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        share_us = (us[f"{name}_alone"] + us["both"] - us[f"{other}_alone"]) / 2
        part = statistics.median(one[f"{name}_billed"] / one["billed"] for one in rounds)
        found[f"{name}_billed_of_shapley"] = part * us["both"] / share_us
        found[f"{name}_by_token_count_of_shapley"] = us["both"] * tokens[name] / sum(tokens.values()) / share_us
    return found


async def _round(desk: Desk, scale: float) -> dict[str, int]:
    """Microseconds: of each alone, of both together, and what each is charged then."""
    works = {"prefill": prefill_heavy(scale), "decode": decode_heavy(scale)}
    found: dict[str, int] = {}
    for name, work in works.items():
        before = await account(desk)
        await run(desk, work)
        found[f"{name}_alone"] = _between(before, await account(desk))["busy_us"]
    before = await account(desk)
    asked = await run(desk, *works.values())
    found["both"] = _between(before, await account(desk))["busy_us"]
    return found | {"billed": billed_us(asked), **{f"{name}_billed": billed_us(asked, name) for name in works}}


def _between(before: EngineTime, after: EngineTime) -> dict[str, Any]:
    named = {name: size_us - before.overhead_us.get(name, 0) for name, size_us in after.overhead_us.items()}
    return {
        **{field: getattr(after, field) - getattr(before, field) for field in ("wall_us", "busy_us", "idle_us", "unaccounted_us", "steps")},
        "overhead_us": {name: size_us for name, size_us in named.items() if size_us},
    }
