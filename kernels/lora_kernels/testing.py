"""Inputs and measures the kernels' tests share: random cases with poisoned surroundings, errors against float64."""

from dataclasses import dataclass, field

import torch

ERROR_BOUND = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Of ||out - ref|| / ||ref||: the output's own rounding (2^-11, 2^-9 at worst), and what float32 accumulation adds."""


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; infinite where a NaN is in either."""
    wide = reference.double().cpu()
    error = float((out.double().cpu() - wide).norm() / wide.norm().clamp_min(1e-30))
    return error if error == error else float("inf")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also for NaN."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One adapted projection. widths: N of each slice. ranks: each slot's own, where below `rank`; 0 = whatever, never used."""

    slots: int = 3
    experts: int = 1
    top_k: int = 1
    rank: int = 16
    k: int = 96
    widths: tuple[int, ...] = (80,)
    shared_a: bool = False
    shared_b: bool = False
    ranks: tuple[int, ...] | None = None
    idle: tuple[int, ...] = ()
    """Slots full of NaN: whoever reads one of them shows it."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    slot_ranks: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """topk_weights are normalised; x and base are of order one."""

    x: torch.Tensor
    base: torch.Tensor
    token_slots: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    unused: torch.Tensor = field(repr=False)
    """[num_pairs] bool: pairs without an adapter, whose base holds NaN and Inf here."""


def make_weights(layer: Layer, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Weights:
    """Random stacks; idle slots and all that lies beyond a slot's own rank are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    a = [normal(layer.slots, 1 if layer.shared_a else layer.experts, layer.rank, layer.k) / layer.k**0.5 for _ in layer.widths]
    b = [normal(layer.slots, 1 if layer.shared_b else layer.experts, n, layer.rank) / layer.rank**0.5 for n in layer.widths]
    for slot in range(layer.slots):
        rank = layer.ranks[slot] if layer.ranks else layer.rank
        rank = 0 if slot in layer.idle else rank
        for stack_a, stack_b in zip(a, b, strict=True):
            stack_a[slot, :, rank:] = float("nan")
            stack_b[slot, :, :, rank:] = float("nan")
    ranks = torch.tensor(layer.ranks, dtype=torch.int32, device=device) if layer.ranks else None
    return Weights(a=[t.to(dtype).to(device) for t in a], b=[t.to(dtype).to(device) for t in b], slot_ranks=ranks)


def make_batch(
    layer: Layer,
    token_slots: list[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    row_per_pair: bool = False,
    missing_experts: bool = False,
    one_cell: bool = False,
    disabled: tuple[int, ...] = (),
    seed: int = 1,
) -> Batch:
    """A batch with the given slot of each token; `missing_experts` makes every third expert id -1."""
    generator = torch.Generator().manual_seed(seed)
    tokens, pairs = len(token_slots), len(token_slots) * layer.top_k
    scores = torch.rand(tokens, layer.experts, generator=generator)
    topk_ids = scores.argsort(dim=1)[:, : layer.top_k].to(torch.int32)
    if one_cell:
        topk_ids = torch.arange(layer.top_k, dtype=torch.int32).repeat(tokens, 1)
    if missing_experts:
        topk_ids.view(-1)[::3] = -1
    weights = torch.rand(tokens, layer.top_k, generator=generator)
    slots = torch.tensor(token_slots, dtype=torch.int32)
    out = torch.tensor([slot in disabled for slot in token_slots], dtype=torch.bool)
    unused = ((slots < 0) | out)[:, None].expand(tokens, layer.top_k).reshape(-1) | (topk_ids.reshape(-1) < 0)
    base = torch.randn(pairs, sum(layer.widths), generator=generator)
    base[unused, ::2] = float("nan")
    base[unused, 1::2] = float("inf")
    return Batch(
        x=torch.randn(pairs if row_per_pair else tokens, layer.k, generator=generator).to(dtype).to(device),
        base=base.to(dtype).view(tokens, layer.top_k, sum(layer.widths)).to(device),
        token_slots=slots.to(device),
        topk_ids=topk_ids.to(device),
        topk_weights=(weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-6)).to(device),
        unused=unused.to(device),
    )
