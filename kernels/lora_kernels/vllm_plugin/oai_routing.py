"""What matmul_ogs needs to know of a small batch's routing, in one launch where vLLM's modular path takes about ten.

The tables are those of triton_kernels' RoutingData and its indices, as of the version vLLM 0.26 bundles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MOST_PAIRS = 1024
MOST_EXPERTS = 256
SMALLEST_BLOCK = 16
NUM_BLOCKS = 4
"""Rows of a product's tile: 16, 32, 64, 128."""


@dataclass(frozen=True, kw_only=True)
class RouteTables:
    """Pairs are (token, choice), places their order by expert; -1 where an expert lives elsewhere.

    pair_of_place, token_of_place, place_of_pair: [num_pairs] int32. weight_of_place: [num_pairs] bfloat16.
    pairs_of_expert: [E] int32, first_place: [E + 1]. By rows of a tile: first_tile [E + 1], tiles [most] as (tile of the
    expert) << 16 | expert, -1 beyond the last.
    """

    pair_of_place: torch.Tensor
    token_of_place: torch.Tensor
    place_of_pair: torch.Tensor
    weight_of_place: torch.Tensor
    pairs_of_expert: torch.Tensor
    first_place: torch.Tensor
    first_tile: dict[int, torch.Tensor]
    tiles: dict[int, torch.Tensor]


def can_route(num_pairs: int, num_experts: int) -> bool:
    return 1 <= num_pairs <= MOST_PAIRS and num_experts <= MOST_EXPERTS


def route(topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> RouteTables:
    """topk_ids: [num_tokens, top_k] int, contiguous. topk_weights: the same, floating."""
    num_tokens, top_k = topk_ids.shape
    num_pairs = num_tokens * top_k
    most_tiles, padded_pairs = _most_tiles(num_pairs, num_experts), triton.next_power_of_2(max(num_pairs, 16))
    sizes = [num_pairs] * 3 + [num_experts] + [num_experts + 1] * (1 + NUM_BLOCKS) + [most_tiles] * NUM_BLOCKS
    padded = [(size + 3) // 4 * 4 for size in sizes]
    buffer = torch.empty(sum(padded), dtype=torch.int32, device=topk_ids.device)
    weights = torch.empty(num_pairs, dtype=torch.bfloat16, device=topk_ids.device)
    route_kernel[(1,)](
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        weights,
        buffer,
        num_pairs,
        most_tiles,
        padded[0],
        padded[-1],
        TOP_K=top_k,
        EXPERTS=num_experts,
        E_STRIDE=padded[3],
        E1_STRIDE=padded[4],
        E_PAD=triton.next_power_of_2(max(num_experts, 16)),
        P_PAD=padded_pairs,
        T_PAD=triton.next_power_of_2(max(_most_tiles(padded_pairs, num_experts), 16)),
        BLOCKS=NUM_BLOCKS,
        SMALLEST=SMALLEST_BLOCK,
        num_warps=4,
    )
    parts = [part[:size] for part, size in zip(buffer.split(padded), sizes, strict=True)]
    block_sizes = [SMALLEST_BLOCK << step for step in range(NUM_BLOCKS)]
    return RouteTables(
        pair_of_place=parts[0],
        token_of_place=parts[1],
        place_of_pair=parts[2],
        weight_of_place=weights,
        pairs_of_expert=parts[3],
        first_place=parts[4],
        first_tile=dict(zip(block_sizes, parts[5:9], strict=True)),
        tiles=dict(zip(block_sizes, parts[9:], strict=True)),
    )


def _most_tiles(num_pairs: int, num_experts: int) -> int:
    """Of the smallest size, however the pairs are routed."""
    return num_pairs if num_pairs <= num_experts else num_experts - 1 + -(-(num_pairs - num_experts + 1) // SMALLEST_BLOCK)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles", "pair_stride", "tile_stride"])
def route_kernel(
    ids,
    weights,
    weight_of_place,
    tables,  # pair_of_place, token_of_place, place_of_pair, pairs_of_expert, first_place, first_tile..., tiles...
    num_pairs,
    most_tiles,
    pair_stride,
    tile_stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    E_STRIDE: tl.constexpr,
    E1_STRIDE: tl.constexpr,
    E_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
    T_PAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """One program sorts all pairs by expert and counts tiles."""
    p = tl.arange(0, P_PAD)
    expert = tl.load(ids + p, mask=p < num_pairs, other=-1).to(tl.int32)
    routed = (expert >= 0) & (expert < EXPERTS)
    entry = tl.sort(tl.where(routed, expert, E_PAD) * P_PAD + p)
    pair = entry % P_PAD
    placed = entry < E_PAD * P_PAD
    tl.store(tables + p, tl.where(placed, pair, -1), mask=p < num_pairs)
    tl.store(tables + pair_stride + p, tl.where(placed, pair // TOP_K, -1), mask=p < num_pairs)
    tl.store(tables + 2 * pair_stride + pair, tl.where(placed, p, -1), mask=pair < num_pairs)
    weight = tl.load(weights + pair, mask=placed, other=0.0)
    tl.store(weight_of_place + p, weight.to(weight_of_place.dtype.element_ty), mask=p < num_pairs)

    e = tl.arange(0, E_PAD)
    count = tl.histogram(tl.where(routed, expert, 0), E_PAD, mask=routed)
    by_expert = tables + 3 * pair_stride
    tl.store(by_expert + e, count, mask=e < EXPERTS)
    first = by_expert + E_STRIDE
    tl.store(first, 0)
    tl.store(first + 1 + e, tl.cumsum(count, 0), mask=e < EXPERTS)
    t = tl.arange(0, T_PAD)
    for step in tl.static_range(BLOCKS):
        tiles = (count + (SMALLEST << step) - 1) // (SMALLEST << step)
        end = tl.cumsum(tiles, 0)
        first_tile = first + (1 + step) * E1_STRIDE
        tl.store(first_tile, 0)
        tl.store(first_tile + 1 + e, end, mask=e < EXPERTS)
        owner = tl.sum(((end[None, :] <= t[:, None]) & (e < EXPERTS)[None, :]).to(tl.int32), 1)
        before = tl.sum(tl.where(e[None, :] < owner[:, None], tiles[None, :], 0), 1)
        tile = tl.where(t < tl.sum(tiles, 0), ((t - before) << 16) + owner, -1)
        tl.store(first + (1 + BLOCKS) * E1_STRIDE + step * tile_stride + t, tile, mask=t < most_tiles)
