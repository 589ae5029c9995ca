"""vLLM's own LoRA kernels on our buffers, called as its punica wrapper calls them (release 0.26)."""

from collections.abc import Sequence
from typing import Any

import torch


def vllm_version() -> str | None:
    """None where vLLM or its kernels cannot be loaded."""
    try:
        import vllm
        import vllm._custom_ops
        from vllm.lora.ops.triton_ops import fused_moe_lora  # noqa: F401
    except (ImportError, OSError):
        return None
    return vllm.__version__


def metadata(token_slots: torch.Tensor, max_loras: int) -> Any:
    from vllm.lora.ops.triton_ops import LoRAKernelMeta

    meta = LoRAKernelMeta.make(max_loras, len(token_slots), token_slots.device)
    meta.prepare_tensors(token_slots)
    return meta


def forget_addresses() -> None:
    """vLLM keeps the strides of dense layers' weights by their addresses, where the next row's weights may lie: illegal accesses."""
    from vllm.lora.ops.triton_ops import utils

    utils._LORA_A_PTR_DICT.clear()
    utils._LORA_B_PTR_DICT.clear()


class VllmMoe:
    """One layer's w13 and w2; the sort of pairs is made once and used by both, as vLLM does."""

    def __init__(self, *, experts: int, hidden: int, intermediate: int, top_k: int, rank: int, slots: int) -> None:
        self.experts, self.top_k, self.rank, self.slots = experts, top_k, rank, slots
        self.w1_shape, self.w2_shape = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        self.enabled = torch.ones(slots + 1, dtype=torch.int32, device="cuda")

    def config(self, num_tokens: int, kind: str) -> dict[str, int]:
        from vllm.lora.layers.utils import try_get_optimal_moe_lora_config

        found = try_get_optimal_moe_lora_config(
            f"fused_moe_lora_{kind}", self.w1_shape, self.w2_shape, self.rank, self.top_k, "bfloat16", num_tokens
        )
        return {key: value for key, value in found.items() if value is not None}

    def align(self, meta: Any, topk_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        from vllm import _custom_ops as ops

        num_tokens = topk_ids.shape[0]
        if topk_ids.numel() * 8 <= self.experts * self.slots:
            return None, topk_ids.reshape(-1), None
        block = self.config(num_tokens, "w13_shrink").get("BLOCK_SIZE_M", 64)
        padded = topk_ids.numel() + self.experts * (block - 1)
        if topk_ids.numel() < self.experts:
            padded = topk_ids.numel() * block
        blocks = -(-padded // block)
        device = topk_ids.device
        order = torch.empty(self.slots * padded, dtype=torch.int32, device=device)
        experts = torch.full((self.slots * blocks,), -1, dtype=torch.int32, device=device)
        post_padded = torch.empty(self.slots, dtype=torch.int32, device=device)
        ops.moe_lora_align_block_size(
            topk_ids, meta.token_lora_mapping, self.experts, block, self.slots, padded, blocks, order, experts, post_padded,
            self.enabled, meta.active_lora_ids, None,
        )  # fmt: skip
        return order.view(self.slots, -1), experts.view(self.slots, -1), post_padded

    def add(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        topk_weights: torch.Tensor,
        aligned: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None],
        meta: Any,
        *,
        projection: str,
    ) -> None:
        from vllm.lora.ops.triton_ops import fused_moe_lora

        tiles: list[int] = []
        for kind in ("shrink", "expand"):
            config = self.config(topk_weights.shape[0], f"{projection}_{kind}")
            tiles += [config.get(key, default) for key, default in
                      (("BLOCK_SIZE_M", 64), ("BLOCK_SIZE_N", 64), ("BLOCK_SIZE_K", 32), ("GROUP_SIZE_M", 8), ("NUM_WARPS", 4),
                       ("NUM_STAGES", 3), ("SPLIT_K", 1))]  # fmt: skip
        order, experts, post_padded = aligned
        fused_moe_lora(
            out, x, list(a), list(b), topk_weights, order, experts, post_padded, meta.token_lora_mapping, self.rank, self.top_k,
            meta.active_lora_ids, meta.default_num_active_loras_cpu, self.enabled, *tiles, projection == "w2", False, 0, True,
        )  # fmt: skip


def vllm_dense_(out: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], meta: Any) -> None:
    from vllm.lora.ops.triton_ops import lora_expand, lora_shrink

    arguments = meta.meta_args(x.shape[0], False)
    buffer = torch.empty(len(a), x.shape[0], a[0].shape[-2], dtype=torch.float32, device=x.device)
    lora_shrink(x, list(a), buffer, *arguments, 1.0)
    lora_expand(buffer, list(b), out, *arguments, 0, True)
