"""The routing tables that matmul_ogs reads, made in one launch, against plain torch."""

import pytest
import torch
from lora_kernels.vllm_plugin.oai_routing import MOST_PAIRS, can_route, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 4, 32), (7, 4, 32), (32, 4, 32), (64, 8, 128), (5, 1, 40), (256, 4, 32), (9, 2, 2)]
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["all here", "some elsewhere"])
def test_places_counts_and_tiles_are_those_of_a_stable_sort(num_tokens: int, top_k: int, num_experts: int, elsewhere: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices.int()
    if elsewhere:
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    weights = torch.rand(num_tokens, top_k, generator=generator)

    tables = route(ids.to(DEVICE), weights.to(DEVICE), num_experts)

    flat = ids.flatten().long()
    order = torch.argsort(torch.where(flat < 0, num_experts, flat), stable=True)
    num_placed = int((flat >= 0).sum())
    order, unplaced = order[:num_placed], num_tokens * top_k - num_placed
    assert tables.pair_of_place.tolist() == order.tolist() + [-1] * unplaced
    assert tables.token_of_place.tolist() == (order // top_k).tolist() + [-1] * unplaced
    places = torch.full((num_tokens * top_k,), -1)
    places[order] = torch.arange(num_placed)
    assert tables.place_of_pair.tolist() == places.tolist()
    # The interpreter cuts bfloat16 off instead of rounding it.
    torch.testing.assert_close(tables.weight_of_place[:num_placed].cpu().float(), weights.flatten()[order], rtol=2**-7, atol=0)
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts)
    assert tables.pairs_of_expert.tolist() == counts.tolist()
    assert tables.first_place.tolist() == [0, *counts.cumsum(0).tolist()]
    for block, tiles in tables.tiles.items():
        expected = [(tile << 16) + expert for expert, count in enumerate(counts.tolist()) for tile in range(-(-count // block))]
        assert tiles.tolist() == expected + [-1] * (len(tiles) - len(expected))
        assert tables.first_tile[block].tolist() == [0, *((counts + block - 1) // block).cumsum(0).tolist()]


def test_larger_batches_are_left_to_vllms_own_launches() -> None:
    assert can_route(MOST_PAIRS, 32)
    assert not can_route(MOST_PAIRS + 1, 32)
    assert not can_route(16, 512)
