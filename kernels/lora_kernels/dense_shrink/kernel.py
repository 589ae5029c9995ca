"""h = A x for the tokens of a dense layer, in Triton: a program per adapter slot and block of tokens, so A is read once for them.

Needs no list: a program looks which of its tokens have its slot, and ends if none has. Decode batches of few tokens take
moe_shrink's kernel by pair instead, with one choice a token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_kernels.moe_shrink.kernel import pick, rank_of, shrink_rows


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
    SLICES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [blocks of tokens, slots * SLICES, splits]."""
    slot = tl.program_id(1) // SLICES
    piece = tl.program_id(1) % SLICES
    split = tl.program_id(2)
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mine = tl.load(slots_ptr + t, mask=t < num_tokens, other=-1) == slot
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        a_ptr = pick(piece, a0_ptr, a1_ptr, a2_ptr, SLICES) + slot.to(tl.int64) * (R * K)
        rank = rank_of(ranks_ptr, slot, R, HAS_RANKS)
        shrink_rows(
            x_ptr, a_ptr, partials_ptr, t, t, mine, rank, split, piece, num_tokens,
            K, R, R_PAD, SLICES, TOKENS, BLOCK_K, STEPS, STAGES, HAS_RANKS, PDL,
        )  # fmt: skip
    else:
        if PDL == 2:
            gdc_wait()
