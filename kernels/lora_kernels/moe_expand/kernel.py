"""out += w * B h for (token, expert) pairs, in Triton, by pair or by group of pairs that share a cell.

h arrives as moe_shrink's float32 partials `[splits, num_pairs, slices, R_PAD]`, summed here in the order of the splits. One
launch serves all slices: their blocks of N stand side by side in the grid, N of its own each. Groups are taken as (B h^T)^T.
"""

# ruff: noqa: SIM102, SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.moe_shrink.kernel import cell_of_pair, pick, rank_of, weights_of, widen
from lora_kernels.pair_groups.kernel import load_group


@triton.jit
def slice_of(block, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK_N: tl.constexpr):
    """(slice, first row of its B, its N, its first column of the output) of a block of the grid; N is 0 past the last."""
    piece = 0
    local = block
    width = N0
    column = 0
    if N1 > 0:
        if block >= tl.cdiv(N0, BLOCK_N):
            piece = 1
            local = block - tl.cdiv(N0, BLOCK_N)
            width = N1
            column = N0
    if N2 > 0:
        if block >= tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N):
            piece = 2
            local = block - tl.cdiv(N0, BLOCK_N) - tl.cdiv(N1, BLOCK_N)
            width = N2
            column = N0 + N1
    return piece, local * BLOCK_N, width, column


@triton.jit
def load_b(b_ptr, n, rank, width, R: tl.constexpr, R_PAD: tl.constexpr, EVEN_N: tl.constexpr, HAS_RANKS: tl.constexpr):
    """Rows n of B. Eight elements are one 16-byte load: masks change between such groups only; `within_rank` drops the rest of one."""
    r = tl.arange(0, R_PAD)
    b_tile = b_ptr + n[:, None] * R + r[None, :]
    loaded = r < (rank + 7) // 8 * 8
    if EVEN_N:
        if HAS_RANKS or R != R_PAD:
            b = tl.load(b_tile, mask=loaded[None, :] & (r < R)[None, :], other=0.0)
        else:
            b = tl.load(b_tile)
    else:
        if HAS_RANKS or R != R_PAD:
            b = tl.load(b_tile, mask=(n < width)[:, None] & loaded[None, :] & (r < R)[None, :], other=0.0)
        else:
            b = tl.load(b_tile, mask=(n < width)[:, None], other=0.0)
    return b


@triton.jit
def within_rank(b, rank, R: tl.constexpr, R_PAD: tl.constexpr, HAS_RANKS: tl.constexpr):
    if HAS_RANKS or R != R_PAD:
        b = tl.where((tl.arange(0, R_PAD) < rank)[None, :], b, 0.0)
    return b


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "splits"])
def expand_pairs_kernel(
    partials_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    weights_ptr,
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
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [num_pairs, runs of STEPS blocks of N over all slices]. B and the old output are read before the wait for the partials."""
    pair = tl.program_id(0)
    piece, first, width, column = slice_of(tl.program_id(1), N0, N1, N2, BLOCK_N * STEPS)
    if PDL == 1:
        gdc_wait()
    used, slot, expert = cell_of_pair(slots_ptr, experts_ptr, pair, num_slots, TOP_K, EXPERTS)
    if used:
        b_ptr = weights_of(pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES), slot, expert, B_EXPERTS, width * R)
        r = tl.arange(0, R_PAD)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        out_row = out_ptr + pair.to(tl.int64) * (N0 + N1 + N2) + column
        tiles = ()
        olds = ()
        for step in tl.static_range(STEPS):
            n = first + step * BLOCK_N + tl.arange(0, BLOCK_N)
            tiles += (load_b(b_ptr, n, rank, width, R, R_PAD, EVEN_N, HAS_RANKS),)
            if EVEN_N:
                olds += (tl.load(out_row + n),)
            else:
                olds += (tl.load(out_row + n, mask=n < width, other=0.0),)
        enabled = True
        if HAS_ENABLED:
            enabled = tl.load(enabled_ptr + slot) != 0
        if HAS_WEIGHTS:
            weight = tl.load(weights_ptr + pair).to(tl.float32)
        if PDL == 2:
            gdc_wait()
        if PDL > 0:
            gdc_launch_dependents()
        s = tl.arange(0, SPLITS_PAD)
        from_ = partials_ptr + ((s.to(tl.int64)[None, :] * num_pairs + pair) * SLICES + piece) * R_PAD + r[:, None]
        h = tl.sum(tl.load(from_, mask=(s < splits)[None, :] & (r < rank)[:, None], other=0.0), axis=1)
        if HAS_WEIGHTS:
            h = h * weight
        for step in tl.static_range(STEPS):
            n = first + step * BLOCK_N + tl.arange(0, BLOCK_N)
            b = within_rank(tiles[step], rank, R, R_PAD, HAS_RANKS)
            delta = tl.sum(widen(b, PTX) * h[None, :], axis=1)
            new = (olds[step].to(tl.float32) + delta).to(out_ptr.dtype.element_ty)
            if EVEN_N and not HAS_ENABLED:
                tl.store(out_row + n, new)
            else:
                tl.store(out_row + n, new, mask=(n < width) & enabled)
    else:
        if PDL == 2:
            gdc_wait()


@triton.jit
def expand_rows(
    partials_ptr,
    b_ptr,
    out_ptr,
    weights_ptr,
    rows,
    members,
    rank,
    piece,
    first,
    width,
    column,
    num_rows,
    splits,
    OUT_WIDTH: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Up to ROWS output rows against STEPS tiles [BLOCK_N, R] of B: only members are read and written."""
    r = tl.arange(0, R_PAD)
    row = out_ptr + rows.to(tl.int64)[None, :] * OUT_WIDTH + column
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + rows, mask=members, other=0.0).to(tl.float32)
    if PDL == 2:
        gdc_wait()
    if PDL > 0:
        gdc_launch_dependents()
    at = (rows.to(tl.int64) * SLICES + piece) * R_PAD
    from_ = partials_ptr + at[None, :] + r[:, None]
    a_split = num_rows.to(tl.int64) * (SLICES * R_PAD)
    parts = ()
    for split in tl.static_range(SPLITS_PAD):  # all of them under way before the first is added
        there = members[None, :] & (r < rank)[:, None] & (split < splits)
        parts += (tl.load(from_ + split * a_split, mask=there, other=0.0),)
    h = tl.zeros((R_PAD, ROWS), tl.float32)
    for split in tl.static_range(SPLITS_PAD):
        h += parts[split]
    if HAS_WEIGHTS:
        h = h * weight[None, :]
    # h in two pieces of the weights' dtype: the product keeps float32's precision for one more dot.
    high = h.to(out_ptr.dtype.element_ty)
    low = (h - high.to(tl.float32)).to(out_ptr.dtype.element_ty)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        n = first + step * BLOCK_N + tl.arange(0, BLOCK_N)
        b = within_rank(load_b(b_ptr, n, rank, width, R, R_PAD, EVEN_N, HAS_RANKS), rank, R, R_PAD, HAS_RANKS)
        inside = members[None, :]
        if not EVEN_N:
            inside = inside & (n < width)[:, None]
        old = tl.load(row + n[:, None], mask=inside, other=0.0)
        delta = tl.dot(b, high, input_precision="ieee")
        if b.dtype != tl.float32:
            delta = tl.dot(b, low, delta, input_precision="ieee")
        tl.store(row + n[:, None], (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "splits"])
def expand_groups_kernel(
    partials_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    weights_ptr,
    records_ptr,
    ranks_ptr,
    num_pairs,
    splits,
    EXPERTS: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of N over all slices * most groups]."""
    PART: tl.constexpr = BLOCK_N * STEPS
    BLOCKS: tl.constexpr = (N0 + PART - 1) // PART + (N1 + PART - 1) // PART + (N2 + PART - 1) // PART
    piece, first, width, column = slice_of(tl.program_id(0) % BLOCKS, N0, N1, N2, PART)
    if PDL == 1:
        gdc_wait()
    cell, count, pairs = load_group(records_ptr, tl.program_id(0) // BLOCKS, GROUP)
    if count > 0:
        slot = cell // EXPERTS
        b_ptr = weights_of(pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES), slot, cell % EXPERTS, B_EXPERTS, width * R)
        m = tl.arange(0, GROUP)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        expand_rows(
            partials_ptr, b_ptr, out_ptr, weights_ptr, pairs, m < count, rank, piece, first, width, column, num_pairs, splits,
            N0 + N1 + N2, R, R_PAD, SLICES, BLOCK_N, EVEN_N, GROUP, HAS_WEIGHTS, HAS_RANKS, PDL, SPLITS_PAD, STEPS, STAGES,
        )  # fmt: skip
    elif PDL == 2:
        if tl.program_id(0) == 0:  # one is enough for the launch to end after the one before it
            gdc_wait()
