"""Argument checks of the ops: each failure is a ValueError that names the argument, what was expected and what was given."""

import os
from collections.abc import Sequence

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS = (torch.int32, torch.int64)
CHECK_VALUES = os.environ.get("LORA_KERNELS_CHECK_VALUES") == "1"
"""Whether every op reads ids and ranks back from the device to check them: a synchronisation a call, for finding a caller's mistake."""

GRID_LIMIT = 65_535
"""What the second and third dimension of a launch's grid can hold."""


def check(name: str, expected: str, given: object, *, holds: bool) -> None:
    """:raises ValueError: it does not hold."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, given {given}")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Shape (None: any length), dtype, device, and elements laid out without gaps.

    :raises ValueError: one of them differs.
    """
    fits = tensor.dim() == len(shape) and all(length is None or length == have for length, have in zip(shape, tensor.shape, strict=True))
    if fits and tensor.dtype in dtypes and tensor.device == device and tensor.is_contiguous():
        return  # before any text is made: serving checks hundreds of tensors a step
    wanted = "[" + ", ".join("*" if length is None else str(length) for length in shape) + "]"
    check(name, f"shape {wanted}", f"shape {list(tensor.shape)}", holds=fits)
    check(name, " or ".join(str(dtype) for dtype in dtypes), tensor.dtype, holds=tensor.dtype in dtypes)
    check(name, f"device {device}", f"device {tensor.device}", holds=tensor.device == device)
    check(name, "a contiguous tensor", f"strides {tuple(tensor.stride())}", holds=tensor.is_contiguous())


def check_stacks(name: str, stacks: Sequence[torch.Tensor], *, num_experts: int, like: torch.Tensor) -> torch.Size:
    """The first one's shape, of one to three weight stacks `[slots, num_experts or 1, *, *]` that agree in slots and experts.

    :raises ValueError: they do not, or their dtype or device is not that of `like`.
    """
    check(name, "1 to 3 stacks", f"{len(stacks)} stacks", holds=1 <= len(stacks) <= 3)
    first = stacks[0]
    check_tensor(f"{name}[0]", first, shape=(None, None, None, None), dtypes=(like.dtype,), device=like.device)
    check(f"{name}[0]", f"{num_experts} experts or 1", f"{first.shape[1]} experts", holds=first.shape[1] in (1, num_experts))
    for index, stack in enumerate(stacks):
        check_tensor(f"{name}[{index}]", stack, shape=(*first.shape[:2], None, None), dtypes=(like.dtype,), device=like.device)
    return first.shape


def check_routing(token_slots: torch.Tensor, topk_ids: torch.Tensor, *, device: torch.device) -> int:
    """The number of (token, expert) pairs.

    :raises ValueError: an argument does not fit, or there are more pairs than a grid takes.
    """
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=IDS, device=device)
    check_tensor("token_slots", token_slots, shape=(len(topk_ids),), dtypes=IDS, device=device)
    check("topk_ids", f"at most {GRID_LIMIT} pairs", f"{topk_ids.numel()}", holds=topk_ids.numel() <= GRID_LIMIT)
    return topk_ids.numel()


def check_slots(slots: int, slot_enabled: torch.Tensor | None, slot_ranks: torch.Tensor | None, *, device: torch.device) -> None:
    """:raises ValueError: a per-slot tensor is shorter than the slots, or of another type."""
    for name, per_slot in (("slot_enabled", slot_enabled), ("slot_ranks", slot_ranks)):
        if per_slot is not None:
            check_tensor(name, per_slot, shape=(None,), dtypes=IDS, device=device)
            check(name, f"{slots} or more slots", f"{len(per_slot)}", holds=len(per_slot) >= slots)


def three(stacks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernels take three pointers; those beyond the slices are never followed."""
    first = stacks[0]
    return first, stacks[1] if len(stacks) > 1 else first, stacks[2] if len(stacks) > 2 else first


def check_values(*, slot_ranks: torch.Tensor | None = None, rank: int = 0, **ids: tuple[torch.Tensor, int]) -> None:
    """Ids (by argument: the tensor, their number) and slots' own ranks, where LORA_KERNELS_CHECK_VALUES is 1 and no graph is captured.

    Without it the kernels take an id out of range for no adapter, and a rank above the slot's for the slot's.

    :raises ValueError: an id or a rank is out of range.
    """
    if not CHECK_VALUES or any(tensor.is_cuda and torch.cuda.is_current_stream_capturing() for tensor, _ in ids.values()):
        return
    for name, (tensor, limit) in ids.items():
        _check_range(name, "ids", tensor, -1, limit)
    if slot_ranks is not None:
        _check_range("slot_ranks", "ranks", slot_ranks, 0, rank + 1)


def check_ids(token_slots: torch.Tensor, topk_ids: torch.Tensor | None, *, num_slots: int, num_experts: int) -> None:
    """Reads the ids back from the device (a synchronisation): for tests and debugging, not for serving.

    :raises ValueError: a slot is outside [-1, num_slots) or an expert outside [-1, num_experts).
    """
    _check_range("token_slots", "ids", token_slots, -1, num_slots)
    if topk_ids is not None:
        _check_range("topk_ids", "ids", topk_ids, -1, num_experts)


def _check_range(name: str, what: str, tensor: torch.Tensor, least: int, limit: int) -> None:
    if tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
        check(name, f"{what} in [{least}, {limit})", f"{what} from {low} to {high}", holds=low >= least and high < limit)
