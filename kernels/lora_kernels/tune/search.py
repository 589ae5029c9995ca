"""Finds the fastest plan of a row: compile every candidate in parallel processes, then time one after the other."""

import sys
from collections.abc import Callable, Iterable

import torch

from lora_kernels.bench.measure import graph_us
from lora_kernels.bench.models import MOE
from lora_kernels.bench.rows import Key
from lora_kernels.dense_shrink.bench import DenseBench
from lora_kernels.moe_prefill.bench import MODELS as PREFILL_MODELS
from lora_kernels.moe_prefill.bench import make_layers, run_forward
from lora_kernels.moe_prefill.plan import PrefillPlan
from lora_kernels.moe_shrink.bench import MoeBench
from lora_kernels.tune.candidates import Path, Plan, layer_of

STEPS = 24
REPLAYS = 9
WORTH = 0.995
"""A candidate must be faster by this factor to be taken: less is noise."""
WHOLE = ("block_m", "expand_sum", "sum_experts")
"""What the other fields of a plan at prefill were chosen for."""
Run = Callable[[int, Plan], object]
Measure = Callable[[Plan], float]
PREFILL_LAYERS = 4


def runner(key: Key, *, steps: int = STEPS) -> Run:
    """The row's tensors, and a step under a given plan; at prefill a step is a chain of layers, as many as there are steps or four."""
    if key.op == "moe_lora_prefill":
        model = next(model for model in PREFILL_MODELS if model.name == key.model)
        layers = make_layers(model, key.tokens, key.adapters, key.rank, count=min(PREFILL_LAYERS, steps))
        return lambda _, plan: run_forward(layers, PrefillPlan(**plan))
    if key.op == "dense_lora":
        dense = DenseBench(layer_of(key), key.tokens, slots=key.adapters, adapters=key.adapters, rank=key.rank, steps=steps)
        return lambda step, plan: dense.ours(step, (plan["shrink"], plan["expand"]))
    bench = MoeBench(MOE[key.model], slots=key.adapters, rank=key.rank, layers=min(4, steps))
    batch = bench.batch(key.tokens, steps=steps, adapters=key.adapters)
    return lambda step, plan: batch.ours(step, {name: (plan[f"{name}_shrink"], plan[f"{name}_expand"]) for name in ("w13", "w2")})


def compile_plans(key: Key, plans: Iterable[Plan]) -> None:
    """For another process: fills Triton's cache. What does not compile or fit is found out again, and left out, when it is timed."""
    run = runner(key, steps=1)
    for plan in plans:
        try:
            run(0, plan)
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways
            sys.stderr.write(f"{key} {plan}: {type(error).__name__}\n")
    torch.cuda.synchronize()


def plans_to_compile(path: Path) -> list[Plan]:
    """Few plans that hold every candidate of every launch."""
    most = max(len(options) for options in path.candidates.values())
    return [{launch: options[index % len(options)] for launch, options in path.candidates.items()} for index in range(most)]


def measure(key: Key) -> Measure:
    """Microseconds a layer under a plan."""
    run = runner(key)
    if key.op == "moe_lora_prefill":
        return lambda plan: graph_us(lambda step: run(step, plan), steps=1, replays=REPLAYS) / PREFILL_LAYERS
    return lambda plan: graph_us(lambda step: run(step, plan), steps=STEPS, replays=REPLAYS)


def descend(start: Plan, candidates: dict[str, list], time: Measure, said: Callable[[str], None]) -> tuple[Plan, float]:
    """Changes one launch's tiles at a time, keeping what is faster; a candidate that fails is skipped."""
    plan, best = dict(start), time(start)
    for launch, options in candidates.items():
        for tiles in options:
            said(f"{launch}, best {best:.1f} us")
            if tiles == plan[launch]:
                continue
            try:
                took = time({**plan, launch: tiles})
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; the candidate is out
                said(f"{launch}: {type(error).__name__}")
                continue
            if took < best * WORTH:
                plan, best = {**plan, launch: tiles}, took
    return plan, best


def find(paths: list[Path], time: Measure, said: Callable[[str], None]) -> tuple[Plan, float]:
    """The best plan of any path; then, launch by launch, what another path chose is tried in it."""
    found = [descend(path.start, path.candidates, time, lambda text, path=path: said(f"{path.name}: {text}")) for path in paths]
    plan, _ = min(found, key=lambda one: one[1])
    others = [other for other, _ in found if other is not plan]
    mixed = {launch: [other[launch] for other in others] for launch in plan if launch not in WHOLE}
    return descend(plan, mixed, time, said)
