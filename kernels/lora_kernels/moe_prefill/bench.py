"""Prefill of expert layers on random weights, activations and routing, on a GPU: what the benchmark times and the search tunes.

Chains of `LAYERS` layers, each with weights and activations of its own, so that nothing is warm in the L2 cache. Tokens of one adapter lie
together, as requests do.
"""

from dataclasses import dataclass

import torch

from lora_kernels.bench.routing import draw_adapters, draw_experts
from lora_kernels.configs.plans import LayerShape, plan_for
from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.moe_prefill.layer import combine, expand_activate, group_tokens, shrink
from lora_kernels.moe_prefill.plan import PrefillPlan
from lora_kernels.moe_prefill.weights import ExpertLora
from lora_kernels.work_list import build_work_list

LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    activation: Activation
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


MODELS = (
    Model(name="gptoss-20b", activation=Activation.GPT_OSS, num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880),
    Model(name="qwen3-30b-a3b", activation=Activation.SWIGLU, num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768),
)


@dataclass(frozen=True, kw_only=True)
class LayerTensors:
    lora: ExpertLora
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    token_adapters: torch.Tensor


def make_layers(
    model: Model, num_tokens: int, adapters: int, rank: int, *, count: int = LAYERS, routing: str = "uniform"
) -> list[LayerTensors]:
    draw = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16) * scale

    slices, experts, hidden, size = model.activation.num_slices, model.num_experts, model.hidden_size, model.intermediate_size
    width, num_pairs = 2 * size // slices, num_tokens * model.top_k
    token_adapters = draw_adapters(routing, num_tokens, adapters=adapters, draw=draw, together=True)
    layers = []
    for _ in range(count):
        lora = ExpertLora(
            activation=model.activation,
            gate_up_a=[normal(adapters, experts, rank, hidden, scale=0.02) for _ in range(slices)],
            gate_up_b=[normal(adapters, experts, width, rank, scale=0.02) for _ in range(slices)],
            down_a=normal(adapters, experts, rank, size, scale=0.02),
            down_b=normal(adapters, experts, hidden, rank, scale=0.02),
            num_experts=experts,
        )
        topk_ids, topk_weights = draw_experts(routing, num_tokens, experts=experts, top_k=model.top_k, draw=draw)
        layers.append(
            LayerTensors(
                lora=lora,
                x=normal(num_tokens, hidden),
                gate_up=normal(num_pairs, 2 * size),
                down=normal(num_pairs, hidden),
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                token_adapters=token_adapters,
            )
        )
    return layers


def plan_of(layer: LayerTensors, model: Model) -> PrefillPlan:
    shape = LayerShape(
        dtype=str(layer.x.dtype).removeprefix("torch."),
        rank=layer.lora.rank,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        slices=model.activation.num_slices,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_adapters=layer.lora.num_adapters,
        num_tokens=layer.topk_ids.shape[0],
    )
    return plan_for(shape, layer.x.device)


def list_of(layer: LayerTensors, plan: PrefillPlan) -> object:
    return build_work_list(
        layer.topk_ids,
        layer.token_adapters,
        num_adapters=layer.lora.num_adapters,
        num_experts=layer.lora.num_experts,
        block_m=plan.block_m,
    )


def run_forward(layers: list[LayerTensors], plan: PrefillPlan) -> None:
    """A chain of layers of one batch: tokens are grouped by adapter once, pairs in every layer."""
    tokens = None
    if plan.token_block is not None:
        tokens = group_tokens(layers[0].token_adapters, num_adapters=layers[0].lora.num_adapters, block=plan.token_block)
    for layer in layers:
        work = list_of(layer, plan)
        hidden = shrink(layer.x, layer.lora, work, plan)
        _, down_hidden = expand_activate(layer.gate_up, hidden, layer.lora, work, plan, layer.topk_weights)
        combine(
            layer.down,
            down_hidden,
            layer.lora,
            work,
            plan,
            layer.topk_ids,
            tokens_by_adapter=tokens,
            all_experts_local=True,
        )


def floor_bytes(layer: LayerTensors, model: Model) -> int:
    """Each input read once, each output written once, 16-bit; the weights of the cells in use."""
    cells = (layer.token_adapters[:, None] * model.num_experts + layer.topk_ids).unique().numel()
    stacks = [*layer.lora.gate_up_a, *layer.lora.gate_up_b, layer.lora.down_a, layer.lora.down_b]
    weights = sum(stack.shape[2] * stack.shape[3] for stack in stacks) * cells
    activations = 2 * layer.x.numel() + layer.gate_up.numel() * 3 // 2 + layer.down.numel()
    return 2 * (weights + activations)
