"""A dense layer's shrink and expand on random weights, ours and vLLM's on the same buffers."""

import torch

from lora_kernels.bench.models import DenseLayer
from lora_kernels.bench.routing import draw_adapters
from lora_kernels.bench.vllm_peer import metadata, vllm_dense_
from lora_kernels.configs import Tiles
from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_shrink import dense_shrink
from lora_kernels.launch import Overlap


class DenseBench:
    """Sets of weights, `spread_bytes` of them, and of inputs at prefill take turns; `ours(i)` and `vllm(i)` add to the same outputs."""

    def __init__(
        self,
        layer: DenseLayer,
        num_tokens: int,
        *,
        slots: int,
        adapters: int,
        rank: int,
        spread_bytes: int = 400_000_000,
        steps: int = 48,
        routing: str = "uniform",
    ) -> None:
        self.layer, self.rank, self.adapters = layer, rank, adapters
        one = 2 * slots * rank * (len(layer.widths) * layer.k + sum(layer.widths))
        dtype = torch.bfloat16
        self.sets = []
        for _ in range(max(2, min(steps, spread_bytes // one))):
            a = [torch.randn(slots, 1, rank, layer.k, device="cuda", dtype=dtype) / layer.k**0.5 for _ in layer.widths]
            b = [torch.randn(slots, 1, n, rank, device="cuda", dtype=dtype) / rank**0.5 for n in layer.widths]
            self.sets.append((a, b))
        draw, together = torch.Generator(device="cuda").manual_seed(0), num_tokens > 1024
        self.slots = [draw_adapters(routing, num_tokens, adapters=adapters, draw=draw, together=together) for _ in range(8)]
        self.metas: list = []
        self.num_slots = slots
        turns = range(4 if together else 1)
        self.x = [torch.randn(num_tokens, layer.k, device="cuda", dtype=dtype) for _ in turns]
        self.out = [torch.randn(num_tokens, sum(layer.widths), device="cuda", dtype=dtype) for _ in turns]

    def ours(self, index: int, plan: tuple[Tiles, Tiles] | None = None) -> None:
        a, b = self.sets[index % len(self.sets)]
        slots = self.slots[index % len(self.slots)]
        shrink, expand = plan or (None, None)
        turn = index % len(self.x)
        partials = dense_shrink(self.x[turn], a, slots, tiles=shrink, overlap=Overlap.IDS_SETTLED)
        dense_expand_(self.out[turn], partials, b, slots, tiles=expand)

    def prepare_vllm(self) -> None:
        self.metas = [metadata(slots, self.num_slots) for slots in self.slots]

    def vllm(self, index: int) -> None:
        a, b = self.sets[index % len(self.sets)]
        turn = index % len(self.x)
        vllm_dense_(self.out[turn], self.x[turn], a, b, self.metas[index % len(self.metas)])

    def floor_bytes(self) -> float:
        used = sum(slots.unique().numel() for slots in self.slots) / len(self.slots)
        weights = used * self.rank * (len(self.layer.widths) * self.layer.k + sum(self.layer.widths))
        return 2 * (weights + self.x[0].numel() + 2 * self.out[0].numel())
