"""Which way an expert layer's batch takes."""

from dataclasses import replace

import pytest
from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_path import PREFILL_FROM_TOKENS, choose_path

SHAPE = LayerShape(
    dtype="bfloat16",
    rank=32,
    hidden_size=2880,
    intermediate_size=2880,
    slices=1,
    num_experts=32,
    top_k=4,
    num_adapters=8,
    num_tokens=PREFILL_FROM_TOKENS,
)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({}, "prefill"),
        ({"num_tokens": 20000}, "prefill"),
        ({"num_tokens": PREFILL_FROM_TOKENS - 1}, "decode"),
        ({"num_tokens": 0}, "decode"),
        ({"rank": 128}, "prefill"),
        ({"rank": 256}, "decode"),
    ],
    ids=str,
)
def test_long_batches_of_ranks_that_the_fused_kernels_hold_take_their_way(change: dict[str, int], path: str) -> None:
    assert choose_path(replace(SHAPE, **change)) == path
