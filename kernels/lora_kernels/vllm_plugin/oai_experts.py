"""MXFP4 experts on matmul_ogs with LoRA: both products read and write rows in the order of (token, choice) pairs, so that no copy
stands between them and the seams. A step without adapters takes the same way, so that base rows keep their bits."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as oai
from vllm.model_executor.layers.fused_moe.utils import _resize_cache

from lora_kernels.vllm_plugin.expert_calls import NOTHING
from lora_kernels.vllm_plugin.expert_seams import SeamExperts
from lora_kernels.vllm_plugin.oai_routing import can_route, route


class OaiLoraExperts(SeamExperts, oai.UnfusedOAITritonExperts):
    """vLLM's weights, workspaces and limits; a schedule of our own."""

    def _route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_experts: int) -> tuple[Any, Any, Any, Any]:
        """(routing, pairs in the order of experts, their tokens, where results go)."""
        top_k = topk_ids.shape[1]
        if not oai.use_legacy_triton_kernels or not can_route(topk_ids.numel(), num_experts):
            routing, pairs, places = self._make_routing_data(topk_ids, topk_weights, num_experts)
            return routing, pairs, oai.GatherIndx(src_indx=pairs.src_indx // top_k, dst_indx=pairs.dst_indx), places
        from triton_kernels.routing import ExptData

        tables = route(topk_ids, topk_weights, num_experts)
        experts = ExptData(tables.pairs_of_expert, tables.first_place, tables.first_tile, tables.tiles)
        return (
            oai.RoutingData(tables.weight_of_place, tables.pairs_of_expert, num_experts, top_k, experts),
            oai.GatherIndx(src_indx=tables.pair_of_place, dst_indx=tables.place_of_pair),
            oai.GatherIndx(src_indx=tables.token_of_place, dst_indx=tables.place_of_pair),
            oai.ScatterIndx(src_indx=tables.place_of_pair, dst_indx=tables.pair_of_place),
        )

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
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        apply_router_weight_on_input: bool,
        **unused: Any,
    ) -> None:
        """output, hidden_states: [num_tokens, H] bfloat16. w1, w2: triton_kernels tensors [E, H, 2I] and [E, I, H]."""
        context, config = self._lora_context, self.quant_config
        num_tokens, top_k = topk_ids.shape
        num_pairs, width, hidden_size = num_tokens * top_k, w1.shape[2], hidden_states.shape[1]
        local = topk_ids if expert_map is None else oai.remap_topk_to_local(topk_ids, expert_map)
        routing, pairs, tokens, places = self._route(local, topk_weights, w1.shape[0])
        # One choice a row: rows of x are named by their token, and results go to their pair's row, unsummed.
        routing.n_expts_act = 1
        weights = routing.gate_scal
        layer = {"num_tokens": num_tokens, "top_k_num": top_k, "w1": w1, "w2": w2, "topk_weights": topk_weights}

        gate_up = _resize_cache(workspace2, (1, num_pairs, width))
        oai.matmul_ogs(
            hidden_states,
            w1,
            config.w1_bias,
            routing,
            gather_indx=tokens,
            scatter_indx=places,
            precision_config=config.w1_precision,
            gammas=weights if apply_router_weight_on_input else None,
            y=gate_up,
        )
        gate_up = gate_up.view(num_pairs, width)
        groups = NOTHING
        if context is not None:
            groups = self.apply_w13_lora(context, y=gate_up, x=hidden_states, topk_ids=topk_ids, expert_map=expert_map, **layer)
        hidden = _resize_cache(workspace13, (num_pairs, self.adjust_N_for_activation(width, activation)))
        self.activation(activation, hidden, gate_up)

        down = _resize_cache(workspace2, (1, num_pairs, hidden_size))
        oai.matmul_ogs(
            hidden,
            w2,
            config.w2_bias,
            routing,
            gather_indx=pairs,
            scatter_indx=places,
            precision_config=config.w2_precision,
            gammas=None if apply_router_weight_on_input else weights,
            y=down,
        )
        down = down.view(num_tokens, top_k, hidden_size)
        if context is not None:
            sorted_ids, expert_ids, sizes, mapping = groups
            self.apply_w2_lora(
                context,
                y=down,
                x=hidden,
                sorted_token_ids_lora=sorted_ids,
                expert_ids_lora=expert_ids,
                num_tokens_post_padded_lora=sizes,
                token_lora_mapping=mapping,
                **layer,
            )
        if not self.sum_fused(down, output):
            oai.masked_moe_sum(down, local, output)
