"""A dense layer's shrink and expand on random weights, ours and vLLM's on the same buffers."""

import torch

from lora_kernels.bench.models import DenseLayer
from lora_kernels.bench.routing import draw_adapters
from lora_kernels.bench.vllm_peer import forget_addresses, metadata, vllm_dense_
from lora_kernels.configs import Tiles
from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_shrink.op import dense_shrink
from lora_kernels.dense_shrink.paths import needs_token_list
from lora_kernels.dense_shrink.token_list import list_tokens
from lora_kernels.launch import Overlap

PREFILL_FROM = 1024
"""Tokens from which a step has activations of its own: fewer stay in the L2 cache between the base product and the update anyway."""


class DenseBench:
    """Sets of weights that take turns, `spread_bytes` of them; `ours(i)` and `vllm(i)` add to the same output.

    What depends on the batch alone (our token list, vLLM's sorted ids) is made once, as in a forward pass of many layers.
    """

    def __init__(
        self,
        layer: DenseLayer,
        num_tokens: int,
        *,
        slots: int,
        adapters: int,
        rank: int,
        routing: str = "uniform",
        spread_bytes: int = 400_000_000,
        steps: int = 48,
    ) -> None:
        self.layer, self.rank, self.num_slots = layer, rank, slots
        one = 2 * slots * rank * (len(layer.widths) * layer.k + sum(layer.widths))
        dtype = torch.bfloat16
        self.sets = []
        for _ in range(max(2, min(steps, spread_bytes // one))):
            a = [torch.randn(slots, 1, rank, layer.k, device="cuda", dtype=dtype) / layer.k**0.5 for _ in layer.widths]
            b = [torch.randn(slots, 1, n, rank, device="cuda", dtype=dtype) / rank**0.5 for n in layer.widths]
            self.sets.append((a, b))
        draw, together = torch.Generator(device="cuda").manual_seed(0), num_tokens >= PREFILL_FROM
        self.slots = [draw_adapters(routing, num_tokens, adapters=adapters, draw=draw, together=together) for _ in range(8)]
        self.lists = [list_tokens(one, num_slots=slots) if needs_token_list(num_tokens) else None for one in self.slots]
        self.metas: list = []
        self.activations = []
        for _ in range(max(1, spread_bytes // (2 * num_tokens * (layer.k + sum(layer.widths)))) if together else 1):
            x = torch.randn(num_tokens, layer.k, device="cuda", dtype=dtype)
            self.activations.append((x, torch.randn(num_tokens, sum(layer.widths), device="cuda", dtype=dtype)))

    def ours(self, index: int, plan: tuple[Tiles, Tiles] | None = None) -> None:
        a, b = self.sets[index % len(self.sets)]
        x, out = self.activations[index % len(self.activations)]
        slots, token_list = self.slots[index % len(self.slots)], self.lists[index % len(self.slots)]
        shrink, expand = plan or (None, None)
        partials = dense_shrink(x, a, slots, token_list=token_list, tiles=shrink, overlap=Overlap.IDS_SETTLED)
        dense_expand_(out, partials, b, slots, token_list=token_list, tiles=expand)

    def prepare_vllm(self) -> None:
        forget_addresses()
        self.metas = [metadata(slots, self.num_slots) for slots in self.slots]

    def vllm(self, index: int) -> None:
        a, b = self.sets[index % len(self.sets)]
        x, out = self.activations[index % len(self.activations)]
        vllm_dense_(out, x, a, b, self.metas[index % len(self.metas)])

    def floor_bytes(self) -> int:
        """The weights of the adapters in use (of all the steps' batches, the mean), x once, the output read and written."""
        used = sum(len(slots.unique()) for slots in self.slots) / len(self.slots)
        weights = used * self.rank * (len(self.layer.widths) * self.layer.k + sum(self.layer.widths))
        x, out = self.activations[0]
        return round(2 * (weights + x.numel() + 2 * out.numel()))
