"""An expert layer's LoRA at prefill in plain torch, one pair at a time in the dtype given: float32 or float64."""

from collections.abc import Sequence

import torch

from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.work_list.reference import cells_of_pairs


def activated(
    gate_up: torch.Tensor,
    x: torch.Tensor,
    a_stacks: Sequence[torch.Tensor],
    b_stacks: Sequence[torch.Tensor],
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    activation: Activation,
    adapter_enabled: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(gate_up + LoRA(x)) of each pair: [num_pairs, I]; zeros where the expert lives elsewhere.

    gate_up: [num_pairs, 2 I]. x: [num_tokens, H]. Stacks: A [L, E, R, H], B [L, E, I or 2 I, R].
    """
    top_k = topk_ids.shape[1]
    deltas = [
        _deltas(x.repeat_interleave(top_k, 0), a, b, topk_ids, token_adapters, adapter_enabled)
        for a, b in zip(a_stacks, b_stacks, strict=True)
    ]
    summed = gate_up + torch.cat(deltas, 1)
    if activation is Activation.GPT_OSS:
        gate, up = summed[:, ::2].clamp(max=7.0), summed[:, 1::2].clamp(-7.0, 7.0)
        out = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
    else:
        gate, up = summed.chunk(2, 1)
        out = torch.nn.functional.silu(gate) * up
    return torch.where((topk_ids.reshape(-1) >= 0)[:, None], out, 0.0)


def combined(
    down: torch.Tensor,
    acts: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    adapter_enabled: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a token's choices of down + weight * LoRA(acts): [num_tokens, H].

    down: [num_pairs, H], the routing weight already in it. acts: [num_pairs, I]. a: [L, E, R, I]. b: [L, E, H, R].
    """
    deltas = _deltas(acts, a, b, topk_ids, token_adapters, adapter_enabled) * topk_weights.reshape(-1, 1)
    kept = torch.where((topk_ids.reshape(-1) >= 0)[:, None], down + deltas, 0.0)
    return kept.view(*topk_ids.shape, -1).sum(1)


def _deltas(
    rows: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    adapter_enabled: torch.Tensor | None,
) -> torch.Tensor:
    num_adapters, num_experts = a.shape[0], int(max(a.shape[1], b.shape[1], int(topk_ids.max()) + 1))
    a, b = a.expand(-1, num_experts, -1, -1), b.expand(-1, num_experts, -1, -1)
    cells = cells_of_pairs(topk_ids, token_adapters, num_adapters=num_adapters, num_experts=num_experts, adapter_enabled=adapter_enabled)
    out = torch.zeros((rows.shape[0], b.shape[2]), dtype=rows.dtype, device=rows.device)
    for cell in cells.unique().tolist():
        if cell < num_adapters * num_experts:
            at = (cells == cell).nonzero().flatten()
            adapter, expert = divmod(cell, num_experts)
            out[at] = rows[at] @ a[adapter, expert].to(rows).t() @ b[adapter, expert].to(rows).t()
    return out
