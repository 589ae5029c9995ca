"""What moe_expand computes, in plain torch with float32 (or wider) accumulation."""

from collections.abc import Sequence

import torch

from lora_kernels.moe_shrink.reference import live_pairs


def moe_expand_reference(
    h: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    topk_weights: torch.Tensor | None = None,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The delta `[num_pairs, sum of N]` in h's dtype, to be added to the base output.

    h: `[num_pairs, slices, R]`. lora_b: stacks `[slots, experts or 1, N, R]`. topk_weights: multiply the delta if given.
    """
    widths = [stack.shape[2] for stack in lora_b]
    delta = torch.zeros(h.shape[0], sum(widths), dtype=h.dtype, device=h.device)
    weights = None if topk_weights is None else topk_weights.flatten().to(h.dtype)
    for pair, (slot, expert) in enumerate(live_pairs(token_slots, topk_ids, slot_enabled)):
        if slot < 0 or expert < 0:
            continue
        start = 0
        for piece, stack in enumerate(lora_b):
            used = stack.shape[3] if slot_ranks is None else int(slot_ranks[slot])
            b = stack[slot, expert if stack.shape[1] > 1 else 0, :, :used].to(h.dtype)
            delta[pair, start : start + widths[piece]] = b @ h[pair, piece, :used]
            start += widths[piece]
    return delta if weights is None else delta * weights[:, None]
