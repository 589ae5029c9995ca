"""w13 expand, activation and w2 shrink in one kernel: base activations are read once, activated ones written once."""

import triton
import triton.language as tl

from lora_kernels.moe_prefill.activation import activate
from lora_kernels.moe_prefill.shrink import load_hidden, loaded_ranks, rank_of
from lora_kernels.work_list.kernel import load_tile


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def expand_activate_kernel(
    gate_up,  # [num_pairs, 2 N]
    hidden,  # [SPLITS, SLICES, num_pairs, BLOCK_R] float32
    b0,  # [L, E, N, R], or [L, E, 2 N, R] interleaved
    b1,
    down_a,  # [L, E, R, N]
    topk_weights,  # [num_pairs] float32
    out,  # [num_pairs, N]
    down_hidden,  # [PARTS, num_pairs, BLOCK_R], rows in the list's order, times the routing weight
    ranks,  # [>= L] int32, where HAS_RANKS
    order,
    tiles,
    num_tiles,
    num_pairs,
    max_tiles,
    b_adapter_stride,
    b_expert_stride,
    a_adapter_stride,
    a_expert_stride,
    NUM_EXPERTS: tl.constexpr,
    NO_ADAPTER: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    GPT_OSS: tl.constexpr,
    FAST: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (tile, part of N). A tile without an adapter gets the plain activation, bit for bit."""
    SLICES: tl.constexpr = 1 if GPT_OSS else 2
    STEPS: tl.constexpr = (N + BLOCK_N * PARTS - 1) // (BLOCK_N * PARTS)
    EVEN_N: tl.constexpr = N == BLOCK_N * STEPS * PARTS
    WHOLE: tl.constexpr = EVEN_N and R == BLOCK_R and not HAS_RANKS
    part = tl.program_id(0) % PARTS
    cell, start, rows = load_tile(tiles, num_tiles, max_tiles, tl.program_id(0) // PARTS, LIST_BLOCK, BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    row_mask = (m < rows)[:, None]
    pair = tl.load(order + start + m, mask=m < rows, other=0)
    row = pair.to(tl.int64)[:, None]
    first_n = part * (STEPS * BLOCK_N)
    if (rows > 0) & (cell >= NO_ADAPTER):
        for step in range(STEPS):
            n = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask & (n < N)[None, :]
            gate, up = _load_gate_up(gate_up, row, n, mask, N, GPT_OSS)
            tl.store(out + row * N + n[None, :], activate(gate, up, GPT_OSS, FAST).to(out.dtype.element_ty), mask=mask)
    elif rows > 0:
        r = tl.arange(0, BLOCK_R)
        place = (start + m).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
        adapter = (cell // NUM_EXPERTS).to(tl.int64)
        rank = rank_of(ranks, adapter, R, HAS_RANKS)
        loaded = loaded_ranks(rank, BLOCK_R, HAS_RANKS)
        hidden_mask = row_mask & loaded[None, :]
        h0 = load_hidden(hidden, 0, place, hidden_mask, num_pairs, BLOCK_R, SLICES, SPLITS).to(b0.dtype.element_ty)
        h1 = h0
        if SLICES == 2:
            h1 = load_hidden(hidden, 1, place, hidden_mask, num_pairs, BLOCK_R, SLICES, SPLITS).to(b0.dtype.element_ty)
        expert = cell % NUM_EXPERTS
        b_at = adapter * b_adapter_stride + expert.to(tl.int64) * b_expert_stride
        a_rows = down_a + adapter * a_adapter_stride + expert.to(tl.int64) * a_expert_stride + r[None, :] * N
        down = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            n = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask if EVEN_N else row_mask & (n < N)[None, :]
            gate, up = _load_gate_up(gate_up, row, n, mask, N, GPT_OSS)
            # Rows of B are n, or interleaved 2 n and 2 n + 1; both have a stride of R within a pair.
            if GPT_OSS:
                b_gate_rows = b0 + b_at + n[None, :] * (2 * R) + r[:, None]
                b_up_rows = b_gate_rows + R
            else:
                b_gate_rows = b0 + b_at + n[None, :] * R + r[:, None]
                b_up_rows = b1 + b_at + n[None, :] * R + r[:, None]
            if WHOLE:
                b_gate = tl.load(b_gate_rows)
                b_up = tl.load(b_up_rows)
                a_tile = tl.load(a_rows + n[:, None])
            else:
                inside = (n < N)[None, :] & (loaded & (r < R))[:, None]
                b_gate = tl.load(b_gate_rows, mask=inside, other=0.0)
                b_up = tl.load(b_up_rows, mask=inside, other=0.0)
                a_tile = tl.load(a_rows + n[:, None], mask=(n < N)[:, None] & (r < rank)[None, :], other=0.0)
            gate = gate + tl.dot(h0, b_gate, input_precision="ieee")
            up = up + tl.dot(h1, b_up, input_precision="ieee")
            act = activate(gate, up, GPT_OSS, FAST)
            down = tl.dot(act.to(down_a.dtype.element_ty), a_tile, down, input_precision="ieee")
            tl.store(out + row * N + n[None, :], act.to(out.dtype.element_ty), mask=mask)
        weighed = down * tl.load(topk_weights + pair, mask=m < rows, other=0.0)[:, None]
        at = down_hidden + part.to(tl.int64) * num_pairs * BLOCK_R + place
        tl.store(at, weighed.to(down_hidden.dtype.element_ty), mask=row_mask)


@triton.jit
def _load_gate_up(gate_up, row, n, mask, N: tl.constexpr, GPT_OSS: tl.constexpr):
    """(gate, up) of columns n in float32. Interleaved 16-bit ones are read as one 32-bit word."""
    if GPT_OSS:
        if gate_up.dtype.element_ty.primitive_bitwidth == 16:
            both = tl.load(gate_up.to(tl.pointer_type(tl.int32)) + row * N + n[None, :], mask=mask, other=0)
            if gate_up.dtype.element_ty == tl.bfloat16:
                gate = (both << 16).to(tl.float32, bitcast=True)
                up = (both & -65536).to(tl.float32, bitcast=True)
            else:
                gate = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                up = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            gate = tl.load(gate_up + row * (2 * N) + 2 * n[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up + row * (2 * N) + 2 * n[None, :] + 1, mask=mask, other=0.0).to(tl.float32)
    else:
        gate = tl.load(gate_up + row * (2 * N) + n[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * (2 * N) + N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    return gate, up
