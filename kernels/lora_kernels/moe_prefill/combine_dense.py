"""w2 expand and the sum over choices in one GEMM: [tokens of one adapter, E * R] times that adapter's stacked B.

It does E / top_k times the needed arithmetic and spares a read and a write of the base's rows: it pays where experts
are few and tokens many.
"""

import triton
import triton.language as tl

from lora_kernels.moe_prefill.shrink import load_hidden
from lora_kernels.work_list.kernel import load_tile


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def pack_hidden_kernel(
    hidden,  # [SPLITS, num_pairs, BLOCK_R] float32, rows in the list's order
    topk_weights,  # [num_pairs] float32
    topk_ids,  # [num_pairs]
    places,  # [num_pairs]
    packed,  # [num_tokens, NUM_EXPERTS * BLOCK_R]
    num_tokens,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each token's hidden vectors times their routing weights at their experts' places, zeros at the others.

    Rows of tokens without an adapter hold whatever `hidden` held; the product below does not read them.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    rows = packed + token.to(tl.int64)[:, None] * (NUM_EXPERTS * BLOCK_R)
    for first in range(0, NUM_EXPERTS * BLOCK_R, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        zeros = tl.zeros((BLOCK_T, BLOCK_C), packed.dtype.element_ty)
        tl.store(rows + column[None, :], zeros, mask=inside[:, None] & (column < NUM_EXPERTS * BLOCK_R)[None, :])
    tl.debug_barrier()
    r = tl.arange(0, BLOCK_R)
    for choice in tl.static_range(TOP_K):
        pair = token.to(tl.int64) * TOP_K + choice
        expert = tl.load(topk_ids + pair, mask=inside, other=-1).to(tl.int32)
        weight = tl.load(topk_weights + pair, mask=inside, other=0.0)
        local = inside & (expert >= 0) & (expert < NUM_EXPERTS)
        place = tl.load(places + pair, mask=local, other=0).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
        values = load_hidden(hidden, 0, place, local[:, None], num_pairs, BLOCK_R, 1, SPLITS) * weight[:, None]
        tl.store(rows + expert[:, None] * BLOCK_R + r[None, :], values.to(packed.dtype.element_ty), mask=local[:, None])


@triton.jit(do_not_specialize=["max_tiles"])
def combine_dense_kernel(
    down,  # [num_tokens * TOP_K, N]
    packed,  # [num_tokens, NUM_EXPERTS * BLOCK_R]: what the kernel above made
    b,  # [L, E, N, R]
    topk_ids,
    out,  # [num_tokens, N]
    token_order,  # tokens by adapter: a work list whose pairs are tokens and whose cells are adapters
    token_tiles,
    num_tiles,
    max_tiles,
    b_adapter_stride,
    b_expert_stride,
    NUM_EXPERTS: tl.constexpr,
    NO_ADAPTER: tl.constexpr,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_FIRST: tl.constexpr,
):
    """One program per (tokens of one adapter, columns)."""
    PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    adapter, start, rows = load_tile(token_tiles, num_tiles, max_tiles, tl.program_id(0) // PARTS, LIST_BLOCK, BLOCK_M)
    if rows > 0:
        m = tl.arange(0, BLOCK_M)
        row_mask = (m < rows)[:, None]
        token = tl.load(token_order + start + m, mask=m < rows, other=0)
        mask = row_mask & (n < N)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if SUM_FIRST:
            total = _add_choices(total, down, topk_ids, token, n, mask, NUM_EXPERTS, ALL_LOCAL, TOP_K, N)
        if adapter < NO_ADAPTER:
            b_at = adapter.to(tl.int64) * b_adapter_stride
            hidden_rows = packed + token.to(tl.int64)[:, None] * (NUM_EXPERTS * BLOCK_R)
            for step in tl.range(0, NUM_EXPERTS * BLOCK_R, BLOCK_K, num_stages=STAGES):
                k = step + tl.arange(0, BLOCK_K)
                r = k % BLOCK_R
                inside = k < NUM_EXPERTS * BLOCK_R
                h = tl.load(hidden_rows + k[None, :], mask=row_mask & inside[None, :], other=0.0)
                b_rows = b + b_at + (k // BLOCK_R).to(tl.int64)[:, None] * b_expert_stride + r[:, None] + n[None, :] * R
                b_tile = tl.load(b_rows, mask=(inside & (r < R))[:, None] & (n < N)[None, :], other=0.0)
                total = tl.dot(h, b_tile, total, input_precision="ieee")
        if not SUM_FIRST:
            total = _add_choices(total, down, topk_ids, token, n, mask, NUM_EXPERTS, ALL_LOCAL, TOP_K, N)
        tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_choices(
    total,
    down,
    topk_ids,
    token,
    n,
    mask,
    NUM_EXPERTS: tl.constexpr,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
):
    first = token.to(tl.int64) * TOP_K
    for choice in tl.static_range(TOP_K):
        kept = mask
        if not ALL_LOCAL:
            expert = tl.load(topk_ids + first + choice)
            kept = mask & ((expert >= 0) & (expert < NUM_EXPERTS))[:, None]
        total += tl.load(down + (first[:, None] + choice) * N + n[None, :], mask=kept, other=0.0).to(tl.float32)
    return total
