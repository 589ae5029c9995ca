"""The grouped LoRA reference against float64, row by row."""

from dataclasses import dataclass

import pytest
import torch
from lora_kernels.grouped_lora import add_lora_, expand_, group_routed_rows, group_rows, reference, shrink

SLOTS, EXPERTS, TOP_K, RANK, HIDDEN, OUT = 3, 6, 2, 4, 16, 10
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Weights:
    a: torch.Tensor
    b: torch.Tensor


def weights(num_experts: int, dtype: torch.dtype, *, seed: int = 0, poisoned_slot: int | None = None) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(SLOTS, num_experts, RANK, HIDDEN, generator=generator).to(dtype)
    b = torch.randn(SLOTS, num_experts, OUT, RANK, generator=generator).to(dtype)
    if poisoned_slot is not None:
        a[poisoned_slot] = float("nan")
        b[poisoned_slot] = float("inf")
    return Weights(a, b)


def slots_of(num_tokens: int, adapters: str) -> torch.Tensor:
    """`none`: base rows only, `all`: no base row, `mixed`: both; slot 1 is always idle."""
    choices = {"none": [-1], "all": [0, 2], "mixed": [-1, 2, 0, -1, 2]}[adapters]
    return torch.tensor([choices[i % len(choices)] for i in range(num_tokens)], dtype=torch.long)


def routing(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]


@pytest.fixture(params=["batched", "per cell"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "per cell":
        monkeypatch.setattr(reference, "GATHER_LIMIT_ELEMENTS", 0)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", ["none", "all", "mixed"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_dense_rows_get_their_adapters_update_and_base_rows_keep_their_bits(
    way: str, num_tokens: int, adapters: str, dtype: torch.dtype
) -> None:
    first, second = weights(1, dtype, poisoned_slot=1), weights(1, dtype, seed=1, poisoned_slot=1)
    slots = slots_of(num_tokens, adapters)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    before = torch.randn(num_tokens, 2 * OUT + 3, generator=generator).to(dtype)
    y = before.clone()

    add_lora_(y, x, (first.a, second.a), (first.b, second.b), group_rows(slots), scale=0.5)

    expected = before.double()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(y[row], before[row])
            continue
        for i, weight in enumerate((first, second)):
            delta = weight.b[slot, 0].double() @ (weight.a[slot, 0].double() @ x[row].double()) * 0.5
            expected[row, i * OUT : (i + 1) * OUT] += delta
    assert_close(y, expected, dtype)
    assert torch.equal(y[:, 2 * OUT :], before[:, 2 * OUT :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", ["none", "all", "mixed"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("shared_x", [True, False], ids=["w13", "w2"])
def test_routed_rows_get_their_adapters_and_experts_update_and_base_rows_keep_their_bits(
    way: str, shared_x: bool, num_tokens: int, adapters: str, dtype: torch.dtype
) -> None:
    weight = weights(EXPERTS, dtype, poisoned_slot=1)
    slots, topk_ids = slots_of(num_tokens, adapters), routing(num_tokens)
    generator = torch.Generator().manual_seed(2)
    num_rows = num_tokens * TOP_K
    x = torch.randn(num_tokens if shared_x else num_rows, HIDDEN, generator=generator).to(dtype)
    row_weights = torch.rand(num_rows, generator=generator)
    before = torch.randn(num_rows, OUT, generator=generator).to(dtype)
    y = before.clone()
    enabled = torch.tensor([1, 1, 1, 0], dtype=torch.int)

    groups = group_routed_rows(slots, topk_ids, enabled, num_experts=EXPERTS)
    add_lora_(y, x, (weight.a,), (weight.b,), groups, row_weights=row_weights)

    expected = before.double()
    for row, expert in enumerate(topk_ids.flatten().tolist()):
        slot = int(slots[row // TOP_K])
        if slot < 0:
            assert torch.equal(y[row], before[row])
            continue
        inputs = x[row // TOP_K if shared_x else row].double()
        delta = weight.b[slot, expert].double() @ (weight.a[slot, expert].double() @ inputs)
        expected[row] += delta * row_weights[row].double()
    assert_close(y, expected, dtype)


def test_an_adapter_that_leaves_a_layer_alone_changes_nothing_there() -> None:
    weight = weights(EXPERTS, torch.float32, poisoned_slot=2)
    slots, topk_ids = slots_of(5, "mixed"), routing(5)
    enabled = torch.tensor([1, 0, 0, 0], dtype=torch.int)
    y = torch.zeros(5 * TOP_K, OUT)

    groups = group_routed_rows(slots, topk_ids, enabled, num_experts=EXPERTS)
    add_lora_(y, torch.ones(5, HIDDEN), (weight.a,), (weight.b,), groups)

    changed = y.view(5, -1).abs().sum(dim=1) > 0
    assert changed.tolist() == (slots == 0).tolist()
    assert torch.isfinite(y).all()


def test_a_factor_shared_by_all_experts_may_be_a_broadcast_view() -> None:
    weight = weights(EXPERTS, torch.float32)
    shared = weight.a[:, :1].expand(-1, EXPERTS, -1, -1)
    slots, topk_ids = slots_of(7, "mixed"), routing(7)
    groups = group_routed_rows(slots, topk_ids, torch.ones(4, dtype=torch.int), num_experts=EXPERTS)
    x = torch.randn(7, HIDDEN)
    viewed, copied = torch.zeros(7 * TOP_K, OUT), torch.zeros(7 * TOP_K, OUT)

    add_lora_(viewed, x, (shared,), (weight.b,), groups)
    add_lora_(copied, x, (shared.contiguous(),), (weight.b,), groups)

    assert torch.equal(viewed, copied)


def test_shrink_then_expand_is_the_whole_update(way: str) -> None:
    weight = weights(1, torch.float32, poisoned_slot=1)
    groups = group_rows(slots_of(7, "mixed"))
    x = torch.randn(7, HIDDEN)
    whole, parts = torch.zeros(7, OUT), torch.zeros(7, OUT)

    add_lora_(whole, x, (weight.a,), (weight.b,), groups)
    shrunk = torch.full((7, RANK), float("nan"))
    shrunk[groups.rows] = shrink(x, weight.a, groups)
    expand_(parts, shrunk, weight.b, groups)

    assert torch.equal(whole, parts)


def test_expand_can_replace_what_the_rows_held() -> None:
    weight = weights(1, torch.float32)
    groups = group_rows(torch.tensor([0, -1]))
    y = torch.full((2, OUT), float("nan"))

    expand_(y, torch.ones(2, RANK), weight.b, groups, add_inputs=False)

    assert torch.allclose(y[0], weight.b[0, 0].sum(dim=1))
    assert y[1].isnan().all()


def test_grouped_rows_are_sorted_by_cell() -> None:
    groups = group_rows(torch.tensor([2, -1, 0, 2, 0]))

    assert groups.rows.tolist() == [2, 4, 0, 3]
    assert groups.cells.tolist() == [0, 0, 2, 2]
    assert groups.sizes.tolist() == [2, 2]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
