"""dense_shrink: checks its arguments, chooses tiles, launches."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, GRID_LIMIT, IDS, check, check_slots, check_stacks, check_tensor, check_values, three
from lora_kernels.configs import Tiles, padded_rank
from lora_kernels.dense_shrink.kernel import shrink_list_kernel, shrink_slots_kernel
from lora_kernels.dense_shrink.paths import dense_tiles, groups_padded, rank_block, runs_of, tokens_a_program
from lora_kernels.dense_shrink.token_list import TokenList, check_token_list
from lora_kernels.launch import Overlap, launch_options, overlap_on, widens_by_ptx
from lora_kernels.moe_shrink.kernel import shrink_pairs_kernel

WIDE_ROWS = 64
"""Tokens a program takes from which it takes all of R, and all slices, to read x once: with fewer, A is the most of what it reads."""
MOST_JOINED_COLUMNS = 192
"""Of h over all slices: more would not fit one program's registers."""


def dense_shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
    token_list: TokenList | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> torch.Tensor:
    """Float32 partials of h = A x, [splits, num_tokens, slices, padded rank], for dense_expand_. Base rows stay unwritten.

    x: [num_tokens, K]. lora_a: 1 to 3 stacks [slots, 1, R, K]. token_slots: [num_tokens] int; out of range counts as no adapter.
    token_list: `list_tokens` of the same token_slots, for long batches; without it they are served more slowly.

    :raises ValueError: an argument does not fit.
    """
    check_tensor("x", x, shape=(None, None), dtypes=DTYPES, device=x.device)
    num_tokens, k = x.shape
    check_tensor("token_slots", token_slots, shape=(num_tokens,), dtypes=IDS, device=x.device)
    slots, _, rank, _ = check_stacks("lora_a", lora_a, num_experts=1, like=x)
    for index, stack in enumerate(lora_a):
        check(f"lora_a[{index}]", f"[*, *, {rank}, {k}]", list(stack.shape), holds=stack.shape[2:] == (rank, k))
    check_slots(slots, None, slot_ranks, device=x.device)
    check_values(token_slots=(token_slots, slots), slot_ranks=slot_ranks, rank=rank)
    check_token_list(token_list, num_tokens=num_tokens, device=x.device)
    slices = len(lora_a)
    tiles = tiles or dense_tiles("dense_shrink", x, rank=rank, width=k, slices=slices, adapters=slots, listed=token_list is not None)
    steps = min(tiles.steps, triton.cdiv(k, tiles.block))
    splits = triton.cdiv(k, tiles.block * steps)
    partials = torch.empty(splits, num_tokens, slices, padded_rank(rank), dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return partials
    overlap = overlap_on(x.device, overlap)
    a0, a1, a2 = three(lora_a)
    constants = {
        "K": k,
        "R": rank,
        "R_PAD": padded_rank(rank),
        "SLICES": slices,
        "BLOCK_K": tiles.block,
        "STEPS": steps,
        "HAS_RANKS": slot_ranks is not None,
        "PDL": int(overlap),
    }
    options = launch_options(overlap, num_warps=tiles.num_warps)
    ranks = token_slots if slot_ranks is None else slot_ranks
    if tiles.path == "list":
        check("token_list", "a list of the tokens for tiles of path list", token_list, holds=token_list is not None)
        assert token_list is not None
        joined = slices > 1 and tiles.rows >= WIDE_ROWS and slices * padded_rank(rank) <= MOST_JOINED_COLUMNS
        block_r = padded_rank(rank) if tiles.rows >= WIDE_ROWS else rank_block(rank)
        programs = 1 if joined else slices * (padded_rank(rank) // block_r)
        shrink_list_kernel[(runs_of(token_list, tiles.rows) * programs, splits)](
            x, a0, a1, a2, partials, token_list.order, token_list.slots, token_list.starts, token_list.counts, ranks, num_tokens,
            token_list.num_groups, slots,
            BLOCK_R=block_r, JOINED=joined, GROUPS=groups_padded(token_list), ROWS=tiles.rows, STAGES=tiles.stages, **constants, **options,
        )  # fmt: skip
    elif tiles.path == "slots":
        programs = slots * slices * (padded_rank(rank) // rank_block(rank))
        check("lora_a", f"at most {GRID_LIMIT} slots, slices and blocks of R", f"{programs}", holds=programs <= GRID_LIMIT)
        tokens = tokens_a_program(num_tokens)
        shrink_slots_kernel[(triton.cdiv(num_tokens, tokens), programs, splits)](
            x, a0, a1, a2, partials, token_slots, ranks, num_tokens,
            BLOCK_R=rank_block(rank), TOKENS=tokens, ROWS=min(tiles.rows, tokens), STAGES=tiles.stages, **constants, **options,
        )  # fmt: skip
    else:
        shrink_pairs_kernel[(num_tokens * slices, splits * tiles.r_parts)](
            x, a0, a1, a2, partials, token_slots, token_slots, token_slots, ranks, num_tokens, slots,
            TOP_K=1, PAIRS_PER_ROW=1, EXPERTS=0, A_EXPERTS=1, R_PARTS=tiles.r_parts, HAS_ENABLED=False, PTX=widens_by_ptx(x),
            **constants, **options,
        )  # fmt: skip
    return partials
