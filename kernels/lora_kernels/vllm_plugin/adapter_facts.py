"""Each adapter's own rank, so that a slot's rows beyond it are not read: a slot is allocated for the largest rank there may be."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


class TakesRanks(Protocol):
    rank_of_adapter: dict[int, int]


def tell_own_ranks() -> None:
    """From now on every manager of this process tells its wrappers, before a step, the rank of each adapter in a slot. Call it once."""
    from vllm.lora.model_manager import LoRAModelManager

    set_mapping = LoRAModelManager._set_adapter_mapping
    known: WeakKeyDictionary[LoRAModel, int] = WeakKeyDictionary()

    def tell_and_set_mapping(self: LoRAModelManager, mapping: Any) -> None:
        adapters, most = self.list_adapters(), self.lora_config.max_lora_rank
        ranks: dict[int, int] = {}
        for lora_id in self.lora_index_to_id:
            if lora_id in adapters:
                adapter = adapters[lora_id]
                if adapter not in known:
                    known[adapter] = own_rank(adapter, most)
                ranks[lora_id] = known[adapter]
        for wrapper in self.punica_wrapper_mapping.values():
            wrapper.rank_of_adapter = ranks
        set_mapping(self, mapping)

    LoRAModelManager._set_adapter_mapping = tell_and_set_mapping


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
