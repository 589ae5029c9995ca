"""What vLLM passes when an expert layer wants its adapters' updates: the same on a GPU and on a CPU, in one place."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class W13Call:
    """PunicaWrapperBase.add_lora_w13's arguments, in its order.

    y: [num_tokens, top_k_num, N] (or the same flattened), before the activation. x: [num_tokens, H]. token_lora_mapping: the rows' slots
    where they came from other ranks; None: the step's own.
    """

    y: torch.Tensor
    x: torch.Tensor
    lora_a_stacked: tuple[torch.Tensor, ...]
    lora_b_stacked: tuple[torch.Tensor, ...]
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expert_map: torch.Tensor | None
    w1: torch.Tensor
    w2: torch.Tensor
    num_tokens: int
    top_k_num: int
    max_loras: int
    adapter_enabled: torch.Tensor
    local_num_experts: int
    top_k: int
    num_slices: int
    fully_sharded: bool
    use_tuned_config: bool
    add_inputs: bool = True
    token_lora_mapping: torch.Tensor | None = None


@dataclass
class W2Call:
    """PunicaWrapperBase.add_lora_w2's arguments, in its order.

    y: [num_tokens, top_k_num, H], with the router's weights, before the sum over choices. x: [num_tokens * top_k_num, I]. From
    sorted_token_ids_lora to token_lora_mapping: what add_lora_w13 returned.
    """

    y: torch.Tensor
    x: torch.Tensor
    lora_a_stacked: tuple[torch.Tensor, ...]
    lora_b_stacked: tuple[torch.Tensor, ...]
    topk_weights: torch.Tensor
    sorted_token_ids_lora: Any
    expert_ids_lora: torch.Tensor | None
    num_tokens_post_padded_lora: torch.Tensor | None
    token_lora_mapping: torch.Tensor | None
    num_tokens: int
    w1: torch.Tensor
    w2: torch.Tensor
    top_k_num: int
    max_loras: int
    adapter_enabled: torch.Tensor
    top_k: int
    fully_sharded: bool
    tp_rank: int
    use_tuned_config: bool
    add_inputs: bool = True


Passed = tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""What add_lora_w13 returns for add_lora_w2."""

NOTHING: Passed = (None, None, None, None)
