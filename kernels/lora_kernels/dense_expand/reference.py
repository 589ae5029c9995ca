"""What dense_expand computes, in plain torch with float32 (or wider) accumulation."""

from collections.abc import Sequence

import torch


def dense_expand_reference(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The delta `[num_tokens, sum of N]` in h's dtype. h: `[num_tokens, slices, R]`. lora_b: `[slots, 1, N, R]`, N of its own each."""
    widths = [stack.shape[2] for stack in lora_b]
    delta = torch.zeros(h.shape[0], sum(widths), dtype=h.dtype, device=h.device)
    for slot in token_slots.unique().tolist():
        if slot < 0:
            continue
        rows = (token_slots == slot).nonzero().flatten()
        start = 0
        for piece, stack in enumerate(lora_b):
            used = stack.shape[3] if slot_ranks is None else int(slot_ranks[slot])
            product = h[rows, piece, :used] @ stack[slot, 0, :, :used].to(h.dtype).T
            delta[rows, start : start + widths[piece]] = product
            start += widths[piece]
    return delta
