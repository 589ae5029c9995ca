"""What the equivalence program needs inside vLLM's worker processes: seeded weights, and adapters merged into the base's own weights."""

from typing import Any

import torch
import vllm_models
from lora_kernels.vllm_plugin import register
from lora_kernels.vllm_plugin.inspect import WorkerInspection

# In a worker process of its own vLLM imports this before it loads the model.
register()
vllm_models.seed_dummy_weights()


class MergingWorker(WorkerInspection):
    """Each rank merges what it holds: its slots have the factors of its shard of each weight."""

    @torch.no_grad()
    def merge_into_base(self, lora_int_id: int) -> None:
        """B A of every layer of the adapter's slot into the base's weights, in place: captured graphs read them there."""
        manager = self.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(lora_int_id)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        for module in manager.modules.values():
            for weight, a_stacks, b_stacks in _pairs(module):
                delta = torch.cat([b[slot].float() @ a[slot].float() for a, b in zip(a_stacks, b_stacks, strict=True)], dim=-2)
                self._before.append((weight, weight.clone()))
                weight.copy_((weight.float() + delta.view(weight.shape)).to(weight.dtype))

    @torch.no_grad()
    def take_out_of_base(self) -> None:
        for weight, before in self._before:
            weight.copy_(before)
        self._before.clear()


def _pairs(module: Any) -> list[tuple[torch.Tensor, Any, Any]]:
    """(weight, stacks of A, stacks of B) of a layer with slots."""
    if hasattr(module, "w13_lora_a_stacked"):
        weights = module.base_layer.routed_experts
        return [
            (weights.w13_weight, module.w13_lora_a_stacked, module.w13_lora_b_stacked),
            (weights.w2_weight, module.w2_lora_a_stacked, module.w2_lora_b_stacked),
        ]
    if isinstance(getattr(module, "lora_a_stacked", None), tuple):
        return [(module.base_layer.weight, module.lora_a_stacked, module.lora_b_stacked)]
    return []
