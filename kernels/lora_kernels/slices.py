"""The slices of a projection's output, side by side: what an expand asks of its B stacks and tells its kernel about them."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import check
from lora_kernels.configs import padded_rank


def widths_of(lora_b: Sequence[torch.Tensor]) -> list[int]:
    """N of each slice. lora_b: 1 to 3 stacks [slots, *, N, R].

    :raises ValueError: their ranks differ.
    """
    rank = lora_b[0].shape[3]
    for index, stack in enumerate(lora_b):
        check(f"lora_b[{index}]", f"rank {rank}", f"rank {stack.shape[3]}", holds=stack.shape[3] == rank)
    return [stack.shape[2] for stack in lora_b]


def blocks_of(widths: Sequence[int], block: int) -> int:
    """Blocks of N over all slices, none of which holds columns of two."""
    return sum(triton.cdiv(width, block) for width in widths)


def slice_constants(widths: Sequence[int], rank: int, *, block: int) -> dict[str, int | bool]:
    """The kernel's constants that follow from the slices. block: columns a program takes."""
    n0, n1, n2 = [*widths, 0, 0][:3]
    return {
        "N0": n0,
        "N1": n1,
        "N2": n2,
        "R": rank,
        "R_PAD": padded_rank(rank),
        "SLICES": len(widths),
        "EVEN_N": all(width % block == 0 for width in widths),
    }
