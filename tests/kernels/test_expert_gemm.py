"""The base model's expert products: against float64, and bit for bit under other rows' routing."""

import pytest
import torch
from lora_kernels.expert_gemm import expert_gemm, reference

EXPERTS, TOP_K, HIDDEN, OUT = 8, 2, 48, 40
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2}


@pytest.fixture(params=["batched", "per expert"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "per expert":
        monkeypatch.setattr(reference, "BATCHED_LIMIT_ELEMENTS", -1)
    return request.param


def routing(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("shared_x", [True, False], ids=["w13", "w2"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_row_is_its_experts_product(way: str, with_bias: bool, shared_x: bool, num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    topk_ids = routing(num_tokens, seed=3)
    x = torch.randn(num_tokens if shared_x else num_tokens * TOP_K, HIDDEN, generator=generator).to(dtype)
    weights = torch.randn(EXPERTS, OUT, HIDDEN, generator=generator).to(dtype)
    bias = torch.randn(EXPERTS, OUT, generator=generator).to(dtype) if with_bias else None

    out = expert_gemm(x, weights, topk_ids, bias)

    expected = torch.zeros(num_tokens * TOP_K, OUT, dtype=torch.float64)
    for row, expert in enumerate(topk_ids.flatten().tolist()):
        expected[row] = weights[expert].double() @ x[row // TOP_K if shared_x else row].double()
        if bias is not None:
            expected[row] += bias[expert].double()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [2, 8, 33])
@pytest.mark.parametrize("shared_x", [True, False], ids=["w13", "w2"])
def test_a_rows_bits_do_not_depend_on_other_rows_values_or_experts(way: str, shared_x: bool, num_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(EXPERTS, OUT, HIDDEN, generator=generator).to(dtype)
    x = torch.randn(num_tokens if shared_x else num_tokens * TOP_K, HIDDEN, generator=generator).to(dtype)
    topk_ids = routing(num_tokens, seed=1)
    kept_tokens = torch.arange(num_tokens) % 2 == 0
    kept_rows = kept_tokens.repeat_interleave(TOP_K)
    expected = expert_gemm(x, weights, topk_ids)[kept_rows]

    for seed in range(2, 12):
        others_x, others_ids = x.clone(), topk_ids.clone()
        others_x[~(kept_tokens if shared_x else kept_rows)] = float("nan")
        others_ids[~kept_tokens] = routing(num_tokens, seed=seed)[~kept_tokens]
        assert torch.equal(expert_gemm(others_x, weights, others_ids)[kept_rows], expected)
