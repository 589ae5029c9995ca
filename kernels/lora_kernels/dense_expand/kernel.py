"""out += B h for the tokens of a dense layer, in Triton. h arrives as dense_shrink's partials, summed in the order of the splits.

By slot: a program per adapter slot, block of tokens and block of N, which finds the slot's tokens itself.
By list: a program per run of listed tokens and run of blocks of N; h stays in registers over the run.
The slices' blocks of N stand side by side in the grid, N of its own each. Few tokens take moe_expand's kernel by pair.
"""

# ruff: noqa: SIM108 (in Triton a branch on a constant stands alone)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.dense_shrink.members import listed_rows, members_from, members_of
from lora_kernels.moe_expand.kernel import slice_of
from lora_kernels.moe_shrink.kernel import pick, rank_of


@triton.jit
def within(n, width, EVEN_N: tl.constexpr, ALIGNED_N: tl.constexpr):
    """Columns inside the slice. Where widths are multiples of eight the mask changes between 16-byte groups only."""
    inside = n < width
    if ALIGNED_N:
        inside = n // 8 * 8 < width
    if EVEN_N:
        inside = n >= 0
    return inside


@triton.jit
def load_b(b_ptr, n, columns, r, rank, R: tl.constexpr, R_PAD: tl.constexpr, EVEN_N: tl.constexpr, HAS_RANKS: tl.constexpr):
    """B's columns r in a block of N, zero at and above the rank: the rest of a 16-byte group is read with it and dropped."""
    b_tile = b_ptr + n[:, None] * R + r[None, :]
    if HAS_RANKS or R != R_PAD:
        wanted = (r < (rank + 7) // 8 * 8)[None, :] & (r < R)[None, :]
        if not EVEN_N:
            wanted = wanted & columns[:, None]
        b = tl.where((r < rank)[None, :], tl.load(b_tile, mask=wanted, other=0.0), 0.0)
    else:
        if EVEN_N:
            b = tl.load(b_tile)
        else:
            b = tl.load(b_tile, mask=columns[:, None], other=0.0)
    return b


@triton.jit
def sum_partials(
    partials_ptr,
    rows,
    inside,
    r,
    rank,
    piece,
    num_tokens,
    splits,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Columns r of some tokens' h, float32, in the order of the splits; UNROLLED reads are under way at a time."""
    from_ = partials_ptr + ((rows.to(tl.int64) * SLICES + piece) * R_PAD)[:, None] + r[None, :]
    wanted = inside[:, None] & (r < rank)[None, :]
    a_split = num_tokens.to(tl.int64) * (SLICES * R_PAD)
    h = tl.zeros((ROWS, BLOCK_R), tl.float32)
    for first in range(0, splits, UNROLLED):
        for ahead in tl.static_range(UNROLLED):
            h += tl.load(from_ + ahead * a_split, mask=wanted & (first + ahead < splits), other=0.0)
        from_ += UNROLLED * a_split
    return h


@triton.jit
def product(h, b, PIECES: tl.constexpr):
    """h B^T in float32. h goes in the weights' dtype, or as two pieces of it: float32's precision for one more product."""
    high = h.to(b.dtype)
    delta = tl.dot(high, tl.trans(b), input_precision="ieee")
    if PIECES == 2 and b.dtype != tl.float32:
        low = (h - high.to(tl.float32)).to(b.dtype)
        delta = tl.dot(low, tl.trans(b), delta, input_precision="ieee")
    return delta


@triton.jit
def delta_of(
    partials_ptr,
    b_ptr,
    b,
    n,
    columns,
    rows,
    inside,
    rank,
    piece,
    num_tokens,
    splits,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLLED: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_RANKS: tl.constexpr,
):
    """B h of some tokens, a block of R after the other. b: the first block of it."""
    r = tl.arange(0, BLOCK_R)
    h = sum_partials(partials_ptr, rows, inside, r, rank, piece, num_tokens, splits, R_PAD, BLOCK_R, SLICES, ROWS, UNROLLED)
    delta = product(h, b, PIECES)
    for block in tl.static_range(1, R_PAD // BLOCK_R):
        r_block = block * BLOCK_R + r
        b_block = load_b(b_ptr, n, columns, r_block, rank, R, R_PAD, EVEN_N, HAS_RANKS)
        h = sum_partials(partials_ptr, rows, inside, r_block, rank, piece, num_tokens, splits, R_PAD, BLOCK_R, SLICES, ROWS, UNROLLED)
        delta += product(h, b_block, PIECES)
    return delta


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def expand_slots_kernel(
    partials_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    slots_ptr,
    ranks_ptr,
    num_tokens,
    splits,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    ALIGNED_N: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of tokens, blocks of N over all slices, slots]. B and the first rows' old output are read before the wait."""
    piece, first_n, width, column = slice_of(tl.program_id(1), N0, N1, N2, BLOCK_N)
    slot = tl.program_id(2)
    if PDL == 1:
        gdc_wait()
    t, mine, through, count = members_of(slots_ptr, slot, tl.program_id(0), num_tokens, TOKENS)
    if count > 0:
        n = first_n + tl.arange(0, BLOCK_N)
        columns = within(n, width, EVEN_N, ALIGNED_N)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        b_ptr = pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES) + slot.to(tl.int64) * width * R
        b = load_b(b_ptr, n, columns, tl.arange(0, BLOCK_R), rank, R, R_PAD, EVEN_N, HAS_RANKS)
        out_columns = out_ptr + column + n[None, :]
        rows, inside = members_from(t, mine, through, count, 0, TOKENS, ROWS)
        out_tile = out_columns + rows.to(tl.int64)[:, None] * (N0 + N1 + N2)
        old = tl.load(out_tile, mask=inside[:, None] & columns[None, :], other=0.0)
        if PDL == 2:
            gdc_wait()
        if PDL > 0:
            gdc_launch_dependents()
        delta = delta_of(
            partials_ptr, b_ptr, b, n, columns, rows, inside, rank, piece, num_tokens, splits,
            R, R_PAD, BLOCK_R, SLICES, ROWS, UNROLLED, 2, EVEN_N, HAS_RANKS,
        )  # fmt: skip
        new = (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty)
        tl.store(out_tile, new, mask=inside[:, None] & columns[None, :])
        if ROWS < TOKENS:
            for first in range(ROWS, count, ROWS):
                rows, inside = members_from(t, mine, through, count, first, TOKENS, ROWS)
                out_tile = out_columns + rows.to(tl.int64)[:, None] * (N0 + N1 + N2)
                old = tl.load(out_tile, mask=inside[:, None] & columns[None, :], other=0.0)
                delta = delta_of(
                    partials_ptr, b_ptr, b, n, columns, rows, inside, rank, piece, num_tokens, splits,
                    R, R_PAD, BLOCK_R, SLICES, ROWS, UNROLLED, 2, EVEN_N, HAS_RANKS,
                )  # fmt: skip
                new = (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty)
                tl.store(out_tile, new, mask=inside[:, None] & columns[None, :])
    else:
        if PDL == 2:
            gdc_wait()


@triton.jit(do_not_specialize=["num_tokens", "splits", "num_groups", "num_slots"])
def expand_list_kernel(
    partials_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    out_ptr,
    order_ptr,
    groups_ptr,
    starts_ptr,
    counts_ptr,
    ranks_ptr,
    num_tokens,
    splits,
    num_groups,
    num_slots,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLLED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    ALIGNED_N: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [runs of ROWS tokens of a slot * runs of STEPS blocks of N over all slices], those of the same tokens adjoining.

    A single step reads B and the old output before the wait.
    """
    RUN: tl.constexpr = BLOCK_N * STEPS
    RUNS: tl.constexpr = (N0 + RUN - 1) // RUN + (N1 + RUN - 1) // RUN + (N2 + RUN - 1) // RUN
    if PDL == 1:
        gdc_wait()
    piece, first_n, width, column = slice_of(tl.program_id(0) % RUNS, N0, N1, N2, RUN)
    slot, start, count = listed_rows(groups_ptr, starts_ptr, counts_ptr, tl.program_id(0) // RUNS, num_groups, num_slots, GROUPS, ROWS)
    if count > 0:
        m = tl.arange(0, ROWS)
        inside = (m < count) & (start + m < num_tokens)
        rows = tl.load(order_ptr + start + m, mask=inside, other=-1)
        inside = (rows >= 0) & (rows < num_tokens)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        b_ptr = pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES) + slot.to(tl.int64) * width * R
        out_rows = out_ptr + column + rows.to(tl.int64)[:, None] * (N0 + N1 + N2)
        if STEPS == 1:
            n = first_n + tl.arange(0, BLOCK_N)
            columns = within(n, width, EVEN_N, ALIGNED_N)
            wanted = inside[:, None] & columns[None, :]
            b = load_b(b_ptr, n, columns, tl.arange(0, BLOCK_R), rank, R, R_PAD, EVEN_N, HAS_RANKS)
            old = tl.load(out_rows + n[None, :], mask=wanted, other=0.0)
        if PDL == 2:
            gdc_wait()
        if PDL > 0:
            gdc_launch_dependents()
        if STEPS == 1:
            delta = delta_of(
                partials_ptr, b_ptr, b, n, columns, rows, inside, rank, piece, num_tokens, splits,
                R, R_PAD, BLOCK_R, SLICES, ROWS, UNROLLED, PIECES, EVEN_N, HAS_RANKS,
            )  # fmt: skip
            new = (old.to(tl.float32) + delta).to(out_ptr.dtype.element_ty)
            tl.store(out_rows + n[None, :], new, mask=wanted)
        else:
            r = tl.arange(0, R_PAD)
            h = sum_partials(partials_ptr, rows, inside, r, rank, piece, num_tokens, splits, R_PAD, R_PAD, SLICES, ROWS, UNROLLED)
            for step in tl.range(0, STEPS, num_stages=STAGES):
                n_step = first_n + step * BLOCK_N + tl.arange(0, BLOCK_N)
                columns_step = within(n_step, width, EVEN_N, ALIGNED_N)
                b_step = load_b(b_ptr, n_step, columns_step, r, rank, R, R_PAD, EVEN_N, HAS_RANKS)
                if EVEN_N:
                    wanted_step = inside[:, None]
                else:
                    wanted_step = inside[:, None] & columns_step[None, :]
                old_step = tl.load(out_rows + n_step[None, :], mask=wanted_step, other=0.0)
                new = (old_step.to(tl.float32) + product(h, b_step, PIECES)).to(out_ptr.dtype.element_ty)
                tl.store(out_rows + n_step[None, :], new, mask=wanted_step)
    else:
        if PDL == 2:
            gdc_wait()
