"""w13 shrink: x A^T of every listed pair, per cell, split over K into float32 partials that readers sum in order."""

# ruff: noqa: SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl

from lora_kernels.work_list.kernel import load_tile


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def shrink_kernel(
    x,  # [num_tokens, K]
    a0,  # [L, E, R, K], the last two dimensions contiguous
    a1,  # likewise, the second slice; a0 where there is one slice
    hidden,  # [SPLITS, SLICES, num_pairs, BLOCK_R] float32, rows in the list's order
    ranks,  # [>= L] int32, where HAS_RANKS
    order,
    tiles,
    num_tiles,
    num_pairs,
    max_tiles,
    a_adapter_stride,
    a_expert_stride,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NO_ADAPTER: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile, split): BLOCK_M pairs of one cell against its A."""
    SPLIT_K: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    EVEN_K: tl.constexpr = K == SPLIT_K * SPLITS
    WHOLE: tl.constexpr = EVEN_K and R == BLOCK_R and not HAS_RANKS
    split = tl.program_id(0) % SPLITS
    cell, start, rows = load_tile(tiles, num_tiles, max_tiles, tl.program_id(0) // SPLITS, LIST_BLOCK, BLOCK_M)
    if (rows > 0) & (cell < NO_ADAPTER):
        m = tl.arange(0, BLOCK_M)
        r = tl.arange(0, BLOCK_R)
        pair = tl.load(order + start + m, mask=m < rows, other=0)
        x_rows = x + (pair // TOP_K).to(tl.int64)[:, None] * K
        at = (cell // NUM_EXPERTS).to(tl.int64) * a_adapter_stride + (cell % NUM_EXPERTS).to(tl.int64) * a_expert_stride
        a_rows = at + r[None, :] * K
        row_mask = (m < rows)[:, None]
        rank = rank_of(ranks, cell // NUM_EXPERTS, R, HAS_RANKS)
        acc0 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        acc1 = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in tl.range(0, SPLIT_K, BLOCK_K, num_stages=STAGES):
            k = split * SPLIT_K + step + tl.arange(0, BLOCK_K)
            x_mask = row_mask
            a_mask = (r < rank)[None, :]
            if not EVEN_K:
                x_mask = row_mask & (k < K)[None, :]
                a_mask = a_mask & (k < K)[:, None]
            x_tile = tl.load(x_rows + k[None, :], mask=x_mask, other=0.0)
            if WHOLE:
                a_tile = tl.load(a0 + a_rows + k[:, None])
            else:
                a_tile = tl.load(a0 + a_rows + k[:, None], mask=a_mask, other=0.0)
            acc0 = tl.dot(x_tile, a_tile, acc0, input_precision="ieee")
            if SLICES == 2:
                if WHOLE:
                    a_tile = tl.load(a1 + a_rows + k[:, None])
                else:
                    a_tile = tl.load(a1 + a_rows + k[:, None], mask=a_mask, other=0.0)
                acc1 = tl.dot(x_tile, a_tile, acc1, input_precision="ieee")
        place = (start + m).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
        out_mask = row_mask & loaded_ranks(rank, BLOCK_R, HAS_RANKS)[None, :]
        part = hidden + (split * SLICES).to(tl.int64) * num_pairs * BLOCK_R
        tl.store(part + place, acc0, mask=out_mask)
        if SLICES == 2:
            tl.store(part + num_pairs.to(tl.int64) * BLOCK_R + place, acc1, mask=out_mask)


@triton.jit
def rank_of(ranks, adapter, R: tl.constexpr, HAS_RANKS: tl.constexpr):
    """The adapter's own rank, at most R: nothing beyond it counts."""
    if HAS_RANKS:
        return tl.minimum(tl.load(ranks + adapter).to(tl.int32), R)
    return R


@triton.jit
def loaded_ranks(rank, BLOCK_R: tl.constexpr, HAS_RANKS: tl.constexpr):
    """Which elements of a hidden vector, or of a row of B, are read: up to a multiple of 8, so that loads stay 16 bytes wide."""
    r = tl.arange(0, BLOCK_R)
    if HAS_RANKS:
        return r < (rank + 7) // 8 * 8
    return r < BLOCK_R


@triton.jit
def load_hidden(hidden, slice_index, place, mask, num_pairs, BLOCK_R: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr):
    """The partials of `place` in slice `slice_index`, summed in the order of the splits: float32."""
    plane = num_pairs.to(tl.int64) * BLOCK_R
    total = tl.load(hidden + slice_index * plane + place, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(hidden + (split * SLICES + slice_index) * plane + place, mask=mask, other=0.0)
    return total
