"""What pair_groups computes, on the host."""

import torch

from lora_kernels.moe_shrink.reference import live_pairs


def pair_groups_reference(
    token_slots: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, slot_enabled: torch.Tensor | None = None
) -> dict[int, list[int]]:
    """The pairs of each cell that has some, in order; a cell is slot * num_experts + expert."""
    cells: dict[int, list[int]] = {}
    for pair, (slot, expert) in enumerate(live_pairs(token_slots, topk_ids, slot_enabled)):
        if slot >= 0 and expert >= 0:
            cells.setdefault(slot * num_experts + expert, []).append(pair)
    return cells
