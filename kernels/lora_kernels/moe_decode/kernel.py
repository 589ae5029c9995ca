"""w13 expand + activation + w2 shrink by pair, and w2 expand + sum over choices by token, in Triton.

Every row is computed, those without an adapter from the base alone. Weights and base rows are read before the wait for what the
launch before writes. Partials as in moe_shrink.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.moe_prefill.activation import activate
from lora_kernels.moe_shrink.kernel import rank_of, weights_of, widen


@triton.jit
def served(slots_ptr, experts_ptr, enabled_ptr, pair, num_slots, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HAS_ENABLED: tl.constexpr):
    """(whether the expert is here, whether the pair gets an adapter, slot, expert); slot and expert 0 where they are out of range."""
    slot = tl.load(slots_ptr + pair // TOP_K).to(tl.int32)
    expert = tl.load(experts_ptr + pair).to(tl.int32)
    here = (expert >= 0) & (expert < EXPERTS)
    used = here & (slot >= 0) & (slot < num_slots)
    if HAS_ENABLED:
        used = used & (tl.load(enabled_ptr + slot, mask=used, other=0) != 0)
    return here, used, tl.where(used, slot, 0), tl.where(here, expert, 0)


@triton.jit
def load_rows(ptr, n, inside, rank, R: tl.constexpr, R_PAD: tl.constexpr):
    """Rows n of B, by 16-byte groups of the rank; what lies beyond the rank is dropped."""
    r = tl.arange(0, R_PAD)
    mask = inside[:, None] & ((r < (rank + 7) // 8 * 8) & (r < R))[None, :]
    b = tl.load(ptr + n[:, None] * R + r[None, :], mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], b, 0.0)


@triton.jit
def sum_partials(
    partials_ptr, num_pairs, pair, piece, splits, rank, used, SLICES: tl.constexpr, R_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr
):
    r = tl.arange(0, R_PAD)
    s = tl.arange(0, SPLITS_PAD)
    at = ((s.to(tl.int64)[None, :] * num_pairs + pair) * SLICES + piece) * R_PAD + r[:, None]
    mask = (s < splits)[None, :] & (r < rank)[:, None] & used
    return tl.sum(tl.load(partials_ptr + at, mask=mask, other=0.0), axis=1)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "splits"])
def expand_activate_kernel(
    base_ptr,
    partials_ptr,
    b0_ptr,
    b1_ptr,
    down_a_ptr,
    out_ptr,
    down_partials_ptr,
    slots_ptr,
    experts_ptr,
    enabled_ptr,
    ranks_ptr,
    num_pairs,
    num_slots,
    splits,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GPT_OSS: tl.constexpr,
    FAST: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [num_pairs, blocks of N]: activated columns of one pair, and their part of the w2 shrink."""
    pair = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    if PDL == 1:
        gdc_wait()
    here, used, slot, expert = served(slots_ptr, experts_ptr, enabled_ptr, pair, num_slots, TOP_K, EXPERTS, HAS_ENABLED)
    if here:
        rank = tl.where(used, rank_of(ranks_ptr, slot, R, HAS_RANKS), 0)
        r = tl.arange(0, R_PAD)
        n = first + tl.arange(0, BLOCK_N)
        row = base_ptr + pair.to(tl.int64) * (2 * N)
        if GPT_OSS:  # rows of B and columns of the base take turns: gate, up, gate, up
            both = 2 * first + tl.arange(0, 2 * BLOCK_N)
            b = load_rows(weights_of(b0_ptr, slot, expert, B_EXPERTS, 2 * N * R), both, both < 2 * N, rank, R, R_PAD)
            old = tl.load(row + both, mask=both < 2 * N, other=0.0).to(tl.float32)
        else:
            b_gate = load_rows(weights_of(b0_ptr, slot, expert, B_EXPERTS, N * R), n, n < N, rank, R, R_PAD)
            b_up = load_rows(weights_of(b1_ptr, slot, expert, B_EXPERTS, N * R), n, n < N, rank, R, R_PAD)
            gate = tl.load(row + n, mask=n < N, other=0.0).to(tl.float32)
            up = tl.load(row + N + n, mask=n < N, other=0.0).to(tl.float32)
        down_a = weights_of(down_a_ptr, slot, expert, A_EXPERTS, R * N) + r[:, None] * N + n[None, :]
        down_a = tl.load(down_a, mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
        if PDL == 2:
            gdc_wait()
        if PDL > 0:
            gdc_launch_dependents()
        if GPT_OSS:
            h = sum_partials(partials_ptr, num_pairs, pair, 0, splits, rank, used, 1, R_PAD, SPLITS_PAD)
            new = tl.where(used, old + tl.sum(widen(b, PTX) * h[None, :], axis=1), old)
            gate, up = tl.split(tl.reshape(new, (BLOCK_N, 2)))
        else:
            h = sum_partials(partials_ptr, num_pairs, pair, 0, splits, rank, used, 2, R_PAD, SPLITS_PAD)
            gate = tl.where(used, gate + tl.sum(widen(b_gate, PTX) * h[None, :], axis=1), gate)
            h = sum_partials(partials_ptr, num_pairs, pair, 1, splits, rank, used, 2, R_PAD, SPLITS_PAD)
            up = tl.where(used, up + tl.sum(widen(b_up, PTX) * h[None, :], axis=1), up)
        act = activate(gate, up, GPT_OSS, FAST).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair.to(tl.int64) * N + n, act, mask=n < N)
        act = tl.where(n < N, act, 0.0)  # of a NaN beyond the row, were there one
        part = tl.sum(widen(down_a, PTX) * act.to(tl.float32)[None, :], axis=1)
        to = down_partials_ptr + (tl.program_id(1).to(tl.int64) * num_pairs + pair) * R_PAD + r
        tl.store(to, part, mask=(r < R_PAD) & used)
    else:
        if PDL == 2:
            gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "splits"])
def expand_sum_kernel(
    base_ptr,
    partials_ptr,
    b_ptr,
    weights_ptr,
    out_ptr,
    slots_ptr,
    experts_ptr,
    enabled_ptr,
    ranks_ptr,
    num_tokens,
    num_slots,
    splits,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [num_tokens, blocks of N]: the sum over the token's choices, in their order; experts that live elsewhere are left out."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL == 1:
        gdc_wait()
    uses = ()
    ranks = ()
    tiles = ()
    olds = ()
    weights = ()
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        here, used, slot, expert = served(slots_ptr, experts_ptr, enabled_ptr, pair, num_slots, TOP_K, EXPERTS, HAS_ENABLED)
        rank = tl.where(used, rank_of(ranks_ptr, slot, R, HAS_RANKS), 0)
        tiles += (load_rows(weights_of(b_ptr, slot, expert, B_EXPERTS, N * R), n, n < N, rank, R, R_PAD),)
        olds += (tl.load(base_ptr + pair.to(tl.int64) * N + n, mask=(n < N) & here, other=0.0),)
        weights += (tl.load(weights_ptr + pair).to(tl.float32),)
        uses += (used,)
        ranks += (rank,)
    if PDL == 2:
        gdc_wait()
    if PDL > 0:
        gdc_launch_dependents()
    num_pairs = num_tokens * TOP_K
    total = tl.zeros((BLOCK_N,), tl.float32)
    delta = tl.zeros((BLOCK_N, R_PAD), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        h = sum_partials(partials_ptr, num_pairs, pair, 0, splits, ranks[choice], uses[choice], 1, R_PAD, SPLITS_PAD) * weights[choice]
        h = tl.where(uses[choice], h, 0.0)
        delta += widen(tiles[choice], PTX) * h[None, :]
        total += olds[choice].to(tl.float32)
    total += tl.sum(delta, axis=1)
    tl.store(out_ptr + token.to(tl.int64) * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)
