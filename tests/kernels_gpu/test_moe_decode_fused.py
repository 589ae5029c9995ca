"""The fused decode launches against float64, and bit for bit themselves where no adapter is."""

from dataclasses import replace

import pytest
import torch
from lora_kernels.configs import Tiles
from lora_kernels.launch import Overlap, can_overlap
from lora_kernels.moe_decode import expand_activate, expand_sum
from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.moe_prefill.reference import activated, combined
from lora_kernels.moe_shrink import moe_shrink
from lora_kernels.testing import Batch, Layer, Weights, make_batch, make_weights, relative_error, same_bits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
ERROR_BOUND = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""Of ||out - ref|| / ||ref||, float64 throughout in the reference: roundings of the activated rows and of the output."""
OVERLAPS = [Overlap.NONE, Overlap.INPUTS_FRESH, Overlap.IDS_SETTLED] if can_overlap(DEVICE) else [Overlap.NONE]
TILES = Tiles(path="pairs", block=32)
SIZE = 72 * (8 if ON_GPU else 1)
GATED = Layer(slots=4, experts=5, top_k=3, k=88 * (8 if ON_GPU else 1), widths=(SIZE, SIZE), idle=(3,))
INTERLEAVED = replace(GATED, widths=(2 * SIZE,))
LAYERS = [pytest.param(GATED, Activation.SWIGLU, id="gated"), pytest.param(INTERLEAVED, Activation.GPT_OSS, id="gpt-oss")]


class Case:
    """A layer's two projections on one batch, down's base made finite where experts are here."""

    def __init__(self, layer: Layer, slots: list[int], dtype: torch.dtype = DTYPES[0], **options: object) -> None:
        self.layer = layer
        down = replace(layer, k=SIZE, widths=(layer.k,))
        self.up: Weights = make_weights(layer, dtype, DEVICE)
        self.down: Weights = make_weights(down, dtype, DEVICE, seed=2)
        self.batch: Batch = make_batch(layer, slots, dtype, DEVICE, **options)
        generator = torch.Generator().manual_seed(4)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        self.base = normal(len(slots), layer.top_k, 2 * SIZE)
        self.down_base = normal(len(slots), layer.top_k, layer.k)
        self.elsewhere = self.batch.topk_ids < 0
        for rows in (self.base, self.down_base):
            rows[self.elsewhere] = float("nan")

    def run(
        self, activation: Activation, *, overlap: Overlap = Overlap.NONE, enabled: torch.Tensor | None = None, tiles: Tiles | None = TILES
    ):
        routing = (self.batch.token_slots, self.batch.topk_ids)
        options = {"num_experts": self.layer.experts, "slot_enabled": enabled, "overlap": overlap}
        partials = moe_shrink(self.batch.x, self.up.a, *routing, slot_ranks=self.up.slot_ranks, **options)
        options |= {"tiles": tiles, "slot_ranks": self.up.slot_ranks}
        acts, down = expand_activate(self.base, partials, self.up.b, self.down.a[0], *routing, activation=activation, **options)
        out = expand_sum(self.down_base, down, self.down.b[0], *routing, self.batch.topk_weights, **options)
        return acts, out

    def check(self, acts: torch.Tensor, out: torch.Tensor, activation: Activation, enabled: torch.Tensor | None = None) -> None:
        if not len(acts):
            return

        def wide(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.cpu().double().nan_to_num(0.0)

        ids, slots = self.batch.topk_ids.cpu(), self.batch.token_slots.cpu()
        on = None if enabled is None else enabled.cpu()
        routing = (ids, slots)
        a, b = [wide(t) for t in self.up.a], [wide(t) for t in self.up.b]
        expected = activated(wide(self.base).flatten(0, 1), wide(self.batch.x), a, b, *routing, activation, on)
        here = ids.reshape(-1) >= 0
        bound = ERROR_BOUND[out.dtype]
        assert relative_error(acts.cpu()[here], expected[here]) < bound
        weights = self.batch.topk_weights.cpu().double()
        down_base = wide(self.down_base).flatten(0, 1)
        expected = combined(down_base, expected, wide(self.down.a[0]), wide(self.down.b[0]), weights, *routing, on)
        assert relative_error(out, expected) < bound


@pytest.fixture(autouse=True)
def fresh_memory_is_poisoned():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("layer", "activation"), LAYERS)
def test_every_row_is_activated_and_summed_with_its_adapters_delta(dtype: torch.dtype, layer: Layer, activation: Activation) -> None:
    case = Case(layer, [0, -1, 2, 1, 2, -1, 0], dtype)
    for overlap in OVERLAPS:
        case.check(*case.run(activation, overlap=overlap), activation)


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
@pytest.mark.parametrize("slots", [[], [1], [-1, -1]], ids=["T=0", "T=1", "base rows alone"])
def test_any_number_of_tokens_works(layer: Layer, activation: Activation, slots: list[int]) -> None:
    case = Case(layer, slots)
    case.check(*case.run(activation, tiles=None), activation)


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
def test_choices_of_experts_that_live_elsewhere_are_neither_read_nor_summed(layer: Layer, activation: Activation) -> None:
    case = Case(layer, [0, 1, 2, 1, -1], missing_experts=True)
    case.check(*case.run(activation), activation)


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
def test_rows_without_an_adapter_get_the_bits_of_a_batch_without_adapters(layer: Layer, activation: Activation) -> None:
    case, alone = Case(layer, [0, -1, 2, 1]), Case(layer, [0, -1, 2, 1])
    enabled = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    for stack in (*case.up.a, *case.up.b, *case.down.a, *case.down.b):
        stack[1] = float("nan")
    alone.batch.token_slots.fill_(-1)
    acts, out = case.run(activation, enabled=enabled)
    plain_acts, plain_out = alone.run(activation)
    rows = torch.tensor([1, 3], device=DEVICE)
    assert same_bits(out[rows], plain_out[rows])
    shape = (4, layer.top_k, SIZE)
    assert same_bits(acts.view(shape)[rows], plain_acts.view(shape)[rows])


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
@pytest.mark.parametrize("shared", ["a", "b"])
def test_factors_shared_by_all_experts_work(layer: Layer, activation: Activation, shared: str) -> None:
    case = Case(replace(layer, shared_a=shared == "a", shared_b=shared == "b"), [2, 0, 0])
    case.check(*case.run(activation), activation)


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
@pytest.mark.parametrize("rank", [1, 8, 24, 64])
def test_any_rank_works_and_nothing_beyond_a_slots_own_is_used(layer: Layer, activation: Activation, rank: int) -> None:
    case = Case(replace(layer, rank=rank), [0, 2, 0])
    case.check(*case.run(activation, tiles=None), activation)
    case = Case(replace(layer, rank=64, ranks=(rank, 3, 40, 64), idle=()), [0, 1, 2, 3, -1])
    case.check(*case.run(activation), activation)


@pytest.mark.parametrize(("layer", "activation"), LAYERS)
def test_two_runs_give_the_same_bits(layer: Layer, activation: Activation) -> None:
    case = Case(layer, [0, 2, 0, 1])
    first = case.run(activation)
    for overlap in OVERLAPS * (20 if ON_GPU else 1):
        again = case.run(activation, overlap=overlap)
        assert same_bits(again[0], first[0])
        assert same_bits(again[1], first[1])
