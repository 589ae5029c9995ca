"""Which kernel serves a batch of a dense layer: by pair, by slot, or by a list of the tokens. Decided by shapes alone."""

from dataclasses import replace

import torch
import triton

from lora_kernels.configs import Shape, Tiles, default_tiles, padded_rank, tuned
from lora_kernels.dense_shrink.token_list import TokenList

MOST_TOKENS_A_PROGRAM = 256
"""A program by slot looks through so many tokens' slots."""
LIST_FROM_TOKENS = 16


def needs_token_list(num_tokens: int) -> bool:
    """Whether a batch of so many tokens is served best with a token list; the same answer for all layers, and in a captured graph."""
    return num_tokens >= LIST_FROM_TOKENS


def dense_tiles(op: str, like: torch.Tensor, *, rank: int, width: int, slices: int, adapters: int, listed: bool) -> Tiles:
    """Tuned or default tiles; by slot where a list would serve better and none was given."""
    shape = {"rank": rank, "width": width, "slices": slices, "adapters": adapters, "rows": max(len(like), 1)}
    tiles = tuned(op, like, **shape)
    if tiles.path == "list" and not listed:
        by_slot = {**shape, "rows": min(shape["rows"], MOST_TOKENS_A_PROGRAM)}
        tiles = replace(default_tiles(Shape(op=op, dtype=str(like.dtype).removeprefix("torch."), **by_slot)), path="slots")
    return tiles


def tokens_a_program(num_tokens: int) -> int:
    return min(MOST_TOKENS_A_PROGRAM, max(16, triton.next_power_of_2(num_tokens)))


def runs_of(token_list: TokenList, rows: int) -> int:
    """Runs of at most so many tokens of one slot that the list can hold, whatever is in it."""
    num_tokens = len(token_list.order)
    return num_tokens // rows + min(num_tokens, token_list.num_groups)


def groups_padded(token_list: TokenList) -> int:
    return max(16, triton.next_power_of_2(token_list.num_groups))


def rank_block(rank: int) -> int:
    """Of R that a program of few tokens takes at a time: a whole large one would leave no registers for long reads of A and B."""
    return min(64, padded_rank(rank))
