"""Candidates for an expert layer at prefill: around the rule's plan, each list tile and each form of the w2 expand a path of its own."""

from dataclasses import replace
from typing import Any

from lora_kernels.bench.models import MOE
from lora_kernels.bench.rows import Key
from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_prefill.plan import PrefillPlan, SumTiles, Tiles, TokenTiles, plan_prefill

LIST_BLOCKS = (16, 32, 64, 128)
MOST_PARTS = 3


def layer_shape(key: Key) -> LayerShape:
    model = MOE[key.model]
    return LayerShape(
        dtype="bfloat16",
        rank=key.rank,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        slices=model.slices,
        num_experts=model.experts,
        top_k=model.top_k,
        num_adapters=key.adapters,
        num_tokens=key.tokens,
    )


def rule(shape: LayerShape) -> PrefillPlan:
    return plan_prefill(
        num_tokens=shape.num_tokens,
        top_k=shape.top_k,
        num_adapters=shape.num_adapters,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        rank=shape.rank,
    )


def prefill_candidates(key: Key) -> dict[str, dict[str, list[Any]]]:
    """By path: candidates of every field of `PrefillPlan`."""
    shape = layer_shape(key)
    start = rule(shape)
    found = {}
    for block_m in (block for block in LIST_BLOCKS if start.block_m / 2 <= block <= start.block_m * 2):
        shrinks, activations = _shrinks(start.shrink, block_m, shape), _activations(start.activate, block_m, shape)
        added = _downs(start.add_down, block_m, shape)
        whole = [tiles for tiles in activations if tiles.parts == 1]
        for form, activate, down, ring, by_tokens in (
            ("by tokens", whole, [start.add_down], [None], _by_tokens(start.sum_experts)),
            ("one launch", activations, [start.add_down], _rings(start.expand_sum, block_m), [None]),
            ("added", activations, added, [None], [None]),
        ):
            found[f"tiles of {block_m}, {form}"] = {
                "block_m": [block_m],
                "shrink": shrinks,
                "activate": activate,
                "add_down": down,
                "expand_sum": ring,
                "sum_experts": by_tokens,
            }
    return found


def _shrinks(start: Tiles, block_m: int, shape: LayerShape) -> list[Tiles]:
    blocks = {min(start.block_m, block_m), block_m, max(16, block_m // 2)}
    options = [
        replace(start, block_m=block, parts=parts, num_warps=warps, num_stages=stages)
        for block in sorted(blocks)
        for parts in _parts(shape.hidden_size, start.block_n)
        for warps, stages in ((4, 3), (4, 4), (4, 5), (8, 4))
    ]
    return _from(replace(start, block_m=min(start.block_m, block_m)), options)


def _activations(start: Tiles, block_m: int, shape: LayerShape) -> list[Tiles]:
    blocks = {min(start.block_m, block_m), min(block_m, 64), min(block_m, 32)}
    options = [
        replace(start, block_m=block, block_n=block_n, parts=parts, num_warps=4, num_stages=stages)
        for block in sorted(blocks)
        for block_n in (32, 64)
        for parts in _parts(shape.intermediate_size, block_n)
        for stages in (2, 3)
    ]
    return _from(replace(start, block_m=min(start.block_m, block_m)), options)


def _downs(start: Tiles, block_m: int, shape: LayerShape) -> list[Tiles]:
    options = [
        replace(start, block_m=block, block_n=block_n, parts=parts, num_warps=warps)
        for block in sorted({min(block_m, 64), min(block_m, 32)})
        for block_n, warps in ((64, 4), (128, 8), (128, 4))
        for parts in _parts(shape.hidden_size, block_n)
    ]
    return _from(replace(start, block_m=min(start.block_m, block_m)), options)


def _rings(start: SumTiles | None, block_m: int) -> list[SumTiles]:
    narrow_m = min(block_m, 64)
    first = replace(start, block_m=narrow_m) if start else SumTiles(block_m=narrow_m, lead=2, ring=4)
    options = [replace(first, lead=lead, ring=lead + slack) for lead in (1, 2, 3, 4, 6, 8) for slack in (1, 3, 5)]
    options += [replace(first, block_t=block_t, chunk_n=chunk_n) for block_t, chunk_n in ((4, 256), (16, 256), (4, 512), (8, 512))]
    return [first, *(tiles for tiles in options if tiles != first)]


def _by_tokens(start: TokenTiles | None) -> list[TokenTiles]:
    first = start or TokenTiles(block_t=64, block_n=128, num_warps=4, num_stages=2)
    options = [
        replace(first, block_t=block_t, block_n=block_n, num_warps=warps, max_registers=most)
        for block_t, block_n, warps, most in (
            (64, 64, 4, 80),
            (64, 128, 4, None),
            (64, 128, 8, 64),
            (128, 128, 8, 128),
            (128, 128, 4, None),
        )
    ]
    return [first, *(tiles for tiles in options if tiles != first)]


def _parts(size: int, block: int) -> list[int]:
    """Numbers of programs that share a tile evenly."""
    if size % block:
        return [1]
    return [parts for parts in range(1, MOST_PARTS + 1) if size // block % parts == 0]


def _from(start: Tiles, options: list[Tiles]) -> list[Tiles]:
    """The search begins at the rule's."""
    return [start, *(tiles for tiles in options if tiles != start)]
