"""Products of routed rows with their experts' weights, in plain torch.

A product's last bits may depend on its number of rows and on a row's place in it. An adapter moves its own rows to
other experts, so products over just the rows of an expert would change the bits of base rows that share it. Here
every product has one row per token of the batch, at the token's own index, for every expert in use: shapes and places
follow from the batch alone. The price is num_used_experts / top_k times the operations.
"""

import torch


def expert_gemm(x: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Each (token, choice) row times its expert's weights transposed: [num_tokens * top_k, N] in x's dtype.

    x: [num_tokens, K], shared by a token's choices, or [num_tokens * top_k, K], one row per choice.
    weights: [num_experts, N, K]. topk_ids: [num_tokens, top_k] int, a token's experts all different.
    bias: [num_experts, N] or None.
    """
    num_tokens, top_k = topk_ids.shape
    experts = topk_ids.reshape(-1)
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=weights.shape[0]).tolist()
    out = x.new_empty((num_tokens * top_k, weights.shape[1]))
    per_choice = x.shape[0] != num_tokens
    by_token = x.new_zeros((num_tokens, x.shape[1])) if per_choice else x
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = order[start : start + count]
        tokens = rows // top_k
        if per_choice:
            # Rows left by the expert before stay: their results are not read.
            by_token[tokens] = x[rows]
        product = (by_token @ weights[expert].t())[tokens]
        if bias is not None:
            product += bias[expert]
        out[rows] = product
        start += count
    return out
