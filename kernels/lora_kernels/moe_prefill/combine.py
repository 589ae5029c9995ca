"""w2 expand added to the base's rows in place, then the sum over a token's choices."""

import triton
import triton.language as tl

from lora_kernels.moe_prefill.shrink import load_hidden
from lora_kernels.work_list.kernel import load_tile


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def add_down_kernel(
    down,  # [num_pairs, N], changed in place
    hidden,  # [SPLITS, num_pairs, BLOCK_R], rows in the list's order, times the routing weight
    b,  # [L, E, N, R]
    order,
    tiles,
    num_tiles,
    num_pairs,
    max_tiles,
    b_adapter_stride,
    b_expert_stride,
    NUM_EXPERTS: tl.constexpr,
    NO_ADAPTER: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile, part of N): down += hidden B^T on the rows of the tile's cell."""
    STEPS: tl.constexpr = (N + BLOCK_N * PARTS - 1) // (BLOCK_N * PARTS)
    EVEN_N: tl.constexpr = N == BLOCK_N * STEPS * PARTS
    part = tl.program_id(0) % PARTS
    cell, start, rows = load_tile(tiles, num_tiles, max_tiles, tl.program_id(0) // PARTS, LIST_BLOCK, BLOCK_M)
    if (rows > 0) & (cell < NO_ADAPTER):
        m = tl.arange(0, BLOCK_M)
        r = tl.arange(0, BLOCK_R)
        row_mask = (m < rows)[:, None]
        pair = tl.load(order + start + m, mask=m < rows, other=0)
        row = pair.to(tl.int64)[:, None]
        place = (start + m).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
        h = load_hidden(hidden, 0, place, row_mask, num_pairs, BLOCK_R, 1, SPLITS).to(b.dtype.element_ty)
        b_at = (cell // NUM_EXPERTS).to(tl.int64) * b_adapter_stride + (cell % NUM_EXPERTS).to(tl.int64) * b_expert_stride
        for step in tl.range(0, STEPS, num_stages=STAGES):
            n = (part * STEPS + step) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask & (n < N)[None, :]
            if EVEN_N:
                mask = row_mask
            if EVEN_N and R == BLOCK_R:
                b_tile = tl.load(b + b_at + n[None, :] * R + r[:, None])
            else:
                b_tile = tl.load(b + b_at + n[None, :] * R + r[:, None], mask=(n < N)[None, :] & (r < R)[:, None], other=0.0)
            at = down + row * N + n[None, :]
            base = tl.load(at, mask=mask, other=0.0)
            delta = tl.dot(h, b_tile, input_precision="ieee")
            tl.store(at, (base.to(tl.float32) + delta).to(down.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_choices_kernel(
    down,  # [num_tokens * TOP_K, N]
    topk_ids,  # [num_tokens * TOP_K]
    out,  # [num_tokens, N]
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """float32 sum in the order of the choices; a choice whose expert lives elsewhere is not read."""
    PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # Backwards: the rows that the kernel before wrote last are still in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    n = program % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    token = program // PARTS * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = (token < num_tokens)[:, None] & (n < N)[None, :]
    first = token.to(tl.int64)[:, None] * TOP_K
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for choice in tl.static_range(TOP_K):
        kept = mask
        if not ALL_LOCAL:
            expert = tl.load(topk_ids + token.to(tl.int64) * TOP_K + choice, mask=token < num_tokens, other=-1)
            kept = mask & ((expert >= 0) & (expert < NUM_EXPERTS))[:, None]
        total += tl.load(down + (first + choice) * N + n[None, :], mask=kept, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)
