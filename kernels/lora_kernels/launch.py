"""What every launch shares: the kinds of programmatic dependent launch, and what the device has that the interpreter lacks."""

import functools
import os
from enum import IntEnum

import torch


class Overlap(IntEnum):
    """How a launch overlaps the kernel before it in the stream (programmatic dependent launch).

    A kernel that returns has always waited for the one before it, so whatever came earlier is complete too.
    """

    NONE = 0
    """A plain launch."""
    INPUTS_FRESH = 1
    """The kernel before may have written the ids: wait first, and only save the launch itself."""
    IDS_SETTLED = 2
    """Ids, weights (and an expand's base output) were complete before the kernel before started: read them, then wait."""


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9 or newer)."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def overlap_on(device: torch.device, asked: Overlap) -> Overlap:
    return asked if can_overlap(device) else Overlap.NONE


def launch_options(overlap: Overlap, *, num_warps: int) -> dict[str, int | bool]:
    """Keyword arguments of the launch. The interpreter does not know `launch_pdl`: it is only named where it is used."""
    options: dict[str, int | bool] = {"num_warps": num_warps}
    if overlap:
        options["launch_pdl"] = True
    return options


def widens_by_ptx(like: torch.Tensor) -> bool:
    """Whether kernels on such tensors turn bfloat16 into float32 by inline assembly: the same bits, and the interpreter has none."""
    return like.is_cuda and like.dtype == torch.bfloat16
