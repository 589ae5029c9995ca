"""The rank by which a slot is read, of adapters as vLLM holds them."""

import torch
from lora_kernels.vllm_plugin.adapter_facts import own_rank
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights


def layer(rank: int, *shapes: tuple[int, ...]) -> LoRALayerWeights:
    factors = [torch.zeros(shape) for shape in shapes]
    if len(factors) > 1:
        return PackedLoRALayerWeights("packed", rank, [rank] * len(factors), [*factors, None], [*factors, None])
    return LoRALayerWeights("plain", rank, rank, factors[0], factors[0], 1.0)


def model(*layers: LoRALayerWeights) -> LoRAModel:
    return LoRAModel(1, 8, {f"layer {number}": weights for number, weights in enumerate(layers)})


def test_it_is_the_largest_of_the_layers_own_and_never_more_than_the_slots() -> None:
    assert own_rank(model(layer(8, (8, 32))), 64) == 8
    assert own_rank(model(layer(8, (8, 32)), layer(8, (16, 32))), 64) == 16  # a rank of its own for some layers
    assert own_rank(model(layer(8, (8, 32), (24, 32))), 64) == 24
    assert own_rank(model(layer(8, (4, 8, 32))), 64) == 8  # a matrix for each expert
    assert own_rank(model(layer(8, (4 * 32, 32))), 64) == 64  # all experts in one matrix: not to be told
    assert own_rank(model(layer(16, (0,))), 64) == 16  # weights that are kept elsewhere
    assert own_rank(model(), 64) == 64
