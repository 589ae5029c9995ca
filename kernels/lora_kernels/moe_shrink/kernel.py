"""h = A x for (token, expert) pairs: float32 partials over K, in Triton, by pair or by group of pairs that share a cell.

Partials are `[splits, num_pairs, slices, R_PAD]`: no atomics, moe_expand sums the splits in their order. `PDL` is an
`Overlap`; the waits stand behind it because the interpreter has none. Groups are taken as h^T = A x^T: matrix units take 16 rows
of A as they lie and 8 pairs, where x A^T would take 16 pairs and turn A.
"""

# ruff: noqa: SIM102, SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.pair_groups.kernel import load_group


@triton.jit
def widen(x, PTX: tl.constexpr):
    """float32. PTX: of bfloat16, an instruction an element: the compiler takes three for two, and by pair that is what binds."""
    if PTX:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def pick(piece, first, second, third, SLICES: tl.constexpr):
    """One of up to three pointers: a branch keeps their alignment known, where a table of pointers would lose it."""
    chosen = first
    if SLICES > 1:
        if piece == 1:
            chosen = second
    if SLICES > 2:
        if piece == 2:
            chosen = third
    return chosen


@triton.jit
def rank_of(ranks_ptr, slot, R: tl.constexpr, HAS_RANKS: tl.constexpr):
    """The slot's own rank, never more than the stack's."""
    rank = R
    if HAS_RANKS:
        rank = tl.minimum(tl.load(ranks_ptr + slot), R)
    return rank


@triton.jit
def cell_of_pair(slots_ptr, experts_ptr, pair, num_slots, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """(whether the pair has an adapter and its expert is here, slot, expert). EXPERTS 0: a dense layer."""
    slot = tl.load(slots_ptr + pair // TOP_K).to(tl.int32)
    used = (slot >= 0) & (slot < num_slots)
    expert = 0
    if EXPERTS > 0:
        expert = tl.load(experts_ptr + pair).to(tl.int32)
        used = used & (expert >= 0) & (expert < EXPERTS)
    return used, slot, expert


@triton.jit
def weights_of(ptr, slot, expert, WEIGHT_EXPERTS: tl.constexpr, SIZE: tl.constexpr):
    """Where a cell's SIZE elements begin in a stack of one matrix an expert, or one for all."""
    cell = slot.to(tl.int64) * WEIGHT_EXPERTS
    if WEIGHT_EXPERTS > 1:
        cell += expert
    return ptr + cell * SIZE


@triton.jit
def load_a(a_ptr, r, k, rank, K: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, EVEN_K: tl.constexpr, HAS_RANKS: tl.constexpr):
    a_tile = a_ptr + r[:, None] * K + k[None, :]
    if EVEN_K:
        if HAS_RANKS or R != R_PAD:
            a = tl.load(a_tile, mask=(r < rank)[:, None], other=0.0)
        else:
            a = tl.load(a_tile)
    else:
        if HAS_RANKS or R != R_PAD:
            a = tl.load(a_tile, mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)
        else:
            a = tl.load(a_tile, mask=(k < K)[None, :], other=0.0)
    return a


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def shrink_pairs_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partials_ptr,
    slots_ptr,
    experts_ptr,
    enabled_ptr,
    ranks_ptr,
    num_pairs,
    num_slots,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    R_PARTS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [num_pairs * SLICES, splits * R_PARTS]: one pair's part of K against one [R / R_PARTS, BLOCK_K * STEPS] tile of its A."""
    PART: tl.constexpr = BLOCK_K * STEPS
    EVEN_K: tl.constexpr = K % PART == 0
    BLOCK_R: tl.constexpr = R_PAD // R_PARTS
    row = tl.program_id(0)
    split = tl.program_id(1) // R_PARTS
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    pair = row // SLICES
    piece = row % SLICES
    used, slot, expert = cell_of_pair(slots_ptr, experts_ptr, pair, num_slots, TOP_K, EXPERTS)
    if used:
        a_ptr = weights_of(pick(piece, a0_ptr, a1_ptr, a2_ptr, SLICES), slot, expert, A_EXPERTS, R * K)
        x_row = x_ptr + (pair // PAIRS_PER_ROW).to(tl.int64) * K
        r = tl.program_id(1) % R_PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        enabled = True
        if HAS_ENABLED:
            enabled = tl.load(enabled_ptr + slot) != 0
        k = split * PART + tl.arange(0, BLOCK_K)
        # Narrow blocks are all read before the wait and reduced once; of wide ones the registers hold one.
        NARROW: tl.constexpr = BLOCK_K <= 64
        tiles = ()
        for step in tl.static_range(STEPS if NARROW else 1):
            tiles += (load_a(a_ptr, r, k + step * BLOCK_K, rank, K, R, R_PAD, EVEN_K, HAS_RANKS),)
        if PDL == 2:
            gdc_wait()
            gdc_launch_dependents()
        products = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        total = tl.zeros((BLOCK_R,), tl.float32)
        for step in tl.static_range(STEPS):
            at = k + step * BLOCK_K
            if NARROW or step == 0:
                a = tiles[step]
            else:
                a = load_a(a_ptr, r, at, rank, K, R, R_PAD, EVEN_K, HAS_RANKS)
            if EVEN_K:
                x = tl.load(x_row + at)
            else:
                x = tl.load(x_row + at, mask=at < K, other=0.0)
            product = widen(a, PTX) * widen(x, PTX)[None, :]
            if NARROW:
                products += product
            else:
                total += tl.sum(product, axis=1)
        if NARROW:
            total = tl.sum(products, axis=1)
        to = partials_ptr + ((split.to(tl.int64) * num_pairs + pair) * SLICES + piece) * R_PAD + r
        tl.store(to, total, mask=(r < R_PAD) & enabled)
    else:
        if PDL == 2:
            gdc_wait()


@triton.jit
def shrink_rows(
    x_ptr,
    a_ptr,
    partials_ptr,
    x_rows,
    out_rows,
    members,
    rank,
    split,
    piece,
    num_rows,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to ROWS rows of x against STEPS blocks of K of one A: only members are read and written."""
    EVEN_K: tl.constexpr = K % (BLOCK_K * STEPS) == 0
    r = tl.arange(0, R_PAD)
    x_tile = x_ptr + x_rows.to(tl.int64)[None, :] * K
    total = tl.zeros((R_PAD, ROWS), tl.float32)
    if PDL == 2:
        gdc_wait()
        gdc_launch_dependents()
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_tile + k[:, None], mask=members[None, :], other=0.0)
        else:
            x = tl.load(x_tile + k[:, None], mask=members[None, :] & (k < K)[:, None], other=0.0)
        a = load_a(a_ptr, r, k, rank, K, R, R_PAD, EVEN_K, HAS_RANKS)
        total = tl.dot(a, x, total, input_precision="ieee")
    to = ((split.to(tl.int64) * num_rows + out_rows) * SLICES + piece) * R_PAD
    tl.store(partials_ptr + to[None, :] + r[:, None], total, mask=members[None, :] & (r < R_PAD)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def shrink_groups_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partials_ptr,
    records_ptr,
    ranks_ptr,
    num_pairs,
    PAIRS_PER_ROW: tl.constexpr,
    EXPERTS: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [splits * SLICES * most groups]: one group's rows of x against one tile of the A they share."""
    PART: tl.constexpr = BLOCK_K * STEPS
    TILES: tl.constexpr = (K + PART - 1) // PART * SLICES
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) % TILES
    split = tile // SLICES
    piece = tile % SLICES
    cell, count, pairs = load_group(records_ptr, tl.program_id(0) // TILES, GROUP)
    if count > 0:
        slot = cell // EXPERTS
        a_ptr = weights_of(pick(piece, a0_ptr, a1_ptr, a2_ptr, SLICES), slot, cell % EXPERTS, A_EXPERTS, R * K)
        m = tl.arange(0, GROUP)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        shrink_rows(
            x_ptr, a_ptr, partials_ptr, pairs // PAIRS_PER_ROW, pairs, m < count, rank, split, piece, num_pairs,
            K, R, R_PAD, SLICES, GROUP, BLOCK_K, STEPS, STAGES, HAS_RANKS, PDL,
        )  # fmt: skip
    elif PDL == 2:
        if tl.program_id(0) == 0:  # one is enough for the launch to end after the one before it
            gdc_wait()
