"""Runs every LoRA kernel that serving may choose once, so that none is compiled in a request."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.layers import FusedMoEWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from lora_kernels.moe_path import PREFILL_FROM_TOKENS
from lora_kernels.vllm_plugin.gpu_wrapper import GpuLoraWrapper
from lora_kernels.vllm_plugin.oai_experts import OaiLoraExperts

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


def warm_up(manager: "LoRAModelManager", *, most_tokens: int) -> float:
    """Seconds it took. Launches on scratch tensors with no adapter in any row: slots and answers are not touched."""
    started_s = time.monotonic()
    layers = {_kind(module): module for module in manager.modules.values()}
    for layer in layers.values():
        wrapper = getattr(layer, "punica_wrapper", None)
        if not isinstance(wrapper, GpuLoraWrapper):
            continue
        in_step = wrapper.num_adapters
        try:
            for num_tokens in _token_counts(most_tokens):
                for num_adapters in _adapter_counts(layer, num_tokens, wrapper.max_loras):
                    wrapper.num_adapters = num_adapters
                    _run(layer, wrapper, num_tokens)
        finally:
            wrapper.num_adapters = in_step
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return time.monotonic() - started_s


def _kind(module: Any) -> tuple[object, ...]:
    """Layers that are served by the same compiled kernels."""
    names = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
    if not isinstance(module, FusedMoEWithLoRA):
        names = ("lora_a_stacked", "lora_b_stacked")
    stacks = (vars(module).get(name, ()) for name in names)
    return type(module), *(tuple(stack.shape) for group in stacks for stack in ((group,) if isinstance(group, torch.Tensor) else group))


def _token_counts(most_tokens: int) -> list[int]:
    """Tiles and paths change at powers of two, or somewhere between two of them."""
    powers = list(_powers_of_two(most_tokens))
    return sorted({*powers, *(power + 1 for power in powers if power < most_tokens), most_tokens})


def _adapter_counts(layer: Any, num_tokens: int, most: int) -> list[int]:
    """Only an expert layer's plan at prefill depends on how many adapters a step has; without any it has kernels of its own."""
    if not isinstance(layer, FusedMoEWithLoRA):
        return [1]
    return [0, *(_powers_of_two(most) if num_tokens >= PREFILL_FROM_TOKENS else [1])]


def _powers_of_two(most: int) -> Iterator[int]:
    return (1 << step for step in range(most.bit_length()))


def _run(layer: Any, wrapper: GpuLoraWrapper, num_tokens: int) -> None:
    if isinstance(layer, FusedMoEWithLoRA):
        _run_experts(layer, num_tokens)
    elif isinstance(layer, BaseLinearLayerWithLoRA):
        a, b = list(layer.lora_a_stacked), list(layer.lora_b_stacked)
        new = {"dtype": a[0].dtype, "device": a[0].device}
        widths = [stack.shape[2] for stack in b]
        wrapper.dense(torch.zeros(num_tokens, sum(widths), **new), torch.zeros(num_tokens, a[0].shape[3], **new), a, b, widths)


def _run_experts(layer: FusedMoEWithLoRA, num_tokens: int) -> None:
    experts = layer._moe_kernel.fused_experts
    context = experts._lora_context
    if context.fully_sharded:
        return  # vLLM's own kernels serve
    a, b = context.w13_lora_a_stacked[0], context.w2_lora_b_stacked[0]
    new = {"dtype": a.dtype, "device": a.device}
    width = sum(stack.shape[2] for stack in context.w13_lora_b_stacked)
    ids = torch.arange(num_tokens * context.top_k, dtype=torch.int32, device=a.device).view(num_tokens, context.top_k)
    call = {
        "topk_weights": torch.zeros(ids.shape, dtype=torch.float32, device=a.device),
        "num_tokens": num_tokens,
        "top_k_num": context.top_k,
    }
    call |= {"w1": None, "w2": None}
    if isinstance(experts, OaiLoraExperts):
        experts._route(ids % context.local_num_experts, call["topk_weights"], context.local_num_experts)
    x, gate_up = torch.zeros(num_tokens, a.shape[3], **new), torch.zeros(ids.numel(), width, **new)
    sorted_ids, expert_ids, sizes, mapping = experts.apply_w13_lora(
        context, y=gate_up, x=x, topk_ids=ids % context.local_num_experts, expert_map=None, **call
    )
    hidden = torch.zeros(ids.numel(), context.w2_lora_a_stacked[0].shape[3], **new)
    experts.activation(experts.moe_config.activation, hidden, gate_up)
    down = torch.zeros(num_tokens, context.top_k, b.shape[2], **new)
    experts.apply_w2_lora(
        context,
        y=down,
        x=hidden,
        sorted_token_ids_lora=sorted_ids,
        expert_ids_lora=expert_ids,
        num_tokens_post_padded_lora=sizes,
        token_lora_mapping=mapping,
        **call,
    )
    if hasattr(experts, "sum_fused"):
        experts.sum_fused(down, torch.zeros_like(x))
