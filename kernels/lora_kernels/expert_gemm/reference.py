"""Products of routed rows with their experts' weights, in plain torch.

A product's last bits may depend on its number of rows and on a row's place in it. An adapter moves its own rows to
other experts, so products over just the rows of an expert would change the bits of base rows that share it. Here
every product has one row per token of the batch, at the token's own index, for every expert in use: shapes and places
follow from the batch alone. The price is num_used_experts / top_k times the operations.
"""

import torch

BATCHED_LIMIT_ELEMENTS = 1 << 20
"""Largest product of all experts, in elements of its inputs or outputs, that is one batched call instead of a loop."""


def expert_gemm(x: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Each (token, choice) row times its expert's weights transposed: [num_tokens * top_k, N] in x's dtype.

    x: [num_tokens, K], shared by a token's choices, or [num_tokens * top_k, K], one row per choice.
    weights: [num_experts, N, K]. topk_ids: [num_tokens, top_k] int, a token's experts all different.
    bias: [num_experts, N] or None.
    """
    num_tokens, top_k = topk_ids.shape
    num_experts, num_outputs, num_inputs = weights.shape
    batched = num_experts * num_tokens * max(num_outputs, num_inputs) <= BATCHED_LIMIT_ELEMENTS
    experts = topk_ids.reshape(-1)
    out = (_all_experts if batched else _experts_in_use)(x, weights, experts, num_tokens, top_k)
    return out if bias is None else out.add_(bias[experts])


def _all_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, num_tokens: int, top_k: int) -> torch.Tensor:
    cells = experts * num_tokens + torch.arange(num_tokens, device=x.device).repeat_interleave(top_k)
    num_experts, num_outputs, num_inputs = weights.shape
    if x.shape[0] == num_tokens:
        by_expert = x.expand(num_experts, num_tokens, num_inputs)
    else:
        by_expert = x.new_zeros((num_experts * num_tokens, num_inputs)).index_copy_(0, cells, x)
        by_expert = by_expert.view(num_experts, num_tokens, num_inputs)
    products = torch.bmm(by_expert, weights.transpose(1, 2))
    return products.view(num_experts * num_tokens, num_outputs).index_select(0, cells)


def _experts_in_use(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, num_tokens: int, top_k: int) -> torch.Tensor:
    order = torch.argsort(experts, stable=True)
    out = x.new_empty((num_tokens * top_k, weights.shape[1]))
    shared = x.shape[0] == num_tokens
    by_token = x if shared else x.new_zeros((num_tokens, x.shape[1]))
    start = 0
    for expert, count in enumerate(torch.bincount(experts, minlength=weights.shape[0]).tolist()):
        if count == 0:
            continue
        rows = order[start : start + count]
        tokens = rows // top_k
        if not shared:
            # Rows left by the expert before stay: their results are not read.
            by_token[tokens] = x[rows]
        out[rows] = (by_token @ weights[expert].t())[tokens]
        start += count
    return out
