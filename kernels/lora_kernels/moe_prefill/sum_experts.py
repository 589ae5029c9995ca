"""w2 expand and the sum over choices by tokens: a tile of one adapter's tokens meets every expert's B, its rows of other experts zero.

Wasteful in arithmetic, frugal in bytes: base rows and hidden vectors are read once, out is written once, and no delta is stored.
"""

# ruff: noqa: RUF005 (in Triton tuples grow by addition)

import triton
import triton.language as tl

from lora_kernels.moe_prefill.shrink import loaded_ranks, rank_of
from lora_kernels.work_list.kernel import load_tile


@triton.jit(do_not_specialize=["max_tiles"])
def sum_experts_kernel(
    down,  # [num_pairs, N]
    hidden,  # [num_pairs, BLOCK_R], rows in the list's order, times the routing weight
    b,  # [L, E, N, R]
    out,  # [num_tokens, N]
    topk_ids,  # [num_pairs]: the choices of a token differ
    ranks,  # [>= L] int32, where HAS_RANKS
    places,  # [num_pairs] int32: place in the list's order, -1 where the expert lives elsewhere
    token_order,
    token_tiles,
    num_token_tiles,
    max_tiles,
    b_adapter_stride,
    b_expert_stride,
    NUM_ADAPTERS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile of tokens, columns)."""
    CHUNKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) % CHUNKS * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter, start, rows = load_tile(token_tiles, num_token_tiles, max_tiles, tl.program_id(0) // CHUNKS, BLOCK_T, BLOCK_T)
    if rows > 0:
        t = tl.arange(0, BLOCK_T)
        inside = t < rows
        token = tl.load(token_order + start + t, mask=inside, other=0)
        mask = inside[:, None] & (n < N)[None, :]
        first = token.to(tl.int64) * TOP_K
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for choice in tl.static_range(TOP_K):
            kept = mask
            if not ALL_LOCAL:
                kept = mask & (tl.load(places + first + choice, mask=inside, other=-1) >= 0)[:, None]
            base = tl.load(down + (first[:, None] + choice) * N + n[None, :], mask=kept, other=0.0, eviction_policy="evict_first")
            total += base.to(tl.float32)
        if adapter < NUM_ADAPTERS:
            r = tl.arange(0, BLOCK_R)
            loaded = loaded_ranks(rank_of(ranks, adapter, R, HAS_RANKS), BLOCK_R, HAS_RANKS)
            b_rows = b + adapter.to(tl.int64) * b_adapter_stride + n[None, :] * R + r[:, None]
            experts, pair_places = (), ()
            for choice in tl.static_range(TOP_K):
                experts = experts + (tl.load(topk_ids + first + choice, mask=inside, other=-1),)
                pair_places = pair_places + (tl.load(places + first + choice, mask=inside, other=-1),)
            for expert in tl.range(0, NUM_EXPERTS, num_stages=STAGES):
                place = tl.full((BLOCK_T,), -1, tl.int32)
                for choice in tl.static_range(TOP_K):
                    place = tl.where(experts[choice] == expert, pair_places[choice], place)
                h = tl.load(hidden + place.to(tl.int64)[:, None] * BLOCK_R + r[None, :], mask=(place >= 0)[:, None], other=0.0)
                at = b_rows + expert * b_expert_stride.to(tl.int64)
                if N % BLOCK_N == 0 and R == BLOCK_R and not HAS_RANKS:
                    b_tile = tl.load(at)
                else:
                    b_tile = tl.load(at, mask=(n < N)[None, :] & (loaded & (r < R))[:, None], other=0.0)
                total = tl.dot(h, b_tile, total, input_precision="ieee")
        tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)
