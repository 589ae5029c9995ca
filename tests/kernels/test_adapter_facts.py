"""What a wrapper is told of the adapters in slots, of adapters as vLLM holds them."""

from types import SimpleNamespace

import pytest
import torch
from lora_kernels.vllm_plugin.adapter_facts import AdapterFacts, own_rank, tell_adapter_facts
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager


def layer(rank: int, *shapes: tuple[int, ...]) -> LoRALayerWeights:
    factors = [torch.zeros(shape) for shape in shapes]
    if len(factors) > 1:
        return PackedLoRALayerWeights("packed", rank, [rank] * len(factors), [*factors, None], [*factors, None])
    return LoRALayerWeights("plain", rank, rank, factors[0], factors[0], 1.0)


def model(*layers: LoRALayerWeights) -> LoRAModel:
    return LoRAModel(1, 8, {f"layer {number}": weights for number, weights in enumerate(layers)})


def test_an_adapters_own_rank_is_the_largest_of_its_layers_and_never_more_than_the_slots() -> None:
    assert own_rank(model(layer(8, (8, 32))), 64) == 8
    assert own_rank(model(layer(8, (8, 32)), layer(8, (16, 32))), 64) == 16  # a rank of its own for some layers
    assert own_rank(model(layer(8, (8, 32), (24, 32))), 64) == 24
    assert own_rank(model(layer(8, (4, 8, 32))), 64) == 8  # a matrix for each expert
    assert own_rank(model(layer(8, (4 * 32, 32))), 64) == 64  # all experts in one matrix: not to be told
    assert own_rank(model(layer(16, (0,))), 64) == 16  # weights that are kept elsewhere
    assert own_rank(model(), 64) == 64


def test_wrappers_are_told_of_the_adapters_in_slots_before_each_mapping_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, seen = SimpleNamespace(), []
    monkeypatch.setattr(LoRAModelManager, "_set_adapter_mapping", lambda self, mapping: seen.append((mapping, wrapper.adapter_facts)))
    head = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    with_head, without = model(layer(8, (8, 32))), model(layer(16, (16, 32)))
    with_head.loras["lm_head"] = layer(8, (8, 32))
    manager = SimpleNamespace(
        list_adapters=lambda: {7: with_head, 9: without, 11: without},
        lora_index_to_id=[9, None, -5, 7],
        lora_config=SimpleNamespace(max_lora_rank=32),
        modules={"lm_head": head, "layer 0": object()},
        punica_wrapper_mapping={"language": wrapper},
        _get_lora_layer_weights=lambda adapter, name: adapter.get_lora(name),
    )

    tell_adapter_facts()
    LoRAModelManager._set_adapter_mapping(manager, "the step's")

    facts = {9: AdapterFacts(rank=16, changes_head=False), 7: AdapterFacts(rank=8, changes_head=True)}
    assert seen == [("the step's", facts)]
