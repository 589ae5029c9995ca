"""What moe_shrink computes, in plain torch with float32 (or wider) accumulation."""

from collections.abc import Sequence

import torch


def moe_shrink_reference(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """h `[num_pairs, slices, R]`, zero where a pair has no adapter; pair = token * top_k + choice.

    x: `[num_tokens, K]`, or `[num_pairs, K]` a row per pair. lora_a: stacks `[slots, experts or 1, R, K]`.
    """
    num_tokens, top_k = topk_ids.shape
    rank = lora_a[0].shape[2]
    h = torch.zeros(num_tokens * top_k, len(lora_a), rank, dtype=accumulate, device=x.device)
    rows = x.shape[0] // max(num_tokens, 1)
    for pair, (slot, expert) in enumerate(live_pairs(token_slots, topk_ids, slot_enabled)):
        if slot < 0 or expert < 0:
            continue
        row = x[pair if rows == top_k else pair // top_k].to(accumulate)
        used = rank if slot_ranks is None else int(slot_ranks[slot])
        for piece, stack in enumerate(lora_a):
            a = stack[slot, expert if stack.shape[1] > 1 else 0, :used].to(accumulate)
            h[pair, piece, :used] = a @ row
    return h


def live_pairs(token_slots: torch.Tensor, topk_ids: torch.Tensor, slot_enabled: torch.Tensor | None) -> list[tuple[int, int]]:
    """(slot, expert) of each pair; slot is -1 where the token has no adapter or its adapter is disabled here."""
    enabled = None if slot_enabled is None else slot_enabled.tolist()
    slots = [slot if slot < 0 or enabled is None or enabled[slot] else -1 for slot in token_slots.tolist()]
    return [(slot, expert) for slot, experts in zip(slots, topk_ids.tolist(), strict=True) for expert in experts]
