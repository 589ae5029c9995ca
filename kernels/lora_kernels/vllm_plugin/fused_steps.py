"""What takes the place of an expert layer's activation and of its sum over choices, for one batch: plain, at prefill, at decode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

from lora_kernels import moe_decode
from lora_kernels.configs import Tiles, tuned
from lora_kernels.configs.plans import LayerShape, plan_for
from lora_kernels.launch import Overlap
from lora_kernels.moe_prefill import Activation, ExpertLora, PrefillPlan, combine, expand_activate, shrink
from lora_kernels.moe_shrink import moe_shrink
from lora_kernels.vllm_plugin.gpu_wrapper import local_ids, overlap_after
from lora_kernels.vllm_plugin.plain_layer import activate_rows, sum_rows
from lora_kernels.work_list import WorkList, build_work_list


class Step(Protocol):
    """What takes the place of a layer's activation and of its sum over choices."""

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None: ...

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """A layer whose adapters, if any, are not in its seams."""

    activation: Activation
    topk_ids: torch.Tensor
    num_experts: int

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None:
        activate_rows(gate_up, output, self.activation)

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None:
        sum_rows(down, self.topk_ids, output, num_experts=self.num_experts)


@dataclass(kw_only=True)
class PrefillStep:
    """One layer's prefill with adapters in its seams."""

    lora: ExpertLora
    plan: PrefillPlan
    work: WorkList
    tokens_by_adapter: WorkList | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    all_experts_local: bool
    hidden: torch.Tensor
    """What the shrink before the next seam gave."""

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None:
        _, self.hidden = expand_activate(gate_up, self.hidden, self.lora, self.work, self.plan, self.topk_weights, out=output)

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None:
        combine(
            down.view(-1, down.shape[-1]),
            self.hidden,
            self.lora,
            self.work,
            self.plan,
            self.topk_ids,
            tokens_by_adapter=self.tokens_by_adapter,
            all_experts_local=self.all_experts_local,
            out=output,
        )


@dataclass(kw_only=True)
class DecodeStep:
    """One layer's decode of a few tokens with adapters in its seams."""

    lora: ExpertLora
    routing: tuple[torch.Tensor, torch.Tensor]
    """Slots by token, and experts by token and choice."""
    slot_enabled: torch.Tensor
    topk_weights: torch.Tensor
    hidden: torch.Tensor

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None:
        base = gate_up.view(*self.routing[1].shape, -1)
        lora, layer = self.lora, self._layer()
        _, self.hidden = moe_decode.expand_activate(
            base, self.hidden, lora.gate_up_b, lora.down_a, *self.routing, activation=lora.activation, out=output, **layer
        )

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None:
        base = down.view(*self.routing[1].shape, -1)
        # The base's product is the launch before.
        options = {"out": output, "overlap": Overlap.INPUTS_FRESH} | self._layer()
        moe_decode.expand_sum(base, self.hidden, self.lora.down_b, *self.routing, self.topk_weights, **options)

    def _layer(self) -> dict[str, Any]:
        return {"num_experts": self.lora.num_experts, "slot_enabled": self.slot_enabled, "slot_ranks": self.lora.slot_ranks}


BeginStep = Callable[[MoELoRAContext, ExpertLora, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Step]
"""Of a layer's context, its adapters, x, experts by token and choice, their weights, and the map to local experts."""


def begin_decode(
    context: MoELoRAContext,
    lora: ExpertLora,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> DecodeStep:
    """Shrinks for w13.

    :raises ValueError: an argument is not as the kernels want it.
    """
    mapping, num_tokens = context.local_token_lora_mapping, len(topk_ids)
    slots = context.punica_wrapper.token_slots(num_tokens) if mapping is None else mapping[:num_tokens]
    routing, enabled = (slots, local_ids(topk_ids, expert_map)), context.adapter_enabled
    layer = {"num_experts": lora.num_experts, "slot_enabled": enabled, "slot_ranks": lora.slot_ranks}
    tiles = _shrink_tiles(lora, x, topk_ids)
    hidden = moe_shrink(x, lora.gate_up_a, *routing, tiles=tiles, overlap=overlap_after(expert_map), **layer)
    return DecodeStep(lora=lora, routing=routing, slot_enabled=enabled, topk_weights=topk_weights, hidden=hidden)


def _shrink_tiles(lora: ExpertLora, x: torch.Tensor, topk_ids: torch.Tensor) -> Tiles:
    shape = {"rank": lora.rank, "width": lora.hidden_size, "slices": len(lora.gate_up_a), "adapters": lora.num_adapters}
    shape["rows_sharing_x"] = topk_ids.shape[1]
    tiles = tuned("moe_shrink", x, rows=topk_ids.numel(), **shape)
    return tuned("moe_shrink", x, rows=1, **shape) if tiles.path == "groups" else tiles


def begin_prefill(
    context: MoELoRAContext,
    lora: ExpertLora,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> PrefillStep:
    """Groups the layer's pairs and shrinks for w13.

    :raises ValueError: an argument is not as the kernels want it.
    """
    num_tokens = len(topk_ids)
    mapping = context.local_token_lora_mapping
    slots = context.punica_wrapper.token_slots(num_tokens) if mapping is None else mapping[:num_tokens]
    ids = local_ids(topk_ids, expert_map)
    plan = plan_for(layer_shape(context, lora, topk_ids), x.device)
    counts = {"num_adapters": lora.num_adapters, "num_experts": lora.num_experts}
    work = build_work_list(ids, slots, block_m=plan.block_m, adapter_enabled=context.adapter_enabled, **counts)
    tokens = None
    # A list of all layers has tokens of adapters that leave this one alone too: `sum_experts` would read hidden rows that they do not have.
    if plan.token_block is not None and plan.sum_experts is None and mapping is None:
        tokens = context.punica_wrapper.tokens_by_adapter(num_tokens, plan.token_block)
    return PrefillStep(
        lora=lora,
        plan=plan,
        work=work,
        tokens_by_adapter=tokens,
        topk_ids=ids,
        topk_weights=topk_weights.float(),
        # With padding skipped or experts elsewhere an id may be -1; a batch of its own says neither.
        all_experts_local=False,
        hidden=shrink(x, lora, work, plan),
    )


def layer_shape(context: MoELoRAContext, lora: ExpertLora, topk_ids: torch.Tensor) -> LayerShape:
    """What the step's way and tiles are chosen by. Adapters are those of the step, as a power of two: few sizes to compile for."""
    num_tokens, top_k = topk_ids.shape
    in_step = context.punica_wrapper.num_adapters if context.local_token_lora_mapping is None else lora.num_adapters
    return LayerShape(
        dtype=str(lora.down_b.dtype).removeprefix("torch."),
        rank=lora.rank,
        hidden_size=lora.hidden_size,
        intermediate_size=lora.intermediate_size,
        slices=len(lora.gate_up_a),
        num_experts=lora.num_experts,
        top_k=top_k,
        num_adapters=min(1 << (in_step - 1).bit_length(), lora.num_adapters) if in_step else 1,
        num_tokens=num_tokens,
    )
