"""out += w * B h for (token, expert) pairs, in Triton, by pair or by group of pairs that share a cell.

h arrives as moe_shrink's float32 partials `[splits, num_pairs, slices, R_PAD]`, summed here in the order of the splits. One
launch serves all slices: their blocks of N stand side by side in the grid, N of its own each.
"""

# ruff: noqa: SIM102, SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.moe_shrink.kernel import pick, rank_of


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
    EVEN_N: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [num_pairs, blocks of N over all slices]. B and the old output are read before the wait for the partials."""
    pair = tl.program_id(0)
    piece, first, width, column = slice_of(tl.program_id(1), N0, N1, N2, BLOCK_N)
    if PDL == 1:
        gdc_wait()
    slot = tl.load(slots_ptr + pair // TOP_K)
    used = (slot >= 0) & (slot < num_slots)
    expert = 0
    if EXPERTS > 0:
        expert = tl.load(experts_ptr + pair).to(tl.int32)
        used = used & (expert >= 0) & (expert < EXPERTS)
    if used:
        cell = slot.to(tl.int64) * B_EXPERTS
        if B_EXPERTS > 1:
            cell += expert
        b_ptr = pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES) + cell * width * R
        n = first + tl.arange(0, BLOCK_N)
        r = tl.arange(0, R_PAD)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        out_row = out_ptr + pair.to(tl.int64) * (N0 + N1 + N2) + column + n
        b_tile = b_ptr + n[:, None] * R + r[None, :]
        # Eight elements are one 16-byte load: masks change between such groups only, the rest of a group is dropped below.
        loaded = r < (rank + 7) // 8 * 8
        if EVEN_N:
            if HAS_RANKS or R != R_PAD:
                b = tl.load(b_tile, mask=loaded[None, :] & (r < R)[None, :], other=0.0)
            else:
                b = tl.load(b_tile)
            old = tl.load(out_row)
        else:
            if HAS_RANKS or R != R_PAD:
                b = tl.load(b_tile, mask=(n < width)[:, None] & loaded[None, :] & (r < R)[None, :], other=0.0)
            else:
                b = tl.load(b_tile, mask=(n < width)[:, None], other=0.0)
            old = tl.load(out_row, mask=n < width, other=0.0)
        if HAS_RANKS or R != R_PAD:
            b = tl.where((r < rank)[None, :], b, 0.0)
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
        delta = tl.sum(b.to(tl.float32) * h[None, :], axis=1)
        new = (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty)
        if EVEN_N and not HAS_ENABLED:
            tl.store(out_row, new)
        else:
            tl.store(out_row, new, mask=(n < width) & enabled)
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
):
    """Up to ROWS output rows against one [BLOCK_N, R] tile of B: only members are read and written."""
    n = first + tl.arange(0, BLOCK_N)
    r = tl.arange(0, R_PAD)
    b_tile = b_ptr + n[:, None] * R + r[None, :]
    loaded = r < (rank + 7) // 8 * 8
    if EVEN_N:
        inside = members[:, None]
        if HAS_RANKS or R != R_PAD:
            b = tl.load(b_tile, mask=loaded[None, :] & (r < R)[None, :], other=0.0)
        else:
            b = tl.load(b_tile)
    else:
        inside = members[:, None] & (n < width)[None, :]
        if HAS_RANKS or R != R_PAD:
            b = tl.load(b_tile, mask=(n < width)[:, None] & loaded[None, :] & (r < R)[None, :], other=0.0)
        else:
            b = tl.load(b_tile, mask=(n < width)[:, None], other=0.0)
    if HAS_RANKS or R != R_PAD:
        b = tl.where((r < rank)[None, :], b, 0.0)
    out_tile = out_ptr + rows.to(tl.int64)[:, None] * OUT_WIDTH + column + n[None, :]
    old = tl.load(out_tile, mask=inside, other=0.0)
    if PDL == 2:
        gdc_wait()
    if PDL > 0:
        gdc_launch_dependents()
    at = (rows.to(tl.int64) * SLICES + piece) * R_PAD
    from_ = partials_ptr + at[:, None] + r[None, :]
    h = tl.zeros((ROWS, R_PAD), tl.float32)
    a_split = num_rows.to(tl.int64) * (SLICES * R_PAD)
    for _ in range(splits):
        h += tl.load(from_, mask=members[:, None] & (r < rank)[None, :], other=0.0)
        from_ += a_split
    if HAS_WEIGHTS:
        h = h * tl.load(weights_ptr + rows, mask=members, other=0.0).to(tl.float32)[:, None]
    # h in two pieces of the weights' dtype: the product keeps float32's precision for one more dot.
    high = h.to(b.dtype)
    low = (h - high.to(tl.float32)).to(b.dtype)
    delta = tl.dot(high, tl.trans(b), input_precision="ieee")
    if b.dtype != tl.float32:
        delta = tl.dot(low, tl.trans(b), delta, input_precision="ieee")
    tl.store(out_tile, (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "splits"])
def expand_groups_kernel(
    partials_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    weights_ptr,
    order_ptr,
    groups_ptr,
    num_groups_ptr,
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
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of N over all slices, most groups]."""
    group = tl.program_id(1)
    piece, first, width, column = slice_of(tl.program_id(0), N0, N1, N2, BLOCK_N)
    if PDL == 1:
        gdc_wait()
    if group < tl.load(num_groups_ptr):
        cell = tl.load(groups_ptr + group * 3)
        start = tl.load(groups_ptr + group * 3 + 1)
        count = tl.load(groups_ptr + group * 3 + 2)
        slot = cell // EXPERTS
        b_cell = slot.to(tl.int64) * B_EXPERTS
        if B_EXPERTS > 1:
            b_cell += cell % EXPERTS
        b_ptr = pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES) + b_cell * width * R
        m = tl.arange(0, GROUP)
        pairs = tl.load(order_ptr + start + m, mask=m < count, other=0)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        expand_rows(
            partials_ptr, b_ptr, out_ptr, weights_ptr, pairs, m < count, rank, piece, first, width, column, num_pairs, splits,
            N0 + N1 + N2, R, R_PAD, SLICES, BLOCK_N, EVEN_N, GROUP, HAS_WEIGHTS, HAS_RANKS, PDL,
        )  # fmt: skip
    else:
        if PDL == 2:
            gdc_wait()
