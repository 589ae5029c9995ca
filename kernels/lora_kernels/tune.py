"""Searches tiles for a model on this GPU and writes them where `lora_kernels.configs` finds them.

`python -m lora_kernels.tune --model gptoss-20b|qwen3-30b-a3b|... [--tokens 1,8,32] [--rank 32] [--slots 8] [--to FOLDER]`
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from lora_kernels.bench.measure import graph_us
from lora_kernels.bench.models import DENSE, MOE, DenseLayer
from lora_kernels.configs import FOLDER_VARIABLE, Shape, Tiles, file_name, padded_rank
from lora_kernels.dense_shrink.bench import DenseBench
from lora_kernels.moe_shrink.bench import Batch, MoeBench
from lora_kernels.pair_groups import can_group

STEPS = 24
GROUP_FROM_ROWS = 256
"""Fewer pairs seldom share a cell, or do not pay for the list."""
Plan = dict[str, Tiles]
Measure = Callable[[Plan], float]


def shrink_tiles(path: str, rank: int) -> list[Tiles]:
    """Candidates scaled so that a program holds about as much whatever the rank."""
    scale = max(1, padded_rank(rank) // 32)
    if path == "pairs":
        shapes = [(128, 1, 2), (128, 1, 4), (256, 1, 2), (256, 1, 4), (256, 1, 8), (256, 2, 4), (256, 2, 8), (512, 1, 4), (512, 1, 8)]
        return [Tiles(path=path, block=max(16, k // scale), steps=steps, num_warps=warps) for k, steps, warps in shapes]
    shapes = [(128, 1, 4, 1), (256, 1, 4, 1), (64, 4, 4, 4), (64, 8, 4, 4), (64, 16, 4, 5), (64, 24, 2, 6), (128, 3, 4, 3), (128, 4, 4, 4),
              (128, 6, 4, 4), (128, 8, 4, 4), (128, 12, 4, 4), (256, 3, 4, 3), (256, 4, 8, 3), (256, 6, 4, 3)]  # fmt: skip
    return [Tiles(path=path, block=max(16, k // scale), steps=steps, num_warps=warps, stages=stages) for k, steps, warps, stages in shapes]


def expand_tiles(path: str, rank: int) -> list[Tiles]:
    scale = max(1, padded_rank(rank) // 32)
    pairs = [(64, 2), (128, 2), (128, 4), (256, 2), (256, 4), (256, 8), (512, 4), (512, 8)]
    shared = [(32, 2), (64, 2), (64, 4), (128, 2), (128, 4), (128, 8), (256, 4), (256, 8)]
    return [Tiles(path=path, block=max(16, n // scale), num_warps=warps) for n, warps in (shared if path in ("groups", "slots") else pairs)]


def search(start: Plan, candidates: dict[str, list[Tiles]], measure: Measure, said: Callable[[str], None]) -> tuple[Plan, float]:
    """Changes one launch's tiles at a time, keeping what is faster; a candidate that does not compile or fit is skipped."""
    plan, best = dict(start), measure(start)
    for name, options in candidates.items():
        for index, tiles in enumerate(options):
            said(f"{name} {index + 1} of {len(options)}, best {best:.1f} us")
            if tiles == plan[name]:
                continue
            try:
                took = measure({**plan, name: tiles})
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways; the candidate is out
                said(f"{name} {index + 1} of {len(options)}: {type(error).__name__}")
                continue
            if took < best * 0.995:
                plan, best = {**plan, name: tiles}, took
    return plan, best


def tune_moe(model: str, bench: MoeBench, num_tokens: int, said: Callable[[str], None]) -> Iterator[tuple[Shape, Tiles]]:
    """The best tiles of w13 and w2 at one number of tokens."""
    batch: Batch = bench.batch(num_tokens, steps=STEPS, adapters=bench.slots)
    rank, shape = bench.rank, MOE[model]
    rows = num_tokens * shape.top_k

    def measure(plan: Plan) -> float:
        chosen = {name: (plan[f"{name}_shrink"], plan[f"{name}_expand"]) for name in ("w13", "w2")}
        return graph_us(lambda step: batch.ours(step, chosen), steps=STEPS, replays=9)

    paths = ["pairs"]
    if rows >= GROUP_FROM_ROWS and can_group(rows, num_slots=bench.slots, num_experts=shape.experts):
        paths.append("groups")
    plans = []
    for path in paths:
        options = {
            f"{name}_{kind}": (shrink_tiles if kind == "shrink" else expand_tiles)(path, rank)
            for name in ("w13", "w2")
            for kind in ("shrink", "expand")
        }
        start = {name: next(tiles for tiles in found if tiles.num_warps == 4) for name, found in options.items()}
        plans.append(search(start, options, measure, lambda text, path=path: said(f"{path}: {text}")))
    plan, best = min(plans, key=lambda found: found[1])
    summary = ", ".join(f"{path} {found[1]:.1f}" for path, found in zip(paths, plans, strict=True))
    others = [found[0] for found in plans if found[0] is not plan]
    plan, best = search(plan, {name: [other[name] for other in others] for name in plan}, measure, said)
    said(f"{best:.1f} us ({summary})")
    sizes = {
        "w13_shrink": (shape.hidden, shape.slices, shape.top_k),
        "w13_expand": (2 * shape.intermediate, shape.slices, 1),
        "w2_shrink": (shape.intermediate, 1, 1),
        "w2_expand": (shape.hidden, 1, 1),
    }
    for name, (width, slices, sharing) in sizes.items():
        key = Shape(
            op=f"moe_{name.split('_')[1]}",
            dtype="bfloat16",
            rank=rank,
            width=width,
            slices=slices,
            adapters=bench.slots,
            rows=rows,
            rows_sharing_x=sharing,
        )
        yield key, plan[name]


def tune_dense(layer: DenseLayer, num_tokens: int, *, rank: int, slots: int, said: Callable[[str], None]) -> Iterator[tuple[Shape, Tiles]]:
    bench = DenseBench(layer, num_tokens, slots=slots, adapters=slots, rank=rank)

    def measure(plan: Plan) -> float:
        return graph_us(lambda step: bench.ours(step, (plan["shrink"], plan["expand"])), steps=STEPS, replays=9)

    plans = []
    for path in ["pairs"] * (num_tokens <= 64) + ["slots"] * (num_tokens >= 4):
        options = {"shrink": shrink_tiles(path, rank), "expand": expand_tiles(path, rank)}
        start = {name: next(tiles for tiles in found if tiles.num_warps == 4) for name, found in options.items()}
        plans.append(search(start, options, measure, lambda text, path=path: said(f"{path}: {text}")))
    plan, best = min(plans, key=lambda found: found[1])
    said(f"{best:.1f} us")
    for kind, width in (("shrink", layer.k), ("expand", sum(layer.widths))):
        slices = len(layer.widths)
        shape = Shape(op=f"dense_{kind}", dtype="bfloat16", rank=rank, width=width, slices=slices, adapters=slots, rows=num_tokens)
        yield shape, plan[kind]


def write(folder: Path, gpu: str, found: list[tuple[Shape, Tiles]]) -> Path:
    """Adds entries to the GPU's file; those of the same shape are replaced."""
    file = folder / file_name(gpu)
    old = json.loads(file.read_text())["entries"] if file.exists() else []
    new = [{**asdict(shape), "tiles": asdict(tiles)} for shape, tiles in found]
    keys = [{key: value for key, value in entry.items() if key != "tiles"} for entry in new]
    kept = [entry for entry in old if {key: value for key, value in entry.items() if key != "tiles"} not in keys]
    entries = sorted(
        kept + new, key=lambda entry: [str(entry[key]).rjust(8) for key in ("op", "width", "slices", "rank", "adapters", "rows")]
    )
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text('{"gpu": ' + json.dumps(gpu) + ', "entries": [\n' + lines + "\n]}\n")
    return file


def main() -> int:
    models = sorted({*MOE, *(layer.model for layer in DENSE)})
    parser = argparse.ArgumentParser(prog="lora_kernels.tune", description="Search tiles for a model on this GPU.")
    parser.add_argument("--model", required=True, choices=models)
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256", help="batch sizes, by commas")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--to", type=Path, default=os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent / "configs")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here: tiles are found by timing")
    tokens = [int(text) for text in chosen.tokens.split(",")]
    jobs: list[tuple[str, Callable[..., Iterator[tuple[Shape, Tiles]]]]] = []
    if chosen.model in MOE:
        bench = MoeBench(MOE[chosen.model], slots=chosen.slots, rank=chosen.rank, layers=4)
        jobs += [(f"experts, {t} tokens", partial(tune_moe, chosen.model, bench, t)) for t in tokens]
    layers = [layer for layer in DENSE if layer.model == chosen.model]
    dense = partial(tune_dense, rank=chosen.rank, slots=chosen.slots)
    jobs += [(f"{layer.layer}, {t} tokens", partial(dense, layer, t)) for layer in layers for t in tokens]
    started, gpu = time.monotonic(), torch.cuda.get_device_name()
    for number, (title, job) in enumerate(jobs, 1):

        def said(text: str, head: str = f"[{number}/{len(jobs)}] {chosen.model} {title}") -> None:
            line = f"{head:<44} {text:<48} {time.monotonic() - started:>5.0f} s"
            sys.stderr.write(("\r" + line) if sys.stderr.isatty() else "")
            said.last = line

        found = list(job(said=said))
        sys.stderr.write(("\r" if sys.stderr.isatty() else "") + said.last + "\n")
        file = write(Path(chosen.to), gpu, found)
    sys.stdout.write(f"written: {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
