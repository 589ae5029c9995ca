"""Adapter slots of a vLLM LoRA manager: their tensors, what they cost, and zeroing them.

vLLM allocates every layer's stacked A and B once, for max_loras slots of max_lora_rank, and overwrites a slot only when
the next adapter takes it; a released slot would keep the last tenant's weights.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager

_EXPERT_STACKS = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
_STACKS = ("lora_a_stacked", "lora_b_stacked")


def slot_tensors(manager: "LoRAModelManager") -> Iterator[torch.Tensor]:
    """Every tensor of slots, the slot being its first dimension."""
    for module in manager.modules.values():
        # An expert layer's lora_a_stacked lists views of its w13 and w2 stacks, by slot and expert.
        names = _EXPERT_STACKS if "w13_lora_a_stacked" in vars(module) else _STACKS
        for name in names:
            stack = vars(module)[name]
            yield from (stack,) if isinstance(stack, torch.Tensor) else stack


def slot_bytes(manager: "LoRAModelManager", rank: int | None = None) -> int:
    """Bytes of one slot's tensors as allocated (max_lora_rank), or the share that an adapter of `rank` fills."""
    allocated = sum(stack[0].numel() * stack.element_size() for stack in slot_tensors(manager))
    if rank is None:
        return allocated
    # Each stack has exactly one dimension of the rank's size, so the bytes are proportional to it.
    return allocated // manager.lora_config.max_lora_rank * rank


def slot_is_zero(manager: "LoRAModelManager", index: int) -> bool:
    """Reads the slot's tensors back: true if every element is zero."""
    return not any(bool(stack[index].any()) for stack in slot_tensors(manager))


def zero_slot(manager: "LoRAModelManager", index: int) -> None:
    """Overwrites the slot's tensors with zeros in every layer."""
    for module in manager.modules.values():
        module.reset_lora(index)


def zero_slots_on_release() -> None:
    """From now on every manager of this process zeroes a slot when its adapter leaves it. Call it once."""
    from vllm.lora.model_manager import LoRAModelManager

    release = LoRAModelManager._deactivate_adapter

    def release_and_zero(self: LoRAModelManager, lora_id: int) -> None:
        index = self.lora_index_to_id.index(lora_id) if lora_id in self.lora_index_to_id else None
        release(self, lora_id)
        if index is not None:
            zero_slot(self, index)

    LoRAModelManager._deactivate_adapter = release_and_zero
