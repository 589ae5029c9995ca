"""Tiles by shape: few of them, since each is a compilation, and such that every kernel can walk the list's tiles."""

from dataclasses import replace

import pytest
from lora_kernels.moe_prefill import PrefillPlan, plan_prefill

MODELS = {
    "gptoss-20b": {"top_k": 4, "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880},
    "qwen3-30b-a3b": {"top_k": 8, "num_experts": 128, "hidden_size": 2048, "intermediate_size": 768},
    "odd": {"top_k": 6, "num_experts": 60, "hidden_size": 360, "intermediate_size": 1408},
}


def compiled(plan: PrefillPlan) -> PrefillPlan:
    """What kernels are compiled for: not how far sums follow, nor how many chunks the ring holds."""
    return replace(plan, expand_sum=plan.expand_sum and replace(plan.expand_sum, lead=1, ring=2))


def plans(model: str, rank: int) -> list[PrefillPlan]:
    return [plan_prefill(num_tokens=tokens, num_adapters=8, rank=rank, **MODELS[model]) for tokens in range(1, 20001, 7)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [8, 32, 128])
def test_all_lengths_share_a_handful_of_plans(model: str, rank: int) -> None:
    assert len({compiled(plan) for plan in plans(model, rank)}) <= 10


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rank", [8, 32, 128])
def test_every_kernels_rows_divide_the_lists_tiles(model: str, rank: int) -> None:
    for plan in set(plans(model, rank)):
        assert plan.sum_experts is None or plan.activate.parts == 1
        assert all(
            plan.block_m % tiles.block_m == 0 for tiles in (plan.shrink, plan.activate, plan.add_down, plan.expand_sum or plan.add_down)
        )


@pytest.mark.parametrize("model", ["gptoss-20b", "qwen3-30b-a3b"])
def test_nothing_is_added_to_the_bases_rows_where_they_do_not_fit_the_cache(model: str) -> None:
    long = plan_prefill(num_tokens=6400, num_adapters=8, rank=32, **MODELS[model])
    short = plan_prefill(num_tokens=600, num_adapters=1, rank=32, **MODELS[model])
    assert (long.sum_experts is None, long.expand_sum is None) == ((False, True) if model == "gptoss-20b" else (True, False))
    assert short.sum_experts is None
    assert short.expand_sum is None


@pytest.mark.parametrize("model", MODELS)
def test_a_place_in_the_ring_is_taken_again_only_after_its_deltas_were_summed(model: str) -> None:
    assert all(plan.expand_sum.ring > plan.expand_sum.lead for plan in plans(model, 32) if plan.expand_sum)
