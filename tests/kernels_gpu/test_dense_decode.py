"""dense_shrink and dense_expand against float64, with NaN wherever nothing may be read or must be written."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lora_kernels.configs import Tiles
from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_expand.reference import dense_expand_reference
from lora_kernels.dense_shrink import dense_shrink, list_tokens
from lora_kernels.dense_shrink.reference import dense_shrink_reference
from lora_kernels.launch import Overlap, can_overlap
from lora_kernels.testing import ERROR_BOUND, Batch, Layer, Weights, make_batch, make_weights, relative_error, same_bits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
SCALE = 8 if ON_GPU else 1
OVERLAPS = [Overlap.NONE, Overlap.INPUTS_FRESH, Overlap.IDS_SETTLED] if can_overlap(DEVICE) else [Overlap.NONE]
PAIRS = (Tiles(path="pairs", block=32), Tiles(path="pairs", block=32))
SLOTS = (Tiles(path="slots", block=32, steps=2, stages=2), Tiles(path="slots", block=32))
ONE_STEP = (Tiles(path="slots", block=64), Tiles(path="slots", block=32))
LIST = (Tiles(path="list", block=32, steps=2, stages=2, rows=64), Tiles(path="list", block=16, steps=2, stages=2, rows=64))
LIST_ONE_STEP = (Tiles(path="list", block=64), Tiles(path="list", block=32))
PATHS = [
    pytest.param(PAIRS, id="pairs"),
    pytest.param(SLOTS, id="slots"),
    pytest.param(ONE_STEP, id="slots, one step"),
    pytest.param(LIST, id="list"),
    pytest.param(LIST_ONE_STEP, id="list, one step"),
]
QKV = Layer(slots=4, k=104 * SCALE, widths=(96 * SCALE, 24 * SCALE, 24 * SCALE), idle=(3,))


@pytest.fixture(autouse=True)
def fresh_memory_is_poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(batch: Batch, weights: Weights, tiles: tuple[Tiles | None, Tiles | None], overlap: Overlap = Overlap.NONE) -> torch.Tensor:
    out, listed = batch.base.flatten(0, 1).clone(), None
    if tiles[0] is None or tiles[0].path == "list":
        listed = list_tokens(batch.token_slots, num_slots=len(weights.a[0]))
    options = {"slot_ranks": weights.slot_ranks, "token_list": listed, "overlap": overlap}
    partials = dense_shrink(batch.x, weights.a, batch.token_slots, tiles=tiles[0], **options)
    dense_expand_(out, partials, weights.b, batch.token_slots, tiles=tiles[1], **options)
    return out


def check(out: torch.Tensor, batch: Batch, weights: Weights) -> None:
    slots, ranks = batch.token_slots.cpu(), None if weights.slot_ranks is None else weights.slot_ranks.cpu()
    h = dense_shrink_reference(batch.x.cpu(), [a.cpu() for a in weights.a], slots, slot_ranks=ranks, accumulate=torch.float64)
    delta = dense_expand_reference(h, [b.cpu() for b in weights.b], slots, slot_ranks=ranks)
    base, unused = batch.base.flatten(0, 1).cpu(), batch.unused.cpu()
    assert same_bits(out.cpu()[unused], base[unused])
    if not bool(unused.all()):
        assert relative_error(out.cpu()[~unused], base[~unused].double() + delta[~unused]) < ERROR_BOUND[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize("widths", [(96, 24, 24), (56, 56), (80,)], ids=["qkv", "gate and up", "one slice"])
def test_tokens_get_their_adapters_delta_in_each_slice_and_base_rows_keep_their_bits(
    dtype: torch.dtype, tiles: tuple[Tiles, Tiles], widths: tuple[int, ...]
) -> None:
    layer = replace(QKV, widths=tuple(width * SCALE for width in widths))
    weights = make_weights(layer, dtype, DEVICE)
    batch = make_batch(layer, [0, -1, 2, 1, 2, -1, 0], dtype, DEVICE)
    for overlap in OVERLAPS:
        check(run(batch, weights, tiles, overlap), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize("tokens", [0, 1, 17, 70] + ([512, 8192] if ON_GPU else []))
def test_any_number_of_tokens_works(tiles: tuple[Tiles, Tiles], tokens: int) -> None:
    layer = replace(QKV, k=40, widths=(24, 10, 10))
    weights = make_weights(layer, DTYPES[0], DEVICE)
    batch = make_batch(layer, [(i * 7) % 4 - 1 for i in range(tokens)], DTYPES[0], DEVICE)
    check(run(batch, weights, tiles), batch, weights)


@pytest.mark.parametrize("tokens", [20000])
@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
def test_a_long_prefill_with_default_tiles_works(tokens: int) -> None:
    weights = make_weights(QKV, DTYPES[0], DEVICE)
    batch = make_batch(QKV, [(i // 5000) - 1 for i in range(tokens)], DTYPES[0], DEVICE)
    check(run(batch, weights, (None, None)), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize("slots", [[-1, -1, -1], [2, -1, 0, 1], [1, 1, 1]], ids=["base only", "full set", "one adapter"])
def test_any_mixture_of_adapters_works(tiles: tuple[Tiles, Tiles], slots: list[int]) -> None:
    layer = replace(QKV, slots=3, idle=())
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, slots, DTYPES[0], DEVICE)
    check(run(batch, weights, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize("rank", [1, 8, 24, 64] + ([16, 128, 256] if ON_GPU else []))
def test_any_rank_of_the_stacks_works(tiles: tuple[Tiles, Tiles], rank: int) -> None:
    layer = replace(QKV, rank=rank)
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, 2, 0], DTYPES[0], DEVICE)
    check(run(batch, weights, tiles), batch, weights)
    check(run(batch, weights, (None, None)), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
def test_nothing_beyond_a_slots_own_rank_is_used(tiles: tuple[Tiles, Tiles]) -> None:
    layer = replace(QKV, rank=64, ranks=(8, 3, 64, 40), idle=())
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, 1, 2, 3, -1], DTYPES[0], DEVICE)
    check(run(batch, weights, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
def test_slots_out_of_range_count_as_no_adapter(tiles: tuple[Tiles, Tiles]) -> None:
    weights, batch = make_weights(QKV, DTYPES[0], DEVICE), make_batch(QKV, [-1, -1], DTYPES[0], DEVICE)
    wild = replace(batch, token_slots=torch.tensor([4, 2**30], dtype=torch.int32, device=DEVICE))
    assert same_bits(run(wild, weights, tiles), batch.base.flatten(0, 1))


@pytest.mark.parametrize("tiles", PATHS)
def test_two_runs_give_the_same_bits(tiles: tuple[Tiles, Tiles]) -> None:
    weights, batch = make_weights(QKV, DTYPES[0], DEVICE), make_batch(QKV, [0, 2, 0, 1], DTYPES[0], DEVICE)
    first = run(batch, weights, tiles)
    for overlap in OVERLAPS * (20 if ON_GPU else 1):
        assert same_bits(run(batch, weights, tiles, overlap), first)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("tiles", PATHS)
def test_a_replayed_graph_follows_new_ids(tiles: tuple[Tiles, Tiles]) -> None:
    torch.use_deterministic_algorithms(False)
    layer = replace(QKV, idle=())
    weights, first = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, 1, 2, 3, 0], DTYPES[0], DEVICE)
    run(first, weights, tiles)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(first, weights, tiles, OVERLAPS[-1])
    for seed, slots in enumerate(([3, 3, 3, 3, 3], [-1, 2, -1, 0, 1], [-1, -1, -1, -1, -1]), start=5):
        batch = make_batch(layer, slots, DTYPES[0], DEVICE, seed=seed)
        for name in ("x", "base", "token_slots"):
            getattr(first, name).copy_(getattr(batch, name))
        graph.replay()
        check(out, batch, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(3, 9)}, "out: expected width 44, given width 9"),
        ({"out": torch.zeros(3, 44, dtype=torch.float16)}, r"lora_b\[0\]: expected torch.float16, given torch.float32"),
        ({"partials": torch.zeros(1, 2, 3, 16)}, r"partials: expected shape \[\*, 3, 3, 16\], given shape \[1, 2, 3, 16\]"),
        ({"token_slots": torch.zeros(3, 1, dtype=torch.int32)}, r"token_slots: expected shape \[3\], given shape \[3, 1\]"),
        ({"lora_b": []}, "lora_b: expected 1 to 3 stacks, given 0 stacks"),
        ({"slot_ranks": torch.zeros(2, dtype=torch.int32)}, "slot_ranks: expected 4 or more slots, given 2"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(change: dict, message: str) -> None:
    layer = replace(QKV, k=40, widths=(24, 10, 10))
    weights, batch = make_weights(layer, torch.float32, DEVICE), make_batch(layer, [0, 1, 2], torch.float32, DEVICE)
    arguments = {"out": batch.base.flatten(0, 1), "partials": torch.zeros(1, 3, 3, 16, device=DEVICE), "lora_b": weights.b}
    arguments |= {"token_slots": batch.token_slots}
    arguments |= {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        dense_expand_(**arguments)
