"""What vLLM's manager knows of the adapters in its slots and a wrapper is told before a step: the own rank of each, and whether it changes
the output head."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager


@dataclass(frozen=True)
class AdapterFacts:
    """rank: what of a slot's rank the adapter fills. changes_head: it has weights for the logits."""

    rank: int
    changes_head: bool


def tell_adapter_facts() -> None:
    """From now on every manager of this process tells its wrappers, before a step, of the adapters in slots. Call it once."""
    from vllm.lora.model_manager import LoRAModelManager

    set_mapping = LoRAModelManager._set_adapter_mapping
    known: WeakKeyDictionary[LoRAModel, AdapterFacts] = WeakKeyDictionary()

    def tell_and_set_mapping(self: LoRAModelManager, mapping: Any) -> None:
        adapters = self.list_adapters()
        facts: dict[int, AdapterFacts] = {}
        for lora_id in self.lora_index_to_id:
            if lora_id in adapters:
                adapter = adapters[lora_id]
                if adapter not in known:
                    known[adapter] = AdapterFacts(own_rank(adapter, self.lora_config.max_lora_rank), changes_head(self, adapter))
                facts[lora_id] = known[adapter]
        for wrapper in self.punica_wrapper_mapping.values():
            wrapper.adapter_facts = facts
        set_mapping(self, mapping)

    LoRAModelManager._set_adapter_mapping = tell_and_set_mapping


def changes_head(manager: "LoRAModelManager", adapter: "LoRAModel") -> bool:
    from vllm.lora.layers import LogitsProcessorWithLoRA

    heads = (name for name, module in manager.modules.items() if isinstance(module, LogitsProcessorWithLoRA))
    return any(manager._get_lora_layer_weights(adapter, name) is not None for name in heads)


def own_rank(adapter: "LoRAModel", most: int) -> int:
    """The largest rank of the adapter's layers; `most` where one is not to be told (experts of an adapter in one matrix)."""
    ranks: list[int] = []
    for weights in adapter.loras.values():
        ranks.append(weights.rank)
        ranks += [tensor.shape[-2] for tensor in _tensors(weights.lora_a) if tensor.dim() > 1]
    return min(max(ranks, default=most), most)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)
