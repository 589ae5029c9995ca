"""A dense layer's shrink and expand on random weights, ours and vLLM's on the same buffers."""

import torch

from lora_kernels.bench.models import DenseLayer
from lora_kernels.bench.vllm_peer import metadata, vllm_dense_
from lora_kernels.configs import Tiles
from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_shrink import dense_shrink
from lora_kernels.launch import Overlap


class DenseBench:
    """Sets of weights that take turns, `spread_bytes` of them; `ours(i)` and `vllm(i)` add to the same output."""

    def __init__(
        self, layer: DenseLayer, num_tokens: int, *, slots: int, adapters: int, rank: int, spread_bytes: int = 400_000_000, steps: int = 48
    ) -> None:
        self.layer, self.rank, self.adapters = layer, rank, adapters
        one = 2 * slots * rank * (len(layer.widths) * layer.k + sum(layer.widths))
        dtype = torch.bfloat16
        self.sets = []
        for _ in range(max(2, min(steps, spread_bytes // one))):
            a = [torch.randn(slots, 1, rank, layer.k, device="cuda", dtype=dtype) / layer.k**0.5 for _ in layer.widths]
            b = [torch.randn(slots, 1, n, rank, device="cuda", dtype=dtype) / rank**0.5 for n in layer.widths]
            self.sets.append((a, b))
        tokens = torch.arange(num_tokens, device="cuda")
        spread = tokens % adapters if num_tokens <= 1024 else tokens * adapters // num_tokens
        self.slots = [((spread + i) % adapters).to(torch.int32) for i in range(8)]
        self.metas: list = []
        self.num_slots = slots
        self.x = torch.randn(num_tokens, layer.k, device="cuda", dtype=dtype)
        self.out = torch.randn(num_tokens, sum(layer.widths), device="cuda", dtype=dtype)

    def ours(self, index: int, plan: tuple[Tiles, Tiles] | None = None) -> None:
        a, b = self.sets[index % len(self.sets)]
        slots = self.slots[index % len(self.slots)]
        shrink, expand = plan or (None, None)
        partials = dense_shrink(self.x, a, slots, tiles=shrink, overlap=Overlap.IDS_SETTLED)
        dense_expand_(self.out, partials, b, slots, tiles=expand)

    def prepare_vllm(self) -> None:
        self.metas = [metadata(slots, self.num_slots) for slots in self.slots]

    def vllm(self, index: int) -> None:
        a, b = self.sets[index % len(self.sets)]
        vllm_dense_(self.out, self.x, a, b, self.metas[index % len(self.metas)])

    def floor_bytes(self) -> int:
        used = min(self.adapters, len(self.x))
        weights = used * self.rank * (len(self.layer.widths) * self.layer.k + sum(self.layer.widths))
        return 2 * (weights + self.x.numel() + 2 * self.out.numel())
