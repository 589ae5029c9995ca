"""The work list against its plain-torch twin: equal element by element, since a stable grouping has one answer."""

import pytest
import torch
from lora_kernels.work_list import WorkList, build_work_list
from lora_kernels.work_list.kernel import scan_kernel, scatter_kernel, sort_chunks_kernel
from lora_kernels.work_list.reference import cells_of_pairs
from lora_kernels.work_list.reference import work_list as reference_work_list

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture(autouse=True)
def small_chunks_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sort takes a second for 512 pairs; and so even a short list has several chunks."""
    if DEVICE == "cpu":
        monkeypatch.setattr("lora_kernels.work_list.build.CHUNK", 256)


def routing(
    num_tokens: int,
    top_k: int,
    num_adapters: int,
    num_experts: int,
    *,
    seed: int = 0,
    base_share: float = 0.2,
    dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.rand((num_tokens, num_experts), generator=draw).topk(top_k, 1).indices.to(dtype)
    adapters = torch.randint(0, num_adapters, (num_tokens,), generator=draw, dtype=dtype)
    adapters[torch.rand(num_tokens, generator=draw) < base_share] = -1
    return ids.to(DEVICE), adapters.to(DEVICE)


def assert_right(work: WorkList, ids: torch.Tensor, adapters: torch.Tensor, enabled: torch.Tensor | None = None) -> None:
    num_cells = work.num_adapters * work.num_experts + 1
    cells = cells_of_pairs(ids, adapters, num_adapters=work.num_adapters, num_experts=work.num_experts, adapter_enabled=enabled)
    order, tiles = reference_work_list(cells, num_cells=num_cells, block_m=work.block_m)
    num_tiles = int(work.num_tiles)
    assert num_tiles == tiles.shape[1] <= work.max_tiles
    assert torch.equal(work.tiles[:, :num_tiles].long(), tiles)
    assert torch.equal(work.order[: order.shape[0]].long(), order)
    places = torch.full_like(work.places, -1)
    places[order] = torch.arange(order.shape[0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(work.places, places)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 17, 300])
@pytest.mark.parametrize(("top_k", "num_experts", "num_adapters"), [(4, 32, 8), (8, 40, 3), (1, 12, 1), (12, 60, 2)])
def test_pairs_are_grouped_by_cell_in_their_own_order(num_tokens: int, top_k: int, num_experts: int, num_adapters: int) -> None:
    ids, adapters = routing(num_tokens, top_k, num_adapters, num_experts)
    assert_right(build_work_list(ids, adapters, num_adapters=num_adapters, num_experts=num_experts, block_m=16), ids, adapters)


@on_gpu
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_adapters"), [(8192, 4, 32, 8), (20000, 8, 128, 8), (4096, 6, 128, 32), (140000, 4, 32, 8)]
)
def test_large_batches_are_grouped_by_cell(num_tokens: int, top_k: int, num_experts: int, num_adapters: int) -> None:
    ids, adapters = routing(num_tokens, top_k, num_adapters, num_experts)
    assert_right(build_work_list(ids, adapters, num_adapters=num_adapters, num_experts=num_experts, block_m=64), ids, adapters)


def test_a_list_longer_than_one_step_of_the_scan_carries_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_kernels.work_list.build.CHUNKS_PER_STEP", 2)
    ids, adapters = routing(700, 2, 3, 8)
    assert_right(build_work_list(ids, adapters, num_adapters=3, num_experts=8, block_m=32), ids, adapters)


@pytest.mark.parametrize(("adapter", "expert"), [(0, 0), (1, 5), (1, 7), (-1, 3), (0, -1)])
def test_one_hot_cell_fills_tile_after_tile(adapter: int, expert: int) -> None:
    new = {"dtype": torch.int32, "device": DEVICE}
    ids, adapters = torch.full((600, 1), expert, **new), torch.full((600,), adapter, **new)
    work = build_work_list(ids, adapters, num_adapters=2, num_experts=8, block_m=64)
    assert_right(work, ids, adapters)
    assert int(work.num_tiles) == (10 if expert >= 0 else 0)


def test_tokens_of_one_adapter_side_by_side_fill_whole_chunks() -> None:
    adapters = torch.tensor([0, 1, -1], dtype=torch.int32, device=DEVICE).repeat_interleave(700)
    ids = torch.zeros((2100, 1), dtype=torch.int32, device=DEVICE)
    assert_right(build_work_list(ids, adapters, num_adapters=2, num_experts=1, block_m=64), ids, adapters)


def test_the_last_adapter_of_a_full_set_is_listed_beside_base_tokens() -> None:
    adapters = torch.tensor([-1, 0, 1, 2, 3, -1], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([[0], [1], [1], [0], [1], [1]], dtype=torch.int32, device=DEVICE)
    work = build_work_list(ids, adapters, num_adapters=4, num_experts=2, block_m=16)
    assert_right(work, ids, adapters)
    assert work.tiles[0, : int(work.num_tiles)].tolist() == [1, 3, 4, 7, 8]


def test_pairs_of_experts_on_other_ranks_are_in_no_tile() -> None:
    ids, adapters = routing(50, 4, 2, 8)
    ids[ids >= 4] = -1
    work = build_work_list(ids, adapters, num_adapters=2, num_experts=4, block_m=16)
    assert_right(work, ids, adapters)
    assert int(work.tiles[2, : int(work.num_tiles)].sum()) == int((ids >= 0).sum())


def test_experts_past_the_last_one_are_in_no_tile_either() -> None:
    ids, adapters = routing(50, 4, 2, 8)
    work = build_work_list(ids, adapters, num_adapters=2, num_experts=5, block_m=16)
    assert int(work.tiles[2, : int(work.num_tiles)].sum()) == int((ids < 5).sum())


def test_a_disabled_adapter_and_a_stale_id_count_as_no_adapter() -> None:
    ids, adapters = routing(40, 2, 4, 8)
    adapters[3] = 4
    adapters[4] = 1 << 20
    enabled = torch.tensor([1, 0, 1, 0, 9], dtype=torch.int32, device=DEVICE)
    work = build_work_list(ids, adapters, num_adapters=4, num_experts=8, block_m=16, adapter_enabled=enabled)
    assert_right(work, ids, adapters, enabled)
    assert not {1, 3} & {cell // 8 for cell in work.tiles[0, : int(work.num_tiles)].tolist()}


def test_a_batch_without_adapters_is_one_cell() -> None:
    ids, _ = routing(33, 2, 2, 4)
    work = build_work_list(ids, torch.full((33,), -1, dtype=torch.int32, device=DEVICE), num_adapters=2, num_experts=4, block_m=16)
    assert work.tiles[0, : int(work.num_tiles)].tolist() == [8] * 5


def test_ids_of_64_bits_give_the_same_list() -> None:
    ids, adapters = routing(40, 4, 3, 8, dtype=torch.int64)
    assert_right(build_work_list(ids, adapters, num_adapters=3, num_experts=8, block_m=16), ids, adapters)


@on_gpu
def test_a_captured_list_replays_on_new_routing_with_the_same_bits_each_time() -> None:
    ids, adapters = routing(5000, 8, 8, 128)
    build_work_list(ids, adapters, num_adapters=8, num_experts=128, block_m=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = build_work_list(ids, adapters, num_adapters=8, num_experts=128, block_m=64)
    for seed, base_share in ((1, 0.0), (2, 0.5), (3, 1.0)):
        new_ids, new_adapters = routing(5000, 8, 8, 128, seed=seed, base_share=base_share)
        ids.copy_(new_ids)
        adapters.copy_(new_adapters)
        for _ in range(3):
            graph.replay()
            assert_right(work, ids, adapters)


@on_gpu
def test_another_length_does_not_mean_another_compilation() -> None:
    kernels = (scan_kernel, scatter_kernel, sort_chunks_kernel)
    compiled = []
    for num_tokens in (1000, 1001, 1024, 1600, 4095, 16):
        ids, adapters = routing(num_tokens, 4, 8, 32)
        build_work_list(ids, adapters, num_adapters=8, num_experts=32, block_m=64)
        compiled.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert all(count == compiled[0] for count in compiled)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("topk_ids", {"topk_ids": torch.zeros((4, 2))}),
        ("topk_ids", {"topk_ids": torch.zeros((2, 4), dtype=torch.int32).t()}),
        ("token_adapters", {"token_adapters": torch.zeros(3, dtype=torch.int32)}),
        ("token_adapters", {"token_adapters": torch.zeros((4, 1), dtype=torch.int32)}),
        ("block_m", {"block_m": 48}),
        ("num_adapters", {"num_adapters": 0}),
        ("num_adapters", {"num_adapters": 5000}),
        ("adapter_enabled", {"adapter_enabled": torch.ones(1, dtype=torch.int32)}),
    ],
)
def test_bad_arguments_are_named(name: str, change: dict[str, object]) -> None:
    arguments = {
        "topk_ids": torch.zeros((4, 2), dtype=torch.int32),
        "token_adapters": torch.zeros(4, dtype=torch.int32),
        "num_adapters": 2,
        "num_experts": 8,
        "block_m": 16,
    }
    with pytest.raises(ValueError, match=f"{name}.*expected.*given"):
        build_work_list(**{**arguments, **change})
