"""moe_shrink, moe_expand and pair_groups against float64, with NaN wherever nothing may be read or must be written."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lora_kernels.arguments import check_ids
from lora_kernels.configs import Tiles
from lora_kernels.launch import Overlap, can_overlap
from lora_kernels.moe_expand import moe_expand_
from lora_kernels.moe_expand.kernel import expand_groups_kernel, expand_pairs_kernel
from lora_kernels.moe_expand.reference import moe_expand_reference
from lora_kernels.moe_lora import Routing, decode_tiles, moe_lora_
from lora_kernels.moe_shrink import moe_shrink
from lora_kernels.moe_shrink.kernel import shrink_groups_kernel, shrink_pairs_kernel
from lora_kernels.moe_shrink.reference import moe_shrink_reference
from lora_kernels.pair_groups import GROUP, group_pairs
from lora_kernels.pair_groups.reference import pair_groups_reference
from lora_kernels.testing import ERROR_BOUND, Batch, Layer, Weights, make_batch, make_weights, relative_error, same_bits

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32, torch.float16]
SCALE = 8 if ON_GPU else 1
"""Shapes are this much larger where a GPU computes them."""
OVERLAPS = [Overlap.NONE, Overlap.INPUTS_FRESH, Overlap.IDS_SETTLED] if can_overlap(DEVICE) else [Overlap.NONE]
PAIRS = (Tiles(path="pairs", block=32, steps=2), Tiles(path="pairs", block=32))
WIDE = (Tiles(path="pairs", block=128, steps=2), Tiles(path="pairs", block=16))
GROUPS = (Tiles(path="groups", block=32, steps=2, stages=2), Tiles(path="groups", block=32, steps=2, stages=2))
SHARED = (Tiles(path="pairs", block=32, steps=3, r_parts=4), Tiles(path="pairs", block=16, steps=3))
"""Programs by pair that share A's rows, or take several blocks of B."""
PATHS = [pytest.param(PAIRS, id="pairs"), pytest.param(GROUPS, id="groups")]
ALL = [*PATHS, pytest.param(SHARED, id="shared")]
TWO_SLICES = Layer(slots=4, experts=5, top_k=2, k=104 * SCALE, widths=(48 * SCALE, 48 * SCALE), idle=(3,))
INTERLEAVED = Layer(slots=4, experts=4, top_k=2, k=72 * SCALE, widths=(80 * SCALE,), idle=(3,))


@pytest.fixture(autouse=True)
def fresh_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.empty gives NaN (the largest integer for integers): what was not written shows."""
    torch.use_deterministic_algorithms(True)
    if not ON_GPU:
        monkeypatch.setattr("lora_kernels.pair_groups.op.PROGRAMS", 4)
    yield
    torch.use_deterministic_algorithms(False)


def run(
    batch: Batch,
    weights: Weights,
    layer: Layer,
    tiles: tuple[Tiles | None, Tiles | None],
    *,
    weighted: bool = False,
    enabled: torch.Tensor | None = None,
    overlap: Overlap = Overlap.NONE,
) -> torch.Tensor:
    routing = (batch.token_slots, batch.topk_ids)
    options = {"num_experts": layer.experts, "slot_enabled": enabled}
    groups = group_pairs(*routing, num_slots=layer.slots, overlap=overlap, **options)
    options |= {"slot_ranks": weights.slot_ranks, "groups": groups}
    out = batch.base.clone()  # a plain launch: from here on the groups are settled
    partials = moe_shrink(batch.x, weights.a, *routing, tiles=tiles[0], overlap=overlap, **options)
    scale = batch.topk_weights if weighted else None
    moe_expand_(out, partials, weights.b, *routing, topk_weights=scale, tiles=tiles[1], overlap=overlap, **options)
    return out


def check(out: torch.Tensor, batch: Batch, weights: Weights, *, weighted: bool = False, enabled: torch.Tensor | None = None) -> None:
    cpu = [None if t is None else t.cpu() for t in (batch.token_slots, batch.topk_ids, enabled, weights.slot_ranks)]
    options = {"slot_enabled": cpu[2], "slot_ranks": cpu[3]}
    h = moe_shrink_reference(batch.x.cpu(), [a.cpu() for a in weights.a], cpu[0], cpu[1], accumulate=torch.float64, **options)
    scale = batch.topk_weights.cpu() if weighted else None
    delta = moe_expand_reference(h, [b.cpu() for b in weights.b], cpu[0], cpu[1], topk_weights=scale, **options)
    flat, base, unused = out.flatten(0, 1).cpu(), batch.base.flatten(0, 1).cpu(), batch.unused.cpu()
    assert same_bits(flat[unused], base[unused])
    if not bool(unused.all()):
        assert relative_error(flat[~unused], base[~unused].double() + delta[~unused]) < ERROR_BOUND[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", ALL)
@pytest.mark.parametrize("layer", [TWO_SLICES, INTERLEAVED], ids=["two slices", "interleaved"])
@pytest.mark.parametrize("weighted", [False, True], ids=["w13", "w2"])
def test_pairs_get_their_adapters_delta_and_base_rows_keep_their_bits(
    dtype: torch.dtype, tiles: tuple[Tiles, Tiles], layer: Layer, weighted: bool
) -> None:
    weights = make_weights(layer, dtype, DEVICE)
    batch = make_batch(layer, [0, -1, 2, 1, 2, -1, 0], dtype, DEVICE, row_per_pair=weighted)
    for overlap in OVERLAPS:
        check(run(batch, weights, layer, tiles, weighted=weighted, overlap=overlap), batch, weights, weighted=weighted)


@pytest.mark.parametrize("tiles", ALL)
@pytest.mark.parametrize("slots", [[], [1], [0, 0, 0, 0, 0, 0, 1], [2, 1, 0, -1] * 4 + [3]], ids=["T=0", "T=1", "T=7", "T=17"])
def test_any_number_of_tokens_works(tiles: tuple[Tiles, Tiles], slots: list[int]) -> None:
    layer = replace(INTERLEAVED, idle=())
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, slots, DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize(("slots", "choices"), [(1, [0, -1, 0, -1]), (3, [2, -1, 1, 0, 2])], ids=["one slot", "full set"])
def test_the_last_slot_of_a_full_set_is_served_beside_base_rows(tiles: tuple[Tiles, Tiles], slots: int, choices: list[int]) -> None:
    layer = replace(INTERLEAVED, slots=slots, idle=())
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, choices, DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
def test_a_batch_of_base_rows_alone_after_one_with_adapters_keeps_every_bit(tiles: tuple[Tiles, Tiles]) -> None:
    weights = make_weights(INTERLEAVED, DTYPES[0], DEVICE)
    for slots in ([0, 1, 2], [-1, -1, -1]):
        batch = make_batch(INTERLEAVED, slots, DTYPES[0], DEVICE)
        check(run(batch, weights, INTERLEAVED, tiles), batch, weights)


@pytest.mark.parametrize("tiles", ALL)
@pytest.mark.parametrize("rank", [1, 8, 24, 64] + ([16, 128, 256] if ON_GPU else []))
def test_any_rank_of_the_stacks_works(tiles: tuple[Tiles, Tiles], rank: int) -> None:
    layer = replace(INTERLEAVED, rank=rank)
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, 2, 0], DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)
    check(run(batch, weights, layer, (None, None)), batch, weights)


@pytest.mark.parametrize("tiles", ALL)
@pytest.mark.parametrize("ranks", [(8, 64, 16, 64), (4, 1, 40, 33)], ids=["multiples of 8", "others"])
def test_nothing_beyond_a_slots_own_rank_is_used(tiles: tuple[Tiles, Tiles], ranks: tuple[int, ...]) -> None:
    layer = replace(TWO_SLICES, rank=64, ranks=ranks, idle=())
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, 1, 2, 3, -1], DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", ALL)
def test_a_disabled_adapters_rows_keep_their_bits_though_its_weights_are_nan(tiles: tuple[Tiles, Tiles]) -> None:
    layer = replace(INTERLEAVED, idle=(1,))
    enabled = torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    weights = make_weights(layer, DTYPES[0], DEVICE)
    batch = make_batch(layer, [0, 1, 2, 1], DTYPES[0], DEVICE, disabled=(1,))
    for overlap in OVERLAPS:
        check(run(batch, weights, layer, tiles, enabled=enabled, overlap=overlap), batch, weights, enabled=enabled)


@pytest.mark.parametrize("tiles", PATHS)
def test_pairs_of_experts_that_live_elsewhere_are_left_alone(tiles: tuple[Tiles, Tiles]) -> None:
    weights = make_weights(TWO_SLICES, DTYPES[0], DEVICE)
    batch = make_batch(TWO_SLICES, [0, 1, 2, 1, 0], DTYPES[0], DEVICE, missing_experts=True)
    check(run(batch, weights, TWO_SLICES, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
def test_ids_out_of_range_count_as_no_adapter(tiles: tuple[Tiles, Tiles]) -> None:
    weights, batch = make_weights(TWO_SLICES, DTYPES[0], DEVICE), make_batch(TWO_SLICES, [-1, 0, -1], DTYPES[0], DEVICE)
    wild = replace(batch, token_slots=batch.token_slots.clone(), topk_ids=batch.topk_ids.clone(), unused=torch.ones_like(batch.unused))
    wild.token_slots[0], wild.token_slots[2], wild.topk_ids[1] = TWO_SLICES.slots, 2**30, TWO_SLICES.experts
    assert same_bits(run(wild, weights, TWO_SLICES, tiles), batch.base)


@pytest.mark.parametrize("tiles", ALL)
@pytest.mark.parametrize("shared", ["a", "b", "both"])
def test_adapters_that_share_their_outer_matrices_over_the_experts_work(tiles: tuple[Tiles, Tiles], shared: str) -> None:
    layer = replace(TWO_SLICES, shared_a=shared != "b", shared_b=shared != "a")
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [2, 0, 0], DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (12, 1), (12, 12), (40, 4), (60, 6)])
def test_odd_numbers_of_experts_and_choices_work(tiles: tuple[Tiles, Tiles], experts: int, top_k: int) -> None:
    layer = replace(INTERLEAVED, experts=experts, top_k=top_k, k=40, widths=(24,))
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [0, -1, 2], DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", [*ALL, pytest.param(WIDE, id="wide steps")])
@pytest.mark.parametrize(("k", "n"), [(90, 45), (2880, 90), (100, 130)])
def test_lengths_that_are_no_multiple_of_a_tile_work(tiles: tuple[Tiles, Tiles], k: int, n: int) -> None:
    tiles = (replace(tiles[0], block=tiles[0].block * (16 if k > 1000 else 1)), tiles[1])
    layer = replace(TWO_SLICES, k=k, widths=(n, n))
    weights, batch = make_weights(layer, DTYPES[0], DEVICE), make_batch(layer, [1], DTYPES[0], DEVICE)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", PATHS)
def test_one_hot_cell_longer_than_a_group_works(tiles: tuple[Tiles, Tiles]) -> None:
    layer = replace(INTERLEAVED, top_k=1, k=40, widths=(24,))
    weights = make_weights(layer, DTYPES[0], DEVICE)
    batch = make_batch(layer, [1] * (2 * GROUP + 3), DTYPES[0], DEVICE, one_cell=True)
    check(run(batch, weights, layer, tiles), batch, weights)


@pytest.mark.parametrize("tiles", ALL)
def test_two_runs_give_the_same_bits_whatever_neighbours_the_rows_have(tiles: tuple[Tiles, Tiles]) -> None:
    weights, batch = make_weights(TWO_SLICES, DTYPES[0], DEVICE), make_batch(TWO_SLICES, [0, 2, 0, 1], DTYPES[0], DEVICE)
    first = run(batch, weights, TWO_SLICES, tiles)
    for overlap in OVERLAPS * (20 if ON_GPU else 1):
        assert same_bits(run(batch, weights, TWO_SLICES, tiles, overlap=overlap), first)
    alone = replace(batch, x=batch.x[:1], base=batch.base[:1], token_slots=batch.token_slots[:1], topk_ids=batch.topk_ids[:1])
    assert same_bits(run(alone, weights, TWO_SLICES, tiles), first[:1])


@pytest.mark.parametrize("enabled", [None, [1, 0, 1, 1]], ids=["all enabled", "one disabled"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 60, 300])
def test_groups_hold_each_pair_of_an_adapter_once_by_cell(tokens: int, enabled: list[int] | None) -> None:
    layer = Layer(slots=4, experts=6, top_k=3)
    slots = random.Random(tokens).choices([-1, 0, 1, 2, 3], weights=[1, 1, 1, 1, 9], k=tokens)
    batch = make_batch(layer, slots, DTYPES[0], DEVICE, missing_experts=tokens < 300)
    on = None if enabled is None else torch.tensor(enabled, dtype=torch.int32, device=DEVICE)
    found = group_pairs(batch.token_slots, batch.topk_ids, num_slots=4, num_experts=6, slot_enabled=on)
    cells = pair_groups_reference(
        batch.token_slots.cpu(), batch.topk_ids.cpu(), num_experts=6, slot_enabled=None if on is None else on.cpu()
    )
    records = found.records[: found.num_groups].tolist()
    if not tokens:
        assert not records
        return
    assert [record[1] for record in records[:24]] == [min(len(cells.get(cell, [])), GROUP) for cell in range(24)]
    held: dict[int, list[int]] = {}
    for cell, count, *rest in records:
        if count:
            held.setdefault(cell, []).extend(rest[GROUP - 2 :][:count])
    assert held == cells


@pytest.mark.parametrize("tiles", [*PATHS, pytest.param((PAIRS[0], GROUPS[1]), id="mixed"), pytest.param(None, id="looked up")])
def test_a_layer_of_two_projections_shares_its_groups(tiles: tuple[Tiles, Tiles] | None) -> None:
    second = replace(INTERLEAVED, k=40 * SCALE, widths=(56 * SCALE,))
    weights, weights2 = make_weights(INTERLEAVED, DTYPES[0], DEVICE), make_weights(second, DTYPES[0], DEVICE, seed=2)
    batch = make_batch(INTERLEAVED, [0, 2, -1, 1, 0], DTYPES[0], DEVICE)
    batch2 = make_batch(second, [0, 2, -1, 1, 0], DTYPES[0], DEVICE, row_per_pair=True)
    for overlap in OVERLAPS:
        routing = Routing(token_slots=batch.token_slots, topk_ids=batch.topk_ids, num_slots=4, num_experts=4)
        out, out2 = batch.base.clone(), batch2.base.clone()
        moe_lora_(out, batch.x, weights.a, weights.b, routing, tiles=tiles, overlap=overlap)
        moe_lora_(out2, batch2.x, weights2.a, weights2.b, routing, topk_weights=batch2.topk_weights, tiles=tiles, overlap=overlap)
        check(out, batch, weights)
        check(out2, batch2, weights2, weighted=True)


@pytest.mark.parametrize(("slots", "path"), [(8, "groups"), (64, "pairs")])
def test_pairs_are_grouped_where_they_are_many_beside_the_cells(slots: int, path: str) -> None:
    topk_ids = torch.zeros(256, 4, dtype=torch.int32, device=DEVICE)
    routing = Routing(token_slots=topk_ids[:, 0].contiguous(), topk_ids=topk_ids, num_slots=slots, num_experts=40)
    a, b, x, out = (torch.zeros(*shape, device=DEVICE) for shape in ((1, 1, 16, 96), (1, 1, 96, 16), (256, 96), (256, 4, 96)))
    assert [tiles.path for tiles in decode_tiles(out, x, [a], [b], routing)] == [path, path]


@pytest.mark.parametrize(("tokens", "path"), [(11, "pairs"), (12, "groups")])
def test_a_few_crowded_cells_are_grouped_though_the_batch_is_small(tokens: int, path: str) -> None:
    topk_ids = torch.zeros(tokens, 4, dtype=torch.int32, device=DEVICE)
    routing = Routing(token_slots=topk_ids[:, 0].contiguous(), topk_ids=topk_ids, num_slots=2, num_experts=8)
    a, b, x, out = (torch.zeros(*shape, device=DEVICE) for shape in ((2, 1, 16, 96), (2, 1, 96, 16), (tokens, 96), (tokens, 4, 96)))
    assert [tiles.path for tiles in decode_tiles(out, x, [a], [b], routing)] == [path, path]


@pytest.mark.skipif(not ON_GPU, reason="the interpreter compiles nothing")
def test_lengths_of_batches_compile_nothing_new() -> None:
    kernels = (
        shrink_pairs_kernel,
        expand_pairs_kernel,
        shrink_groups_kernel,
        expand_groups_kernel,
    )
    weights = make_weights(INTERLEAVED, DTYPES[0], DEVICE)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for tokens in (3, 1, 8, 16, 17, 33):
        batch = make_batch(INTERLEAVED, [i % 3 for i in range(tokens)], DTYPES[0], DEVICE)
        for tiles in (PAIRS, WIDE, SHARED, GROUPS):
            run(batch, weights, INTERLEAVED, tiles)
        counts.append(compiled())
    assert counts[0] > 0
    assert len(set(counts)) == 1


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no inline assembly")
@pytest.mark.parametrize("tiles", [PAIRS, WIDE, SHARED], ids=["pairs", "wide steps", "shared"])
def test_inline_assembly_changes_nothing_but_time(tiles: tuple[Tiles, Tiles], monkeypatch: pytest.MonkeyPatch) -> None:
    weights, batch = make_weights(TWO_SLICES, torch.bfloat16, DEVICE), make_batch(TWO_SLICES, [0, 2, -1, 1], torch.bfloat16, DEVICE)
    found = []
    for on in (True, False):
        for op in ("moe_shrink", "moe_expand"):
            monkeypatch.setattr(f"lora_kernels.{op}.op.widens_by_ptx", lambda _, on=on: on)
        found.append(run(batch, weights, TWO_SLICES, tiles))
        check(found[-1], batch, weights)
    used = ~batch.unused.cpu()
    assert relative_error(found[0].flatten(0, 1).cpu()[used], found[1].flatten(0, 1).cpu()[used]) < ERROR_BOUND[torch.bfloat16] / 10


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("tiles", PATHS)
def test_a_replayed_graph_follows_new_ids_and_inputs(tiles: tuple[Tiles, Tiles]) -> None:
    torch.use_deterministic_algorithms(False)
    layer = replace(TWO_SLICES, idle=())
    weights = make_weights(layer, DTYPES[0], DEVICE)
    first = make_batch(layer, [0, 1, 2, 3, 0], DTYPES[0], DEVICE)
    run(first, weights, layer, tiles)
    static = replace(first, x=first.x.clone(), token_slots=first.token_slots.clone(), topk_ids=first.topk_ids.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, weights, layer, tiles, overlap=OVERLAPS[-1])
    for seed, slots in enumerate(([3, 3, 3, 3, 3], [-1, 2, -1, 0, 1], [-1, -1, -1, -1, -1]), start=5):
        batch = make_batch(layer, slots, DTYPES[0], DEVICE, seed=seed)
        for name in ("x", "base", "token_slots", "topk_ids"):
            getattr(static, name).copy_(getattr(batch, name))
        graph.replay()
        check(out, batch, weights)


@pytest.mark.skipif(not ON_GPU, reason="takes gigabytes")
@pytest.mark.parametrize("tiles", PATHS)
def test_offsets_beyond_two_to_the_31_are_right(tiles: tuple[Tiles, Tiles]) -> None:
    layer = Layer(slots=32, experts=128, top_k=2, rank=128, k=4608, widths=(4608,))
    a = torch.full((32, 128, 128, 4608), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    b = torch.full((32, 128, 4608, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    batch = make_batch(layer, [31], torch.bfloat16, DEVICE)
    for expert in batch.topk_ids[0].tolist():
        a[31, expert] = torch.randn(128, 4608, device=DEVICE).to(a.dtype) / 64
        b[31, expert] = torch.randn(4608, 128, device=DEVICE).to(b.dtype) / 11
    weights = Weights(a=[a], b=[b], slot_ranks=None)
    out = run(batch, weights, layer, tiles)
    small = batch.topk_ids[0].tolist()
    part = Weights(a=[a[31:, small]], b=[b[31:, small]], slot_ranks=None)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    moved = replace(batch, token_slots=torch.zeros_like(batch.token_slots), topk_ids=ids)
    check(out, moved, part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 40, dtype=torch.float64)}, r"x: expected torch.bfloat16 .* given torch.float64"),
        ({"x": torch.zeros(5, 40)}, r"x: expected 3 or 6 rows, given 5 rows"),
        ({"x": torch.zeros(40, 3).T}, r"x: expected a contiguous tensor, given strides"),
        ({"x": torch.zeros(3, 48)}, r"lora_a\[0\]: expected \[\*, \*, 16, 48\], given \[4, 4, 16, 40\]"),
        ({"token_slots": torch.zeros(3)}, r"token_slots: expected torch.int32 or torch.int64, given torch.float32"),
        ({"token_slots": torch.zeros(2, dtype=torch.int32)}, r"token_slots: expected shape \[3\], given shape \[2\]"),
        ({"num_experts": 9}, r"lora_a\[0\]: expected 9 experts or 1, given 4 experts"),
        ({"slot_enabled": torch.ones(3, dtype=torch.int32)}, r"slot_enabled: expected 4 or more slots, given 3"),
        ({"tiles": GROUPS[0]}, r"groups: expected the pairs' groups for tiles of path groups, given None"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(change: dict, message: str) -> None:
    layer = replace(INTERLEAVED, k=40, widths=(24,))
    weights = make_weights(layer, torch.float32, DEVICE)
    batch = make_batch(layer, [0, 1, 2], torch.float32, DEVICE)
    arguments = {"x": batch.x, "token_slots": batch.token_slots, "topk_ids": batch.topk_ids, "num_experts": 4}
    arguments |= {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        moe_shrink(lora_a=weights.a, **arguments)


def test_ids_out_of_range_are_told_when_asked_for() -> None:
    slots, experts = torch.tensor([0, -1, 3], dtype=torch.int32, device=DEVICE), torch.tensor([[-1, 4]], device=DEVICE)
    check_ids(slots, experts, num_slots=4, num_experts=5)
    with pytest.raises(ValueError, match=r"token_slots: expected ids in \[-1, 3\), given ids from -1 to 3"):
        check_ids(slots, experts, num_slots=3, num_experts=5)
    with pytest.raises(ValueError, match=r"topk_ids: expected ids in \[-1, 4\), given ids from -1 to 4"):
        check_ids(slots, experts, num_slots=4, num_experts=4)
