"""dense_expand_: checks its arguments, chooses tiles, launches."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, GRID_LIMIT, IDS, check, check_slots, check_stacks, check_tensor, check_values, three
from lora_kernels.configs import Tiles, padded_rank
from lora_kernels.dense_expand.kernel import expand_list_kernel, expand_slots_kernel
from lora_kernels.dense_shrink.paths import dense_tiles, groups_padded, rank_block, runs_of, tokens_a_program
from lora_kernels.dense_shrink.token_list import TokenList, check_token_list
from lora_kernels.launch import Overlap, launch_options, overlap_on, widens_by_ptx
from lora_kernels.moe_expand.kernel import expand_pairs_kernel
from lora_kernels.slices import blocks_of, slice_constants, widths_of

ONE_PIECE_FROM_ROWS = 64
"""Tokens a program takes from which h goes to the product in one piece of the weights' dtype: the output's own rounding hides what a
second one adds, and there it costs time."""


def dense_expand_(
    out: torch.Tensor,
    partials: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
    token_list: TokenList | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.IDS_SETTLED,
) -> None:
    """Adds B h to the base output, in place; rows without an adapter keep their bits.

    out: [num_tokens, sum of N], slices side by side. partials: dense_shrink's. lora_b: 1 to 3 stacks [slots, 1, N, R] in out's
    dtype, N of its own each. token_list: as in dense_shrink.

    :raises ValueError: an argument does not fit.
    """
    check_tensor("out", out, shape=(None, None), dtypes=DTYPES, device=out.device)
    num_tokens, slices = len(out), len(lora_b)
    check_tensor("token_slots", token_slots, shape=(num_tokens,), dtypes=IDS, device=out.device)
    slots, _, _, rank = check_stacks("lora_b", lora_b, num_experts=1, like=out)
    widths = widths_of(lora_b)
    check("out", f"width {sum(widths)}", f"width {out.shape[1]}", holds=out.shape[1] == sum(widths))
    shape = (None, num_tokens, slices, padded_rank(rank))
    check_tensor("partials", partials, shape=shape, dtypes=(torch.float32,), device=out.device)
    check_slots(slots, None, slot_ranks, device=out.device)
    check_values(token_slots=(token_slots, slots), slot_ranks=slot_ranks, rank=rank)
    check_token_list(token_list, num_tokens=num_tokens, device=out.device)
    if num_tokens == 0:
        return
    listed = token_list is not None
    tiles = tiles or dense_tiles("dense_expand", out, rank=rank, width=sum(widths), slices=slices, adapters=slots, listed=listed)
    overlap = overlap_on(out.device, overlap)
    splits = partials.shape[0]
    b0, b1, b2 = three(lora_b)
    steps = min(tiles.steps, triton.cdiv(max(widths), tiles.block)) if tiles.path != "slots" else 1
    run = tiles.block * steps
    blocks = blocks_of(widths, run)
    constants = slice_constants(widths, rank, block=run)
    constants |= {"BLOCK_N": tiles.block, "HAS_RANKS": slot_ranks is not None, "PDL": int(overlap)}
    shared = {"ALIGNED_N": all(width % 8 == 0 for width in widths)}
    options = launch_options(overlap, num_warps=tiles.num_warps)
    ranks = token_slots if slot_ranks is None else slot_ranks
    if tiles.path == "list":
        check("token_list", "a list of the tokens for tiles of path list", token_list, holds=listed)
        assert token_list is not None
        block_r = rank_block(rank) if steps == 1 else padded_rank(rank)
        expand_list_kernel[(runs_of(token_list, tiles.rows) * blocks,)](
            partials, b0, b1, b2, out, token_list.order, token_list.slots, token_list.starts, token_list.counts, ranks, num_tokens, splits,
            token_list.num_groups, slots, GROUPS=groups_padded(token_list), ROWS=tiles.rows, STEPS=steps, STAGES=tiles.stages,
            PIECES=1 if tiles.rows >= ONE_PIECE_FROM_ROWS else 2,
            BLOCK_R=block_r, UNROLLED=reads_under_way(splits, tiles.rows * block_r, tiles.num_warps), **shared, **constants, **options,
        )  # fmt: skip
    elif tiles.path == "slots":
        check("lora_b", f"at most {GRID_LIMIT} slots and blocks", f"{slots} slots, {blocks} blocks", holds=max(slots, blocks) <= GRID_LIMIT)
        tokens = tokens_a_program(num_tokens)
        rows = min(tiles.rows, tokens)
        expand_slots_kernel[(triton.cdiv(num_tokens, tokens), blocks, slots)](
            partials, b0, b1, b2, out, token_slots, ranks, num_tokens, splits,
            BLOCK_R=rank_block(rank), TOKENS=tokens, ROWS=rows, UNROLLED=reads_under_way(splits, rows * rank_block(rank), tiles.num_warps),
            **shared, **constants, **options,
        )  # fmt: skip
    else:
        check("lora_b", f"at most {GRID_LIMIT} blocks", f"{blocks}", holds=blocks <= GRID_LIMIT)
        expand_pairs_kernel[(num_tokens, blocks)](
            partials, b0, b1, b2, out, partials, token_slots, token_slots, token_slots, ranks, num_tokens, slots, splits,
            TOP_K=1, EXPERTS=0, B_EXPERTS=1, SPLITS_PAD=triton.next_power_of_2(splits),
            STEPS=steps, HAS_WEIGHTS=False, HAS_ENABLED=False, PTX=widens_by_ptx(out), **constants, **options,
        )  # fmt: skip


def reads_under_way(splits: int, elements: int, num_warps: int) -> int:
    """Splits of so many elements that a program reads before it adds the first: no more than 64 registers of a thread hold.

    One of three figures, so that other tiles of the shrink seldom mean another compilation.
    """
    wanted = 1 if splits == 1 else 4 if splits <= 4 else 16
    fitting = max(1, 64 * 32 * num_warps // elements)
    return min(wanted, 1 << (fitting.bit_length() - 1))
