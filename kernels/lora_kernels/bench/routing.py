"""Random routing and adapters of a batch: even, or skewed in the ways that serving is."""

import torch


def draw_experts(routing: str, num_tokens: int, *, experts: int, top_k: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [num_tokens, top_k] int32, without repetition in a row; weights float32, each row's sum 1)."""
    scores = torch.rand(num_tokens, experts, device=draw.device, generator=draw)
    if routing == "zipf":
        odds = 1 / torch.arange(1, experts + 1, device=draw.device)
        scores = odds.log() - (-scores.clamp(1e-9, 1 - 1e-7).log()).log()  # the Gumbel trick: the k largest are a draw by odds
    if routing == "hot_cell":
        scores[:, 0] = scores.max() + 1
    top = scores.topk(top_k, dim=1)
    return top.indices.to(torch.int32), top.values.softmax(dim=1).float().contiguous()


def draw_adapters(routing: str, num_tokens: int, *, adapters: int, draw: torch.Generator, together: bool) -> torch.Tensor:
    """[num_tokens] int32. together: tokens of one adapter adjoin, as the tokens of one request do at prefill."""
    first = torch.randint(adapters, (1,), device=draw.device, generator=draw)
    if routing in ("one_adapter", "hot_cell"):
        slots = first.expand(num_tokens)
    elif routing == "zipf":
        odds = 1 / torch.arange(1, adapters + 1, device=draw.device)
        slots = torch.multinomial(odds, max(num_tokens, 1), replacement=True, generator=draw)[:num_tokens]
        slots = slots.sort().values if together else slots
    else:
        tokens = torch.arange(num_tokens, device=draw.device)
        slots = tokens * adapters // max(num_tokens, 1) if together else (tokens + first) % adapters
    return slots.to(torch.int32).contiguous()
