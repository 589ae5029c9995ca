"""h = A x for the tokens of a dense layer, in Triton: float32 partials over K, `[splits, num_tokens, slices, R_PAD]`.

By slot: a program per adapter slot and part of K reads its A once for all of the slot's tokens, which it finds itself.
By list: tokens come sorted by slot (token_list), x is read once for all slices. Decode batches of very few tokens take
moe_shrink's kernel by pair instead, with one choice a token.
"""

# ruff: noqa: SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.dense_shrink.members import listed_rows, members_from, members_of
from lora_kernels.moe_shrink.kernel import pick, rank_of


@triton.jit
def load_a(a_ptr, r, k, rank, K: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, HAS_RANKS: tl.constexpr, EVEN_K: tl.constexpr):
    """A's rows r in a block of K: nothing at or above the rank or K is read."""
    a_tile = a_ptr + r[:, None] * K + k[None, :]
    if EVEN_K:
        if HAS_RANKS or R != R_PAD:
            a = tl.load(a_tile, mask=(r < rank)[:, None], other=0.0)
        else:
            a = tl.load(a_tile)
    else:
        a = tl.load(a_tile, mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)
    return a


@triton.jit
def load_x(x_tile, k, inside, K: tl.constexpr, EVEN_K: tl.constexpr):
    if EVEN_K:
        x = tl.load(x_tile + k[None, :], mask=inside[:, None], other=0.0)
    else:
        x = tl.load(x_tile + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_slots_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partials_ptr,
    slots_ptr,
    ranks_ptr,
    num_tokens,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of tokens, slots * SLICES * blocks of R, splits]. A single step reads A before the wait and keeps it."""
    EVEN_K: tl.constexpr = K % (BLOCK_K * STEPS) == 0
    R_BLOCKS: tl.constexpr = R_PAD // BLOCK_R
    slot = tl.program_id(1) // (SLICES * R_BLOCKS)
    piece = tl.program_id(1) // R_BLOCKS % SLICES
    r = tl.program_id(1) % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    t, mine, through, count = members_of(slots_ptr, slot, tl.program_id(0), num_tokens, TOKENS)
    if count > 0:
        a_ptr = pick(piece, a0_ptr, a1_ptr, a2_ptr, SLICES) + slot.to(tl.int64) * (R * K)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        part = partials_ptr + (split.to(tl.int64) * num_tokens * SLICES + piece) * R_PAD + r[None, :]
        if STEPS == 1:
            k = split * BLOCK_K + tl.arange(0, BLOCK_K)
            a = load_a(a_ptr, r, k, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
        if PDL == 2:
            gdc_wait()
            gdc_launch_dependents()
        for first in range(0, count, ROWS):
            rows, inside = members_from(t, mine, through, count, first, TOKENS, ROWS)
            x_tile = x_ptr + rows.to(tl.int64)[:, None] * K
            total = tl.zeros((ROWS, BLOCK_R), tl.float32)
            if STEPS == 1:
                x = load_x(x_tile, k, inside, K, EVEN_K)
                total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            else:
                for step in tl.range(0, STEPS, num_stages=STAGES):
                    k_step = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
                    x = load_x(x_tile, k_step, inside, K, EVEN_K)
                    a_step = load_a(a_ptr, r, k_step, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                    total = tl.dot(x, tl.trans(a_step), total, input_precision="ieee")
            tl.store(part + rows.to(tl.int64)[:, None] * (SLICES * R_PAD), total, mask=inside[:, None])
    else:
        if PDL == 2:
            gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "num_groups", "num_slots"])
def shrink_list_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partials_ptr,
    order_ptr,
    groups_ptr,
    starts_ptr,
    counts_ptr,
    ranks_ptr,
    num_tokens,
    num_groups,
    num_slots,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    JOINED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [runs of ROWS tokens of a slot * SLICES * blocks of R, splits]; * 1 where slices are JOINED in a program.

    A single step reads A before the wait.
    """
    EVEN_K: tl.constexpr = K % (BLOCK_K * STEPS) == 0
    R_BLOCKS: tl.constexpr = R_PAD // BLOCK_R
    PROGRAMS: tl.constexpr = 1 if JOINED else SLICES * R_BLOCKS
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    slot, start, count = listed_rows(groups_ptr, starts_ptr, counts_ptr, tl.program_id(0) // PROGRAMS, num_groups, num_slots, GROUPS, ROWS)
    split = tl.program_id(1)
    piece = tl.program_id(0) % PROGRAMS // R_BLOCKS
    r = tl.program_id(0) % PROGRAMS % R_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    if count > 0:
        m = tl.arange(0, ROWS)
        inside = (m < count) & (start + m < num_tokens)
        rows = tl.load(order_ptr + start + m, mask=inside, other=-1).to(tl.int64)
        inside = (rows >= 0) & (rows < num_tokens)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        at = slot.to(tl.int64) * (R * K)
        a_ptr = pick(piece, a0_ptr, a1_ptr, a2_ptr, SLICES) + at
        x_tile = x_ptr + rows[:, None] * K
        part = partials_ptr + ((split.to(tl.int64) * num_tokens + rows) * SLICES + piece)[:, None] * R_PAD + r[None, :]
        if STEPS == 1:
            k = split * BLOCK_K + tl.arange(0, BLOCK_K)
            a0 = load_a(a_ptr, r, k, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
        if PDL == 2:
            gdc_wait()
            gdc_launch_dependents()
        total0 = tl.zeros((ROWS, BLOCK_R), tl.float32)
        if STEPS == 1:
            x = load_x(x_tile, k, inside, K, EVEN_K)
            tl.store(part, tl.dot(x, tl.trans(a0), total0, input_precision="ieee"), mask=inside[:, None])
            if JOINED:
                a1 = load_a(a1_ptr + at, r, k, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                tl.store(part + R_PAD, tl.dot(x, tl.trans(a1), total0, input_precision="ieee"), mask=inside[:, None])
            if JOINED and SLICES > 2:
                a2 = load_a(a2_ptr + at, r, k, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                tl.store(part + 2 * R_PAD, tl.dot(x, tl.trans(a2), total0, input_precision="ieee"), mask=inside[:, None])
        else:
            total1 = tl.zeros((ROWS, BLOCK_R), tl.float32)
            total2 = tl.zeros((ROWS, BLOCK_R), tl.float32)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                k_step = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
                x = load_x(x_tile, k_step, inside, K, EVEN_K)
                a0 = load_a(a_ptr, r, k_step, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                total0 = tl.dot(x, tl.trans(a0), total0, input_precision="ieee")
                if JOINED:
                    a1 = load_a(a1_ptr + at, r, k_step, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                    total1 = tl.dot(x, tl.trans(a1), total1, input_precision="ieee")
                if JOINED and SLICES > 2:
                    a2 = load_a(a2_ptr + at, r, k_step, rank, K, R, R_PAD, HAS_RANKS, EVEN_K)
                    total2 = tl.dot(x, tl.trans(a2), total2, input_precision="ieee")
            tl.store(part, total0, mask=inside[:, None])
            if JOINED:
                tl.store(part + R_PAD, total1, mask=inside[:, None])
            if JOINED and SLICES > 2:
                tl.store(part + 2 * R_PAD, total2, mask=inside[:, None])
    else:
        if PDL == 2:
            gdc_wait()
