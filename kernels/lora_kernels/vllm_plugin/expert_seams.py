"""LoRA at prefill inside an expert layer's seams: vLLM's experts classes call activation and sum as methods, and there the
fused kernels of `moe_prefill` take their place. A step without adapters gets the same activation and sum there.

w13's shrink where vLLM would add w13's update; its expand, the activation and w2's shrink where it would activate; w2's expand and
the sum over choices where it would sum. Small batches, and whatever does not fit, go the usual way through the punica wrapper.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from lora_kernels.configs.plans import LayerShape, plan_for
from lora_kernels.moe_path import PREFILL_FROM_TOKENS, choose_path
from lora_kernels.moe_prefill import Activation, ExpertLora, PrefillPlan, combine, expand_activate, group_tokens, shrink
from lora_kernels.vllm_plugin.gpu_wrapper import local_ids, tell_once, unshared
from lora_kernels.vllm_plugin.plain_layer import activate_rows, sum_rows
from lora_kernels.work_list import WorkList, build_work_list

NOTHING = (None, None, None, None)


class Step(Protocol):
    """What takes the place of a layer's activation and of its sum over choices."""

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None: ...

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """A layer of a prefill-sized batch whose adapters, if any, are not in its seams."""

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
    token_slots: torch.Tensor
    slot_enabled: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    all_experts_local: bool
    hidden: torch.Tensor
    """What the shrink before the next seam gave."""

    def activate(self, output: torch.Tensor, gate_up: torch.Tensor) -> None:
        _, self.hidden = expand_activate(gate_up, self.hidden, self.lora, self.work, self.plan, out=output)

    def sum_choices(self, down: torch.Tensor, output: torch.Tensor) -> None:
        tokens = None
        if self.plan.groups_tokens:
            tokens = group_tokens(self.token_slots, num_adapters=self.lora.num_adapters, adapter_enabled=self.slot_enabled)
        combine(
            down.view(-1, down.shape[-1]),
            self.hidden,
            self.lora,
            self.work,
            self.plan,
            self.topk_weights,
            self.topk_ids,
            tokens_by_adapter=tokens,
            all_experts_local=self.all_experts_local,
            out=output,
        )


def begin(
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
    return PrefillStep(
        lora=lora,
        plan=plan,
        work=work,
        token_slots=slots,
        slot_enabled=context.adapter_enabled,
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


def fused_lora(context: MoELoRAContext, activation: Activation | None) -> ExpertLora | None:
    """The layer's adapters as the fused kernels take them; None, with one log line, where they cannot."""
    if context.fully_sharded or activation is None or activation.num_slices != len(context.w13_lora_a_stacked):
        return None
    try:
        return ExpertLora(
            activation=activation,
            gate_up_a=unshared(context.w13_lora_a_stacked),
            gate_up_b=context.w13_lora_b_stacked,
            down_a=context.w2_lora_a_stacked[0],
            down_b=unshared(context.w2_lora_b_stacked)[0],
            num_experts=context.local_num_experts,
        )
    except ValueError as error:
        tell_once(f"expert layers are not fused at prefill: {error}")
        return None


class SeamExperts(LoRAExpertsMixin):
    """Goes before one of vLLM's experts classes."""

    _fused: ExpertLora | None = None
    _step: Step | None = None

    def set_lora_context(self, ctx: MoELoRAContext) -> None:
        super().set_lora_context(ctx)
        self._fused = fused_lora(ctx, self.fused_activation())

    def fused_activation(self) -> Activation | None:
        """The layer's activation if the fused kernels have it."""
        config = self.quant_config
        if self.moe_config.activation == MoEActivation.SILU and config.gemm1_clamp_limit is None:
            return Activation.SWIGLU
        scales = (config.gemm1_alpha, config.gemm1_clamp_limit, config.gemm1_beta)
        if self.moe_config.activation == MoEActivation.SWIGLUOAI and scales in ((None, None, None), (1.702, 7.0, 1.0)):
            return Activation.GPT_OSS
        return None

    def apply_w13_lora(
        self,
        lora_context: MoELoRAContext,
        *,
        y: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        add_inputs: bool = True,
        **rest: Any,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        fused = self._fused if add_inputs and len(topk_ids) >= PREFILL_FROM_TOKENS else None
        self._step = fused and PlainStep(
            activation=fused.activation, topk_ids=local_ids(topk_ids, expert_map), num_experts=fused.num_experts
        )
        if lora_context.punica_wrapper.no_adapter_here(lora_context.local_token_lora_mapping):
            return NOTHING
        if fused is not None and choose_path(layer_shape(lora_context, fused, topk_ids)) == "prefill":
            try:
                self._step = begin(lora_context, fused, x, topk_ids, topk_weights, expert_map)
            except ValueError as error:
                tell_once(f"an expert layer is not fused at prefill: {error}")
            else:
                return NOTHING
        return super().apply_w13_lora(
            lora_context,
            y=y,
            x=x,
            topk_ids=topk_ids,
            topk_weights=topk_weights,
            expert_map=expert_map,
            add_inputs=add_inputs,
            **rest,
        )

    def activation(self, activation: MoEActivation, output: torch.Tensor, input: torch.Tensor, **scales: Any) -> None:
        if self._step is None:
            super().activation(activation, output, input, **scales)
        else:
            self._step.activate(output, input)

    def apply_w2_lora(self, lora_context: MoELoRAContext, **call: Any) -> None:
        if not isinstance(self._step, PrefillStep):
            super().apply_w2_lora(lora_context, **call)

    def moe_sum(self, input: torch.Tensor, output: torch.Tensor, *routing: Any) -> None:
        if not self.sum_fused(input, output):
            super().moe_sum(input, output, *routing)

    def sum_fused(self, down: torch.Tensor, output: torch.Tensor) -> bool:
        """Ends a step of ours with w2's expand, if it is there, and the sum; false, and nothing done, where the step is vLLM's."""
        step, self._step = self._step, None
        if step is not None:
            step.sum_choices(down, output)
        return step is not None


class TritonSeamExperts(SeamExperts, TritonExperts):
    """Unquantised and fp8 experts."""


class MarlinSeamExperts(SeamExperts, MarlinExperts):
    """Experts with Marlin's weights of 4 or 8 bits."""


WITH_SEAMS: dict[type, type] = {TritonExperts: TritonSeamExperts, MarlinExperts: MarlinSeamExperts}
