"""A layer's w13 and w2 at decode on random weights and routing, ours and vLLM's on the same buffers."""

from dataclasses import dataclass

import torch

from lora_kernels.bench.models import MoeModel
from lora_kernels.bench.routing import draw_adapters, draw_experts
from lora_kernels.bench.vllm_peer import VllmMoe, metadata
from lora_kernels.configs import Tiles
from lora_kernels.launch import Overlap
from lora_kernels.moe_lora import Routing, moe_lora_

PlanOfLayer = dict[str, tuple[Tiles, Tiles]]
"""Tiles of the shrink and the expand, by projection ("w13", "w2")."""


class MoeBench:
    """layers: sets of weights that take turns, together larger than the L2. Every step has routing of its own."""

    def __init__(self, model: MoeModel, *, slots: int, rank: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.slots, self.rank, self.dtype = model, slots, rank, dtype

        def stack(count: int, rows: int, columns: int) -> list[torch.Tensor]:
            shape = (slots, model.experts, rows, columns)
            return [torch.randn(shape, device="cuda", dtype=dtype) / columns**0.5 for _ in range(count)]

        wide = model.intermediate * (2 if model.slices == 1 else 1)
        self.layers = [
            (stack(model.slices, rank, model.hidden), stack(model.slices, wide, rank), stack(1, rank, model.intermediate),
             stack(1, model.hidden, rank))
            for _ in range(layers)
        ]  # fmt: skip

    def batch(self, num_tokens: int, *, steps: int, adapters: int, seed: int = 0, routing: str = "uniform") -> "Batch":
        return Batch(self, num_tokens, steps=steps, adapters=adapters, seed=seed, routing=routing)


@dataclass(frozen=True)
class Step:
    token_slots: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class Batch:
    """`ours(i)` and `vllm(i)` add the LoRA of step i to the same outputs."""

    def __init__(self, bench: MoeBench, num_tokens: int, *, steps: int, adapters: int, seed: int, routing: str) -> None:
        self.bench, model = bench, bench.model
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.steps = []
        for _ in range(steps):
            ids, weights = draw_experts(routing, num_tokens, experts=model.experts, top_k=model.top_k, draw=generator)
            slots = draw_adapters(routing, num_tokens, adapters=adapters, draw=generator, together=False)
            self.steps.append(Step(slots, ids, weights))
        pairs = num_tokens * model.top_k
        self.x13 = torch.randn(num_tokens, model.hidden, device="cuda", dtype=bench.dtype)
        self.x2 = torch.randn(pairs, model.intermediate, device="cuda", dtype=bench.dtype)
        self.out13 = torch.randn(num_tokens, model.top_k, 2 * model.intermediate, device="cuda", dtype=bench.dtype)
        self.out2 = torch.randn(num_tokens, model.top_k, model.hidden, device="cuda", dtype=bench.dtype)
        self.metas: list = []
        self.peer = VllmMoe(
            experts=model.experts,
            hidden=model.hidden,
            intermediate=model.intermediate,
            top_k=model.top_k,
            rank=bench.rank,
            slots=bench.slots,
        )

    def ours(self, index: int, plan: PlanOfLayer | None = None) -> None:
        step, plan = self.steps[index], plan or {}
        a13, b13, a2, b2 = self.bench.layers[index % len(self.bench.layers)]
        routing = Routing(
            token_slots=step.token_slots, topk_ids=step.topk_ids, num_slots=self.bench.slots, num_experts=self.bench.model.experts
        )
        settled = Overlap.IDS_SETTLED
        moe_lora_(self.out13, self.x13, a13, b13, routing, tiles=plan.get("w13"), overlap=settled)
        moe_lora_(self.out2, self.x2, a2, b2, routing, topk_weights=step.topk_weights, tiles=plan.get("w2"), overlap=settled)

    def vllm(self, index: int) -> None:
        """Call `prepare_vllm` first."""
        step, meta = self.steps[index], self.metas[index]
        a13, b13, a2, b2 = self.bench.layers[index % len(self.bench.layers)]
        aligned = self.peer.align(meta, step.topk_ids)
        self.peer.add(self.out13, self.x13, a13, b13, step.topk_weights, aligned, meta, projection="w13")
        self.peer.add(self.out2, self.x2, a2, b2, step.topk_weights, aligned, meta, projection="w2")

    def prepare_vllm(self) -> None:
        self.metas = [metadata(step.token_slots, self.bench.slots) for step in self.steps]

    def floor_bytes(self) -> float:
        """Each cell's weights once, each input once, each output read and written once; the mean of the steps."""
        model, total = self.bench.model, 0
        for step in self.steps:
            cells = (step.token_slots[:, None] * model.experts + step.topk_ids).unique().numel()
            per_cell = self.bench.rank * (model.slices * model.hidden + 2 * model.intermediate + model.intermediate + model.hidden)
            activations = self.x13.numel() + self.x2.numel() + 2 * (self.out13.numel() + self.out2.numel())
            total += 2 * (cells * per_cell + activations)
        return total / len(self.steps)
