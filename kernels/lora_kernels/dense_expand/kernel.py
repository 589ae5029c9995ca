"""out += B h for the tokens of a dense layer, in Triton: a program per adapter slot, block of tokens and block of N.

The slices' blocks of N stand side by side in the grid, N of its own each. Few tokens take moe_expand's kernel by pair.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lora_kernels.moe_expand.kernel import expand_rows, slice_of
from lora_kernels.moe_shrink.kernel import pick, rank_of


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
    SLICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of tokens, blocks of N over all slices, slots]."""
    piece, first, width, column = slice_of(tl.program_id(1), N0, N1, N2, BLOCK_N)
    slot = tl.program_id(2)
    if PDL == 1:
        gdc_wait()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + t, mask=t < num_tokens, other=-1) == slot
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        b_ptr = pick(piece, b0_ptr, b1_ptr, b2_ptr, SLICES) + slot.to(tl.int64) * width * R
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        expand_rows(
            partials_ptr, b_ptr, out_ptr, partials_ptr, t, mine, rank, piece, first, width, column, num_tokens, splits,
            N0 + N1 + N2, R, R_PAD, SLICES, BLOCK_N, EVEN_N, TOKENS, False, HAS_RANKS, PDL,
        )  # fmt: skip
    else:
        if PDL == 2:
            gdc_wait()
