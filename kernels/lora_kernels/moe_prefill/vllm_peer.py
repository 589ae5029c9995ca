"""vLLM 0.26's own way through the same work, on the same tensors: the peer of benchmarks and of the error test.

Its layer does: align, w13 shrink + expand into the base's rows, activation, w2 shrink + expand into the base's rows, sum.
"""

from dataclasses import dataclass

import torch

from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.moe_prefill.weights import ExpertLora


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What vLLM's kernels read instead of a work list."""

    sorted_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_pad: torch.Tensor


class VllmLayer:
    """Launches of one expert layer as vLLM's punica wrapper makes them, tile choices included.

    topk_ids: [num_tokens, top_k] int32. token_adapters: [num_tokens] int32. Needs vLLM and a GPU.
    """

    def __init__(self, lora: ExpertLora, topk_ids: torch.Tensor, token_adapters: torch.Tensor) -> None:
        from vllm.lora.layers.utils import try_get_optimal_moe_lora_config
        from vllm.lora.ops.triton_ops.utils import _normalize_lora_config_keys

        self._lora, self._topk_ids, self._token_adapters = lora, topk_ids, token_adapters
        experts, hidden, size = lora.num_experts, lora.hidden_size, lora.intermediate_size
        self._configs: dict[str, dict[str, int | None]] = {}
        for op in ("w13_shrink", "w13_expand", "w2_shrink", "w2_expand"):
            config = try_get_optimal_moe_lora_config(
                op_type=f"fused_moe_lora_{op}",
                w1_shape=(experts, 2 * size, hidden),
                w2_shape=(experts, hidden, size),
                rank=lora.rank,
                top_k=topk_ids.shape[1],
                dtype=None,
                M=topk_ids.shape[0],
            )
            self._configs[op] = _normalize_lora_config_keys(config)
        device = topk_ids.device
        self._enabled = torch.ones(lora.num_adapters + 1, dtype=torch.int32, device=device)
        self._lora_ids = torch.tensor([*range(lora.num_adapters), -1], dtype=torch.int32, device=device)
        self._num_active = torch.tensor([lora.num_adapters + 1], dtype=torch.int32)

    def align(self) -> Alignment:
        from vllm import _custom_ops as ops

        block = int(self._configs["w13_shrink"].get("BLOCK_SIZE_M") or 64)
        num_pairs, adapters, device = self._topk_ids.numel(), self._lora.num_adapters, self._topk_ids.device
        padded = num_pairs + self._lora.num_experts * (block - 1)
        if num_pairs < self._lora.num_experts:
            padded = num_pairs * block
        blocks = -(-padded // block)
        alignment = Alignment(
            sorted_ids=torch.empty(adapters * padded, dtype=torch.int32, device=device),
            expert_ids=torch.full((adapters * blocks,), -1, dtype=torch.int32, device=device),
            num_tokens_post_pad=torch.empty(adapters, dtype=torch.int32, device=device),
        )
        ops.moe_lora_align_block_size(
            self._topk_ids,
            self._token_adapters,
            self._lora.num_experts,
            block,
            adapters,
            padded,
            blocks,
            alignment.sorted_ids,
            alignment.expert_ids,
            alignment.num_tokens_post_pad,
            self._enabled,
            self._lora_ids,
            None,
        )
        return alignment

    def add_gate_up(self, gate_up: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, alignment: Alignment) -> None:
        """gate_up: [num_pairs, 2 I], changed in place."""
        self._add(gate_up, x, self._lora.gate_up_a, self._lora.gate_up_b, topk_weights, alignment, "w13", routed=False)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        if self._lora.activation is Activation.GPT_OSS:
            torch.ops._C.swigluoai_and_mul(out, gate_up, 1.702, 7.0)
        else:
            torch.ops._C.silu_and_mul(out, gate_up)
        return out

    def add_down(self, down: torch.Tensor, acts: torch.Tensor, topk_weights: torch.Tensor, alignment: Alignment) -> None:
        """down: [num_pairs, H], changed in place."""
        self._add(down, acts, [self._lora.down_a], [self._lora.down_b], topk_weights, alignment, "w2", routed=True)

    def sum_choices(self, down: torch.Tensor) -> torch.Tensor:
        from vllm import _custom_ops as ops

        out = down.new_empty((self._topk_ids.shape[0], down.shape[1]))
        ops.moe_sum(down.view(*self._topk_ids.shape, -1), out)
        return out

    def run(
        self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(activated, summed); gate_up and down are changed in place."""
        alignment = self.align()
        self.add_gate_up(gate_up, x, topk_weights, alignment)
        acts = self.activate(gate_up)
        self.add_down(down, acts, topk_weights, alignment)
        return acts, self.sum_choices(down)

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        topk_weights: torch.Tensor,
        alignment: Alignment,
        op: str,
        *,
        routed: bool,
    ) -> None:
        from vllm.lora.ops.triton_ops import fused_moe_lora

        keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "NUM_WARPS", "NUM_STAGES", "SPLIT_K")
        defaults = (64, 64, 32, 8, 4, 3, 1)
        configs = [self._configs[f"{op}_{half}"] for half in ("shrink", "expand")]
        tiles = [config.get(key) or default for config in configs for key, default in zip(keys, defaults, strict=True)]
        adapters = self._lora.num_adapters
        fused_moe_lora(
            y.view(*self._topk_ids.shape, -1),
            x,
            list(a),
            list(b),
            topk_weights,
            alignment.sorted_ids.view(adapters, -1),
            alignment.expert_ids.view(adapters, -1),
            alignment.num_tokens_post_pad,
            self._token_adapters,
            self._lora.rank,
            self._topk_ids.shape[1],
            self._lora_ids,
            self._num_active,
            self._enabled,
            *tiles,
            routed,
            False,
            0,
        )
