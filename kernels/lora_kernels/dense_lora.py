"""A dense layer's whole update, out += B A x: two launches. For engines: one call a layer, and what to prepare for a batch.

A batch of `needs_token_list` many tokens wants a `TokenList`, made once for all layers: from the engine's own tables, or `list_tokens`.
"""

from collections.abc import Sequence

import torch

from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_shrink import TokenList, dense_shrink, list_tokens, needs_token_list
from lora_kernels.launch import Overlap

__all__ = ["TokenList", "dense_lora_", "list_tokens", "needs_token_list"]


def dense_lora_(
    out: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
    token_list: TokenList | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> None:
    """Adds B A x to the base output, in place; rows without an adapter keep their bits. Arguments as in dense_shrink, dense_expand_.

    overlap: what the kernel before in the stream leaves settled. IDS_SETTLED may be said when it writes neither token_slots, the
    list nor adapter weights.

    :raises ValueError: an argument does not fit.
    """
    partials = dense_shrink(x, lora_a, token_slots, slot_ranks=slot_ranks, token_list=token_list, overlap=overlap)
    dense_expand_(out, partials, lora_b, token_slots, slot_ranks=slot_ranks, token_list=token_list)
