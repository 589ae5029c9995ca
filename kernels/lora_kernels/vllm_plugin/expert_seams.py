"""LoRA inside an expert layer's seams: vLLM's experts classes call activation and sum as methods, and there the
fused kernels of `moe_prefill` take their place, or for a few tokens those of `moe_decode`.

w13's shrink where vLLM would add w13's update; its expand, the activation and w2's shrink where it would activate; w2's expand and
the sum over choices where it would sum. Batches between, and whatever does not fit, get their updates through the punica wrapper. They
and steps without adapters have the same activation and sum as the fused ones: a base row's bits do not depend on its neighbours.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from lora_kernels.moe_path import choose_path
from lora_kernels.moe_prefill import Activation, ExpertLora
from lora_kernels.vllm_plugin.expert_calls import NOTHING, Passed
from lora_kernels.vllm_plugin.fused_steps import BeginStep, PlainStep, Step, begin_decode, begin_prefill, layer_shape
from lora_kernels.vllm_plugin.gpu_wrapper import local_ids, tell_once, unshared

DECODE_UP_TO_TOKENS = 8
"""Measured on an H200, activation and sum counted: 6.9 us a layer against 10.6 at 1 token of GPT-OSS, 15.4 against 18.6 at 8; for Qwen3-MoE
9.2 against 10.5, and 15.6 against 18.0, but 29.6 against 26.8 at 16."""


def fused_lora(context: MoELoRAContext, activation: Activation | None) -> ExpertLora | None:
    """The layer's adapters as the fused kernels take them; None, with one log line, where they cannot."""
    if context.fully_sharded:
        return None  # vLLM's own kernels serve, and that is told
    if activation is None:
        tell_once("expert layers are not fused: an activation of another kind")
        return None
    try:
        return ExpertLora(
            activation=activation,
            gate_up_a=unshared(context.w13_lora_a_stacked),
            gate_up_b=context.w13_lora_b_stacked,
            down_a=context.w2_lora_a_stacked[0],
            down_b=unshared(context.w2_lora_b_stacked)[0],
            num_experts=context.local_num_experts,
            slot_ranks=context.punica_wrapper.slot_ranks,
        )
    except ValueError as error:
        tell_once(f"expert layers are not fused: {error}")
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
    ) -> Passed:
        fused = self._fused if add_inputs else None
        self._step = fused and PlainStep(
            activation=fused.activation, topk_ids=local_ids(topk_ids, expert_map), num_experts=fused.num_experts
        )
        if lora_context.punica_wrapper.no_adapter_here(lora_context.local_token_lora_mapping):
            return NOTHING
        begin = self._way(lora_context, topk_ids) if fused else None
        if fused is not None and begin is not None:
            try:
                self._step = begin(lora_context, fused, x, topk_ids, topk_weights, expert_map)
            except ValueError as error:
                tell_once(f"an expert layer is not fused: {error}")
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

    def _way(self, context: MoELoRAContext, topk_ids: torch.Tensor) -> BeginStep | None:
        assert self._fused is not None
        if len(topk_ids) <= DECODE_UP_TO_TOKENS:
            return begin_decode
        return begin_prefill if choose_path(layer_shape(context, self._fused, topk_ids)) == "prefill" else None

    def activation(self, activation: MoEActivation, output: torch.Tensor, input: torch.Tensor, **scales: Any) -> None:
        if self._step is None:
            super().activation(activation, output, input, **scales)
        else:
            self._step.activate(output, input)

    def apply_w2_lora(self, lora_context: MoELoRAContext, **call: Any) -> None:
        if self._step is None or isinstance(self._step, PlainStep):
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
