"""Looking up tiles: the nearest entry, a user's folder first, a plain rule elsewhere, errors that name file and key."""

import json
from pathlib import Path

import pytest
import torch
from lora_kernels import configs
from lora_kernels.configs import FOLDER_VARIABLE, ConfigError, Shape, Tiles, default_tiles, file_name, padded_rank, tiles_for
from lora_kernels.tune import write

CPU = torch.device("cpu")
KEYS = {"op": "moe_shrink", "dtype": "bfloat16", "rank": 32, "width": 2880, "slices": 1, "adapters": 8}


def shape(rows: int, **changes: str | int) -> Shape:
    return Shape(**{**KEYS, "rows": rows, **changes})


def entry(rows: int, **tiles: str | int) -> dict:
    return {**KEYS, "rows": rows, "tiles": {"path": "pairs", "block": 256, **tiles}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for cached in (configs._read, configs._choose):
        cached.cache_clear()
    return tmp_path


def test_the_nearest_entry_of_the_users_folder_is_taken(folder: Path) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, block=128), entry(256, block=512)]}))
    assert tiles_for(shape(8), CPU).block == 128
    assert tiles_for(shape(200), CPU).block == 512


@pytest.mark.parametrize("changes", [{"rank": 256}, {"dtype": "float32"}, {"op": "moe_expand"}], ids=str)
def test_what_nobody_tuned_gets_the_plain_rule(folder: Path, changes: dict[str, str | int]) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8)]}))
    assert tiles_for(shape(4, **changes), CPU) == default_tiles(shape(4, **changes))


@pytest.mark.parametrize("rank", [8, 16, 32])
def test_lower_ranks_beside_a_tuned_one_get_its_tiles(folder: Path, rank: int) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8)]}))
    assert tiles_for(shape(4, rank=rank), CPU) == Tiles(path="pairs", block=256, num_warps=8)


def test_half_a_tuned_rank_keeps_the_rows_of_a_that_a_program_takes(folder: Path) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8, r_parts=4)]}))
    assert [tiles_for(shape(4, rank=rank), CPU).r_parts for rank in (32, 16)] == [4, 2]


def test_twice_a_tuned_rank_gets_the_rules_tiles_by_pair(folder: Path) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8)]}))
    assert tiles_for(shape(4, rank=64), CPU) == default_tiles(shape(4, rank=64))


def test_an_entry_of_the_rank_itself_goes_before_a_neighbours(folder: Path) -> None:
    own = {**entry(8, num_warps=2), "rank": 16}
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8), own]}))
    assert tiles_for(shape(4, rank=16), CPU).num_warps == 2


def test_groups_at_twice_a_tuned_rank_get_the_rules_tiles_for_groups(folder: Path) -> None:
    grouped = {**entry(4), "tiles": {"path": "groups", "block": 64, "steps": 12, "stages": 4}}
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [grouped]}))
    assert tiles_for(shape(4, rank=64), CPU) == default_tiles(shape(1024, rank=64))
    assert default_tiles(shape(1024, rank=64)).path == "groups"


def test_float16_gets_what_was_tuned_for_bfloat16(folder: Path) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(4, num_warps=8)]}))
    assert tiles_for(shape(4, dtype="float16"), CPU).num_warps == 8


@pytest.mark.parametrize("rows", [1, 512])
def test_batches_far_from_what_was_tuned_get_the_plain_rule(folder: Path, rows: int) -> None:
    (folder / file_name("cpu")).write_text(json.dumps({"entries": [entry(16, num_warps=8)]}))
    assert tiles_for(shape(2), CPU) == tiles_for(shape(128), CPU) != default_tiles(shape(2))
    assert tiles_for(shape(rows), CPU) == default_tiles(shape(rows))


def test_a_gpu_nobody_tuned_gets_the_plain_rule_at_every_rank(folder: Path) -> None:
    for op in configs.OPS:
        for rank in (1, 8, 16, 24, 32, 64, 128, 256):
            for rows in (1, 32, 4096):
                tiles = tiles_for(shape(rows, op=op, rank=rank), CPU)
                assert tiles.path in configs.PATHS[op]
                held = min(padded_rank(rank), 64) if op.startswith("dense") else padded_rank(rank)
                assert held // tiles.r_parts * tiles.block <= (16384 if tiles.num_warps == 8 else 8192)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "entries: expected a list"),
        (json.dumps({"entries": [3]}), r"entries\[0\]: expected an object"),
        (json.dumps({"entries": [entry(4), {**entry(4), "op": "nothing"}]}), r"entries\[1\].op: expected one of moe_shrink"),
        (json.dumps({"entries": [entry(0)]}), r"entries\[0\].rows: expected a whole number above 0, given 0"),
        (json.dumps({"entries": [entry(4, block=100)]}), r"entries\[0\].tiles.block: expected a power of two"),
        (json.dumps({"entries": [entry(4, path="slots")]}), r"entries\[0\].tiles.path: expected one of pairs, groups, given 'slots'"),
        (json.dumps({"entries": [entry(4, blocks=128)]}), r"entries\[0\].tiles.blocks: unknown key"),
        (json.dumps({"entries": [{**KEYS, "tiles": {"path": "pairs", "block": 64}}]}), r"entries\[0\]: missing .*'rows'"),
    ],
)
def test_a_malformed_file_is_named_with_its_key(folder: Path, text: str, message: str) -> None:
    (folder / file_name("cpu")).write_text(text)
    with pytest.raises(ConfigError, match=f"{folder / file_name('cpu')}: {message}"):
        tiles_for(shape(4), CPU)


def test_what_was_tuned_is_found_again_and_replaces_what_was_there(folder: Path) -> None:
    write(folder, "cpu", [(shape(4), Tiles(path="pairs", block=64)), (shape(64), Tiles(path="groups", block=64, steps=2))])
    write(folder, "cpu", [(shape(4), Tiles(path="pairs", block=512))])
    configs._read.cache_clear()
    assert tiles_for(shape(4), CPU).block == 512
    assert tiles_for(shape(64), CPU).path == "groups"


def test_the_shipped_files_are_well_formed() -> None:
    folder = Path(configs.__file__).parent
    files = list(folder.glob("*.json"))
    assert files
    for file in files:
        assert configs._read(str(folder), file.stem.replace("_", " "))
