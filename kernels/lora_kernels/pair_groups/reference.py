"""What pair_groups computes, on the host."""

import torch

from lora_kernels.moe_shrink.reference import live_pairs


def pair_groups_reference(
    token_slots: torch.Tensor, topk_ids: torch.Tensor, *, num_experts: int, group: int, slot_enabled: torch.Tensor | None = None
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """(pairs in the order of their cells, one (cell, start, count) per group); a group has at most `group` pairs of one cell."""
    cells: dict[int, list[int]] = {}
    for pair, (slot, expert) in enumerate(live_pairs(token_slots, topk_ids, slot_enabled)):
        if slot >= 0 and expert >= 0:
            cells.setdefault(slot * num_experts + expert, []).append(pair)
    order: list[int] = []
    groups: list[tuple[int, int, int]] = []
    for cell in sorted(cells):
        for start in range(0, len(cells[cell]), group):
            members = cells[cell][start : start + group]
            groups.append((cell, len(order), len(members)))
            order += members
    return order, groups
