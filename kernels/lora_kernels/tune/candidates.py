"""Tiles worth timing, by launch and path: a plan names one for each launch of an op."""

from dataclasses import dataclass, replace
from typing import Any

from lora_kernels.bench.models import DENSE, MOE, DenseLayer
from lora_kernels.bench.rows import Key
from lora_kernels.configs import Shape, Tiles, padded_rank
from lora_kernels.dense_lora import needs_token_list
from lora_kernels.pair_groups import can_group
from lora_kernels.tune.prefill import prefill_candidates

GROUP_FROM_ROWS = 256
"""Fewer pairs seldom share a cell, or do not pay for the list."""
PAIRS_TO_TOKENS = 64
SLOTS_FROM_TOKENS = 4
SLOTS_TO_TOKENS = 64
FEW_TOKENS = 256
MOST_WHOLE_ROW = 4096
"""Elements of K that a program's registers hold for several rows of A."""
Plan = dict[str, Any]
"""Tiles by launch; of a layer at prefill the fields of `PrefillPlan`."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way through an op: candidates of each launch. The search starts from the first ones."""

    name: str
    candidates: dict[str, list[Any]]

    @property
    def start(self) -> Plan:
        return {launch: options[0] for launch, options in self.candidates.items()}


def list_tiles(launch: str, width: int, rank: int, tokens: int) -> list[Tiles]:
    """Of dense layers. Up to 256 tokens a program reads all it needs at once, or little; beyond, it walks K or N ahead of its products."""
    scale = max(1, padded_rank(rank) // 64)
    if tokens <= FEW_TOKENS:
        scale = 1  # such programs take R in blocks of 64
        if launch == "expand":
            shapes = [(256, 1, 8, 1, 16), (256, 1, 4, 1, 16), (128, 1, 8, 1, 16), (128, 1, 4, 1, 16), (128, 1, 4, 1, 32), (64, 4, 4, 3, 32),
                      (128, 4, 8, 3, 32)]  # fmt: skip
        else:
            shapes = [(256, 1, 4, 1, 16), (512, 1, 8, 1, 16), (128, 1, 4, 1, 16), (256, 1, 8, 1, 16), (256, 1, 4, 1, 32),
                      (128, 4, 4, 4, 16), (128, 4, 4, 4, 32), (128, 8, 4, 4, 32), (128, 6, 4, 4, 64)]  # fmt: skip
    elif launch == "expand":
        shapes = [(64, 4, 4, 3, 64), (64, 4, 4, 4, 64), (64, 8, 4, 3, 64), (64, 5, 4, 3, 64), (64, 4, 4, 3, 128), (128, 1, 4, 1, 64),
                  (128, 4, 4, 3, 64), (128, 4, 8, 3, 64), (128, 8, 8, 3, 64), (64, 2, 4, 2, 32), (64, 4, 8, 2, 64)]  # fmt: skip
    else:
        whole = -(-width // 64)
        splits = sorted({-(-whole // parts) for parts in (1, 2, 3, 4, 6, 8, 12)})
        shapes = [(64, steps, 4, 4, 64) for steps in splits] + [(64, splits[-1], 4, 6, 64), (128, -(-splits[-1] // 2), 4, 3, 64)]
        shapes += [(64, steps, 8, 4, 128) for steps in splits[-2:]] + [(64, splits[0], 4, 3, 32)]
    return [
        Tiles(path="list", block=max(16, block // scale), steps=steps * scale, num_warps=warps, stages=stages, rows=rows)
        for block, steps, warps, stages, rows in shapes
    ]


def shrink_tiles(path: str, width: int, rank: int) -> list[Tiles]:
    """Scaled so that a program holds about as much whatever the rank."""
    scale = max(1, padded_rank(rank) // 32)
    if path == "pairs":
        shapes = [(256, 1, 4, 1), (64, 4, 4, 1), (64, 5, 4, 1), (64, 8, 4, 1), (64, 9, 4, 1), (64, 9, 8, 1), (64, 12, 8, 1), (128, 1, 2, 1),
                  (256, 2, 4, 1), (256, 2, 8, 1)]  # fmt: skip
    elif path == "groups":
        shapes = [(128, 8, 4, 4), (64, 8, 2, 4), (64, 9, 2, 4), (64, 6, 2, 4), (64, 12, 2, 4), (64, 15, 1, 6), (64, 16, 2, 6),
                  (64, 23, 2, 6), (128, 4, 2, 3), (128, 6, 4, 3)]  # fmt: skip
    else:
        shapes = [(128, 4, 4, 4), (128, 1, 4, 1), (256, 1, 4, 1), (64, 4, 4, 4), (64, 8, 4, 4), (64, 16, 4, 5), (64, 24, 2, 6),
                  (128, 3, 4, 3), (128, 6, 4, 4), (128, 8, 4, 4), (128, 12, 4, 4), (256, 3, 4, 3), (256, 4, 8, 3),
                  (256, 6, 4, 3)]  # fmt: skip
    tiles = [Tiles(path=path, block=max(16, k // scale), steps=steps, num_warps=warps, stages=stages) for k, steps, warps, stages in shapes]
    if path == "pairs":  # a few whole rows of A a program: one partial for the expand to read
        tiles += [Tiles(path=path, block=64, steps=-(-width // 64), num_warps=8, r_parts=4 * scale)] if width <= MOST_WHOLE_ROW else []
        tiles += [Tiles(path=path, block=64, steps=9, num_warps=4, r_parts=2 * scale)]
    return tiles + [replace(one, rows=32) for one in tiles[:6] if path == "slots"]


def expand_tiles(path: str, rank: int) -> list[Tiles]:
    scale = max(1, padded_rank(rank) // 32)
    if path == "pairs":
        shapes = [(256, 1, 4, 1), (64, 1, 2, 1), (128, 1, 2, 1), (128, 1, 4, 1), (256, 1, 2, 1), (256, 1, 8, 1), (512, 1, 4, 1),
                  (512, 1, 8, 1), (128, 3, 4, 1), (128, 3, 2, 1), (64, 5, 4, 1), (256, 3, 8, 1), (128, 4, 4, 1)]  # fmt: skip
    elif path == "groups":
        shapes = [(64, 9, 4, 3), (64, 5, 2, 3), (64, 6, 2, 4), (64, 9, 2, 4), (64, 5, 4, 3), (64, 8, 4, 4), (128, 3, 4, 3), (128, 4, 4, 3),
                  (128, 5, 4, 3), (128, 6, 4, 3), (64, 3, 2, 3)]  # fmt: skip
    else:
        shapes = [(n, 1, warps, 1) for n, warps in ((128, 4), (32, 2), (64, 2), (64, 4), (128, 2), (128, 8), (256, 4), (256, 8))]
    return [Tiles(path=path, block=max(16, n // scale), steps=steps, num_warps=w, stages=stages) for n, steps, w, stages in shapes]


def paths_of(key: Key) -> list[Path]:
    """The ways through the op that can serve a row, by launch: w13_shrink and so on of experts, shrink and expand of dense layers."""
    if key.op == "moe_lora_prefill":
        return [Path(name=name, candidates=candidates) for name, candidates in prefill_candidates(key).items()]
    if key.op == "dense_lora":
        names = ["pairs"] * (key.tokens <= PAIRS_TO_TOKENS) + ["slots"] * (SLOTS_FROM_TOKENS <= key.tokens <= SLOTS_TO_TOKENS)
        names += ["list"] * needs_token_list(key.tokens)
        launches = ("shrink", "expand")
    else:
        pairs, experts = key.tokens * MOE[key.model].top_k, MOE[key.model].experts
        groups = pairs >= GROUP_FROM_ROWS and can_group(pairs, num_slots=key.adapters, num_experts=experts)
        names = ["pairs"] + ["groups"] * groups
        launches = ("w13_shrink", "w13_expand", "w2_shrink", "w2_expand")
    return [Path(name=name, candidates={launch: _tiles(name, launch, key) for launch in launches}) for name in names]


def _tiles(path: str, launch: str, key: Key) -> list[Tiles]:
    if path == "list":
        layer = layer_of(key)
        return list_tiles(launch, layer.k if launch == "shrink" else sum(layer.widths), key.rank, key.tokens)
    return shrink_tiles(path, _width(launch, key), key.rank) if "shrink" in launch else expand_tiles(path, key.rank)


def _width(launch: str, key: Key) -> int:
    """K of a shrink."""
    if key.op == "dense_lora":
        return layer_of(key).k
    return MOE[key.model].hidden if launch == "w13_shrink" else MOE[key.model].intermediate


def layer_of(key: Key) -> DenseLayer:
    return next(layer for layer in DENSE if (layer.model, layer.layer) == (key.model, key.layer))


def entries_of(key: Key, plan: Plan) -> list[tuple[Shape, Tiles]]:
    """What the configuration file is to say."""
    common = {"dtype": "bfloat16", "rank": key.rank, "adapters": key.adapters}
    if key.op == "dense_lora":
        layer = layer_of(key)
        widths = {"shrink": layer.k, "expand": sum(layer.widths)}
        shapes = {kind: {"op": f"dense_{kind}", "width": width, "slices": len(layer.widths)} for kind, width in widths.items()}
        return [(Shape(rows=key.tokens, **shape, **common), plan[kind]) for kind, shape in shapes.items()]
    model = MOE[key.model]
    rows = key.tokens * model.top_k
    sizes = {
        "w13_shrink": {"width": model.hidden, "slices": model.slices, "rows_sharing_x": model.top_k},
        "w13_expand": {"width": 2 * model.intermediate, "slices": model.slices},
        "w2_shrink": {"width": model.intermediate, "slices": 1},
        "w2_expand": {"width": model.hidden, "slices": 1},
    }
    return [(Shape(op=f"moe_{launch.split('_')[1]}", rows=rows, **size, **common), plan[launch]) for launch, size in sizes.items()]
