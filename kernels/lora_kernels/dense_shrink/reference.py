"""What dense_shrink computes, in plain torch with float32 (or wider) accumulation."""

from collections.abc import Sequence

import torch


def dense_shrink_reference(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
    accumulate: torch.dtype = torch.float32,
) -> torch.Tensor:
    """h `[num_tokens, slices, R]`, zero where a token has no adapter. x: `[num_tokens, K]`. lora_a: `[slots, 1, R, K]` each."""
    rank = lora_a[0].shape[2]
    h = torch.zeros(x.shape[0], len(lora_a), rank, dtype=accumulate, device=x.device)
    for slot in token_slots.unique().tolist():
        if slot < 0:
            continue
        rows = token_slots == slot
        used = rank if slot_ranks is None else int(slot_ranks[slot])
        for piece, stack in enumerate(lora_a):
            h[rows, piece, :used] = x[rows].to(accumulate) @ stack[slot, 0, :used].to(accumulate).T
    return h
