"""Dense layers of long batches: the token list, and both ops over it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lora_kernels.configs import Tiles
from lora_kernels.dense_expand import dense_expand_
from lora_kernels.dense_expand.reference import dense_expand_reference
from lora_kernels.dense_lora import TokenList, dense_lora_, list_tokens, needs_token_list
from lora_kernels.dense_shrink import dense_shrink
from lora_kernels.dense_shrink.reference import dense_shrink_reference
from lora_kernels.testing import ERROR_BOUND, Batch, Layer, Weights, make_batch, make_weights, relative_error, same_bits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LAYER = Layer(slots=4, k=104, widths=(96, 24, 24), idle=(3,))
SMALL = (Tiles(path="list", block=32, steps=2, stages=2), Tiles(path="list", block=16, steps=2, stages=2))


@pytest.fixture(autouse=True)
def fresh_memory_is_poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(batch: Batch, weights: Weights, token_list: TokenList, tiles: tuple[Tiles, Tiles] = SMALL) -> torch.Tensor:
    out = batch.base.flatten(0, 1).clone()
    options = {"slot_ranks": weights.slot_ranks, "token_list": token_list}
    partials = dense_shrink(batch.x, weights.a, batch.token_slots, tiles=tiles[0], **options)
    dense_expand_(out, partials, weights.b, batch.token_slots, tiles=tiles[1], **options)
    return out


def expected(batch: Batch, weights: Weights) -> torch.Tensor:
    slots, ranks = batch.token_slots.cpu(), None if weights.slot_ranks is None else weights.slot_ranks.cpu()
    h = dense_shrink_reference(batch.x.cpu(), [a.cpu() for a in weights.a], slots, slot_ranks=ranks, accumulate=torch.float64)
    return batch.base.flatten(0, 1).cpu().double() + dense_expand_reference(h, [b.cpu() for b in weights.b], slots, slot_ranks=ranks)


def check(out: torch.Tensor, batch: Batch, weights: Weights) -> None:
    used, base = ~batch.unused.cpu(), batch.base.flatten(0, 1).cpu()
    assert same_bits(out.cpu()[~used], base[~used])
    assert relative_error(out.cpu()[used], expected(batch, weights)[used]) < ERROR_BOUND[out.dtype]


def from_tables(slots: list[int], groups: list[int], *, real: int, length: int) -> TokenList:
    """As an engine's tables hold it: the base's tokens are a group too, rows past the real ones are in none, unused groups follow."""
    order = [token for group in groups for token in range(real) if slots[token] == group]
    counts = [sum(slots[token] == group for token in range(real)) for group in groups]
    starts = [sum(counts[:place]) for place in range(len(groups))]
    rest = length - len(groups)
    tables = {
        "order": order + [0] * (len(slots) - real),
        "slots": groups + [-1] * rest,
        "starts": starts + [0] * (rest + 1),
        "counts": counts + [0] * rest,
    }
    return TokenList(**{name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in tables.items()})


def test_a_list_holds_each_slots_tokens_in_order_and_leaves_out_those_without_an_adapter() -> None:
    slots = [2, -1, 0, 2, 7, 0, 2**30, -5]
    made = list_tokens(torch.tensor(slots, dtype=torch.int32, device=DEVICE), num_slots=4)
    held = {
        int(slot): made.order[int(start) : int(start) + int(count)].tolist()
        for slot, start, count in zip(made.slots, made.starts, made.counts, strict=True)
    }
    assert held == {0: [2, 5], 1: [], 2: [0, 3], 3: []}


def test_a_list_of_no_tokens_is_empty() -> None:
    assert list_tokens(torch.empty(0, dtype=torch.int64, device=DEVICE), num_slots=2).counts.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16], ids=str)
def test_an_engines_tables_serve_as_a_list_and_rows_that_fill_up_a_graph_keep_their_bits(dtype: torch.dtype) -> None:
    real = [2, -1, 0, 2, 1, -1, 2]
    weights, batch = make_weights(LAYER, dtype, DEVICE), make_batch(LAYER, [*real, -1, -1, -1], dtype, DEVICE)
    stale = replace(batch, token_slots=torch.tensor([*real, 1, 3, 0], dtype=torch.int32, device=DEVICE))
    tables = from_tables(stale.token_slots.tolist(), [-1, 0, 2, 1], real=len(real), length=5)
    check(run(stale, weights, tables), batch, weights)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_all_slices_in_a_program_or_one_give_the_same(steps: int, rows: int, slices: int) -> None:
    layer = replace(LAYER, widths=(96, 24, 24)[:slices])
    weights, batch = make_weights(layer, DTYPE, DEVICE), make_batch(layer, [0, 2, -1, 0, 1] * 5, DTYPE, DEVICE)
    tiles = (Tiles(path="list", block=32, steps=steps, stages=2, rows=rows), SMALL[1])
    check(run(batch, weights, list_tokens(batch.token_slots, num_slots=4), tiles), batch, weights)


@pytest.mark.parametrize("path", ["list", "slots"])
def test_ranks_that_a_program_takes_in_blocks_work(path: str) -> None:
    layer = replace(LAYER, k=40, widths=(24, 16), rank=128, slots=3, idle=(), ranks=(128, 70, 3))
    weights, batch = make_weights(layer, DTYPE, DEVICE), make_batch(layer, [0, 2, -1, 1, 1], DTYPE, DEVICE)
    tiles = (Tiles(path=path, block=32), Tiles(path=path, block=16))
    check(run(batch, weights, list_tokens(batch.token_slots, num_slots=3), tiles), batch, weights)


def test_more_slots_than_sixteen_and_a_slot_of_many_tokens_work() -> None:
    layer = replace(LAYER, slots=19, idle=(4,))
    slots = [18] * 20 + [0, 17, 5, -1, 5]
    weights, batch = make_weights(layer, DTYPE, DEVICE), make_batch(layer, slots, DTYPE, DEVICE)
    check(run(batch, weights, list_tokens(batch.token_slots, num_slots=19)), batch, weights)


@pytest.mark.parametrize("widths", [(128, 64, 64), (72, 8, 16), (33, 7, 10)], ids=["sharded kv heads", "of eights", "of any width"])
def test_slices_that_no_block_divides_work(widths: tuple[int, ...]) -> None:
    layer = replace(LAYER, widths=widths)
    weights, batch = make_weights(layer, DTYPE, DEVICE), make_batch(layer, [0, 2, -1, 0, 1], DTYPE, DEVICE)
    wide = (SMALL[0], Tiles(path="list", block=128 if ON_GPU else 32, steps=3, stages=2, rows=64 if ON_GPU else 16))
    check(run(batch, weights, list_tokens(batch.token_slots, num_slots=4), wide), batch, weights)
    slots = (Tiles(path="slots", block=32), Tiles(path="slots", block=64))
    check(run(batch, weights, list_tokens(batch.token_slots, num_slots=4), slots), batch, weights)


def test_a_tokens_bits_do_not_depend_on_the_order_of_the_list_or_its_neighbours() -> None:
    weights = make_weights(LAYER, DTYPE, DEVICE)
    batch = make_batch(LAYER, [0, 2, 0, 1, 2, 0, 0, 0, 2, 1] * 3, DTYPE, DEVICE)
    together = run(batch, weights, list_tokens(batch.token_slots, num_slots=4))
    backwards = torch.arange(len(batch.x) - 1, -1, -1, device=DEVICE)
    turned = replace(batch, x=batch.x[backwards], base=batch.base[backwards], token_slots=batch.token_slots[backwards].contiguous())
    assert same_bits(run(turned, weights, list_tokens(turned.token_slots, num_slots=4))[backwards], together)
    alone = replace(batch, token_slots=torch.where(torch.arange(30, device=DEVICE) == 4, batch.token_slots, -1))
    assert same_bits(run(alone, weights, list_tokens(alone.token_slots, num_slots=4))[4], together[4])


def test_ids_beyond_the_batch_in_a_list_are_not_followed() -> None:
    weights, batch = make_weights(LAYER, DTYPE, DEVICE), make_batch(LAYER, [-1, -1, -1], DTYPE, DEVICE)
    tables = {"order": [2**30, -7, 3], "slots": [0, 9], "starts": [0, 2], "counts": [2**20, 1]}
    wild = TokenList(**{name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in tables.items()})
    assert same_bits(run(batch, weights, wild), batch.base.flatten(0, 1))


def test_the_layer_in_one_call_serves_short_and_long_batches() -> None:
    for tokens in (5, 300):
        weights, batch = make_weights(LAYER, DTYPE, DEVICE), make_batch(LAYER, [i % 4 - 1 for i in range(tokens)], DTYPE, DEVICE)
        out = batch.base.flatten(0, 1).clone()
        listed = list_tokens(batch.token_slots, num_slots=4) if needs_token_list(tokens) else None
        dense_lora_(out, batch.x, weights.a, weights.b, batch.token_slots, token_list=listed)
        check(out, batch, weights)


def test_a_long_batch_without_a_list_is_served_all_the_same() -> None:
    weights, batch = make_weights(LAYER, DTYPE, DEVICE), make_batch(LAYER, [i % 4 - 1 for i in range(300)], DTYPE, DEVICE)
    out = batch.base.flatten(0, 1).clone()
    dense_lora_(out, batch.x, weights.a, weights.b, batch.token_slots)
    check(out, batch, weights)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_replayed_graph_follows_tables_that_are_overwritten() -> None:
    torch.use_deterministic_algorithms(False)
    layer = replace(LAYER, idle=())
    weights, first = make_weights(layer, DTYPE, DEVICE), make_batch(layer, [0, 1, 2, 3, 0], DTYPE, DEVICE)
    tables = from_tables([0, 1, 2, 3, 0], [0, 1, 2, 3], real=5, length=5)
    run(first, weights, tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(first, weights, tables)
    for seed, slots in enumerate(([3, 3, 3, 3, 3], [-1, 2, -1, 0, 1], [-1, -1, -1, -1, -1]), start=5):
        batch = make_batch(layer, slots, DTYPE, DEVICE, seed=seed)
        fresh = from_tables(slots, sorted(set(slots)), real=5, length=5)
        for name in ("x", "base", "token_slots"):
            getattr(first, name).copy_(getattr(batch, name))
        for name in ("order", "slots", "starts", "counts"):
            getattr(tables, name).copy_(getattr(fresh, name))
        graph.replay()
        check(out, batch, weights)


@pytest.mark.skipif(not ON_GPU, reason="needs gigabytes")
def test_offsets_beyond_two_to_the_31_are_right() -> None:
    layer = Layer(slots=2, k=64, widths=(57_344,), idle=())
    weights = make_weights(layer, DTYPE, DEVICE)
    tokens = 40_000
    base = torch.zeros(tokens, 57_344, dtype=DTYPE, device=DEVICE)
    x = torch.randn(tokens, 64, dtype=DTYPE, device=DEVICE)
    slots = torch.full((tokens,), -1, dtype=torch.int32, device=DEVICE)
    slots[-2:] = 1
    dense_lora_(base, x, weights.a, weights.b, slots, token_list=list_tokens(slots, num_slots=2))
    delta = x[-2:].double() @ weights.a[0][1, 0].double().T @ weights.b[0][1, 0].double().T
    assert relative_error(base[-2:], delta) < ERROR_BOUND[DTYPE]
    assert not bool(base[:-2].any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": torch.zeros(2, dtype=torch.int32)}, r"token_list.order: expected shape \[3\], given shape \[2\]"),
        ({"slots": torch.zeros(3)}, "token_list.slots: expected torch.int32 or torch.int64, given torch.float32"),
        ({"counts": torch.zeros(1, dtype=torch.int32)}, "token_list.counts: expected 4 or more groups, given 1"),
    ],
)
def test_a_list_that_does_not_fit_is_named(change: dict, message: str) -> None:
    weights, batch = make_weights(LAYER, DTYPE, DEVICE), make_batch(LAYER, [0, 1, 2], DTYPE, DEVICE)
    wrong = replace(list_tokens(batch.token_slots, num_slots=4), **{name: value.to(DEVICE) for name, value in change.items()})
    with pytest.raises(ValueError, match=message):
        run(batch, weights, wrong)
