"""vLLM's experts interface on a CPU: base products by `expert_gemm`, adapters through the punica wrapper."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation_supported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from lora_kernels.expert_gemm import expert_gemm


class CpuLoraExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """Unquantised experts in torch. The same class with and without adapters: the base is computed first, for all rows
    alike, and adapters are added after."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        """:raises NotImplementedError: experts are split over ranks (expert parallelism)."""
        if moe_config.moe_parallel_config.use_ep:
            raise NotImplementedError("expert parallelism with LoRA on a CPU")
        super().__init__(moe_config, quant_config)

    def set_lora_context(self, ctx: MoELoRAContext) -> None:
        """:raises NotImplementedError: fully_sharded_loras is on."""
        if ctx.fully_sharded:
            raise NotImplementedError("fully_sharded_loras with experts on a CPU")
        super().set_lora_context(ctx)

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: object | None, activation_key: object | None) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return apply_moe_activation_supported(activation)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_ep

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **unused: Any,
    ) -> None:
        """output, hidden_states: [num_tokens, H]. w1: [E, 2I, H] (or [E, I, H] ungated). w2: [E, H, I]."""
        assert expert_map is None, "expert parallelism was refused at start"
        num_tokens, top_k = topk_ids.shape
        lora = self._lora_context
        routing = {"num_tokens": num_tokens, "top_k_num": top_k, "w1": w1, "w2": w2}

        gate_up = expert_gemm(hidden_states, w1, topk_ids, self.w1_bias)
        groups = (None, None, None, None)
        if lora is not None:
            groups = self.apply_w13_lora(
                lora,
                y=gate_up.view(num_tokens, top_k, -1),
                x=hidden_states,
                topk_ids=topk_ids,
                topk_weights=topk_weights,
                expert_map=None,
                **routing,
            )
        hidden = gate_up.new_empty((num_tokens * top_k, self.adjust_N_for_activation(w1.shape[1], activation)))
        self.activation(activation, hidden, gate_up)

        down = expert_gemm(hidden, w2, topk_ids, self.w2_bias)
        # Where the router's weights are on the input already, neither the base rows nor the adapters' get them again.
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        down *= weights.reshape(-1, 1).to(down.dtype)
        if lora is not None:
            sorted_rows, cells, sizes, mapping = groups
            self.apply_w2_lora(
                lora,
                y=down.view(num_tokens, top_k, -1),
                x=hidden,
                topk_weights=weights,
                sorted_token_ids_lora=sorted_rows,
                expert_ids_lora=cells,
                num_tokens_post_padded_lora=sizes,
                token_lora_mapping=mapping,
                **routing,
            )
        torch.sum(down.view(num_tokens, top_k, -1), dim=1, out=output)
