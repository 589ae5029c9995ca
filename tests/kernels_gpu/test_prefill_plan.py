"""Tiles by shape: few of them, since each is a compilation, and such that every kernel can walk the list's tiles."""

import pytest
from lora_kernels.moe_prefill import PrefillPlan, plan_prefill

MODELS = {
    "gptoss-20b": {"top_k": 4, "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880},
    "qwen3-30b-a3b": {"top_k": 8, "num_experts": 128, "hidden_size": 2048, "intermediate_size": 768},
    "odd": {"top_k": 6, "num_experts": 60, "hidden_size": 360, "intermediate_size": 1408},
}


def plans(model: str, rank: int) -> list[PrefillPlan]:
    return [plan_prefill(num_tokens=tokens, num_adapters=8, rank=rank, **MODELS[model]) for tokens in range(1, 20001, 7)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [8, 32, 128])
def test_all_lengths_share_a_handful_of_plans(model: str, rank: int) -> None:
    assert len(set(plans(model, rank))) <= 10


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [8, 32, 128])
def test_every_kernels_rows_divide_the_lists_tiles(model: str, rank: int) -> None:
    for plan in set(plans(model, rank)):
        assert all(plan.block_m % tiles.block_m == 0 for tiles in (plan.shrink, plan.activate, plan.add_down))


def test_one_product_over_all_experts_is_for_models_of_few_experts() -> None:
    assert plan_prefill(num_tokens=12800, num_adapters=8, rank=32, **MODELS["gptoss-20b"]).dense
    assert not any(plan.dense for plan in plans("qwen3-30b-a3b", 32))
