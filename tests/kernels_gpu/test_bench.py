"""The benchmark's bookkeeping: what is selected, kept, named by commit and warned of. Nothing here needs a GPU."""

import json
from pathlib import Path

import pytest
import torch
from lora_kernels.bench import readme, results
from lora_kernels.bench.revision import STAMP, digest, revision
from lora_kernels.bench.routing import draw_adapters, draw_experts
from lora_kernels.bench.rows import ROUTINGS, Key, key_of, row_of
from lora_kernels.bench.selection import OPS, Wanted, select
from lora_kernels.bench.targets import judge, targets

KEY = Key(op="moe_lora", model="gptoss-20b", tokens=8, adapters=8, rank=32)
SKEWED = Key(op="moe_lora", model="gptoss-20b", tokens=8, adapters=8, rank=32, routing="zipf")
ABOUT = {"gpu": "a GPU", "commit": "abc1234", "copy_bytes_per_s": 4}


def measured(key: Key, us: float, vllm_us: float | None = 100.0) -> dict:
    return row_of(key, us=us, vllm_us=vllm_us, floor_us=5.0)


def test_a_row_names_its_routing_and_layer_only_where_they_are_not_the_usual() -> None:
    assert "routing" not in measured(KEY, 10)
    assert measured(SKEWED, 10)["routing"] == "zipf"
    assert [key_of(measured(key, 10)) for key in (KEY, SKEWED)] == [KEY, SKEWED]


def test_a_row_measured_again_replaces_the_old_one_which_goes_to_the_history_with_its_commit(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    results.save(file, [measured(KEY, 10), measured(SKEWED, 20)], ABOUT)
    results.save(file, [measured(KEY, 9)], {**ABOUT, "commit": "def5678"})
    document = json.loads(file.read_text())
    assert {(row["us"], row["commit"]) for row in document["rows"]} == {(9, "def5678"), (20, "abc1234")}
    past = [json.loads(line) for line in (tmp_path / "history" / "h200.jsonl").read_text().splitlines()]
    assert [(row["us"], row["commit"]) for row in past] == [(10, "abc1234")]


def test_rows_more_than_5_percent_slower_than_vllms_are_warned_of() -> None:
    rows = [measured(KEY, 104), measured(SKEWED, 106), measured(KEY, 500, None)]
    assert results.slower(rows) == [rows[1]]
    assert "zipf" in results.warnings(rows)
    assert "SLOWER" not in results.warnings(rows[:1])


def test_an_archive_is_its_commit_until_a_file_is_changed(tmp_path: Path) -> None:
    source = tmp_path / "kernels" / "lora_kernels" / "op.py"
    source.parent.mkdir(parents=True)
    source.write_text("before")
    (tmp_path / STAMP).write_text(json.dumps({"commit": "abc1234", "digest": digest(tmp_path)}))
    assert revision(tmp_path) == "abc1234"
    source.write_text("after")
    assert revision(tmp_path) == "abc1234-dirty"


def test_a_folder_that_is_neither_checkout_nor_archive_is_of_unknown_commit(tmp_path: Path) -> None:
    assert revision(tmp_path) == "unknown"


def test_no_row_is_selected_twice_and_each_op_can_be_selected_alone() -> None:
    everything = select(Wanted())
    assert len(set(everything)) == len(everything)
    parts = [select(Wanted(ops=[op])) for op in OPS]
    assert sorted(key for part in parts for key in part) == sorted(everything)
    assert all(parts)


def test_the_whole_set_can_be_measured_in_two_parts() -> None:
    parts = [select(Wanted(part=part)) for part in ("usual", "others")]
    assert sorted(parts[0] + parts[1]) == sorted(select(Wanted()))
    assert all(parts)
    assert all((key.rank, key.routing) == (32, "uniform") for key in parts[0])


def test_what_something_was_set_out_for_is_measured_first() -> None:
    keys = select(Wanted())
    assert set(keys[: len(targets())]) == set(targets())


def test_rows_are_judged_by_what_was_set_out_for_them_with_5_percent_tolerated() -> None:
    asked = targets()[KEY]
    most, vllm_us = asked["us"], 1.04 * asked["us"] * asked["times"]
    reached, missed = judge([measured(KEY, 1.04 * most, vllm_us), measured(SKEWED, 1e6)])
    assert (len(reached), missed) == (1, [])
    slow, close = judge([measured(KEY, 1.06 * most, 1e6), measured(KEY, most, 0.9 * most * asked["times"])])[1]
    assert (slow.most_us, slow.times, close.most_us, close.times) == (most, None, None, asked["times"])
    rows = [measured(KEY, 2 * most, 1e6)]
    assert f"GPT-OSS-20B 8: {2 * most:.1f} / 1,000,000" in readme.set_out_for({key_of(row): row for row in rows})


def test_naming_ranks_or_routings_selects_those_alone() -> None:
    keys = select(Wanted(ops=["moe"], models=["gptoss-20b"], tokens=[8], ranks=[16, 64], routings=["zipf"]))
    assert [(key.rank, key.routing) for key in keys] == [(16, "zipf"), (64, "zipf")]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_gives_each_token_different_experts_and_weights_that_sum_to_one(routing: str) -> None:
    draw = torch.Generator().manual_seed(0)
    ids, weights = draw_experts(routing, 200, experts=12, top_k=4, draw=draw)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert 0 <= int(ids.min()) <= int(ids.max()) < 12
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(200))


@pytest.mark.parametrize("together", [False, True])
def test_skewed_routing_is_skewed_the_way_it_says(together: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    slots = {routing: draw_adapters(routing, 800, adapters=8, draw=draw, together=together) for routing in ROUTINGS}
    counts = {routing: found.long().bincount(minlength=8) for routing, found in slots.items()}
    assert counts["uniform"].tolist() == [100] * 8
    assert sorted(counts["one_adapter"].tolist()) == sorted(counts["hot_cell"].tolist()) == [0] * 7 + [800]
    assert counts["zipf"][0] > 2 * counts["zipf"][7]
    experts, _ = draw_experts("hot_cell", 800, experts=32, top_k=4, draw=draw)
    assert bool((experts == 0).any(dim=1).all())


def test_the_readmes_tables_are_those_of_the_file_of_figures() -> None:
    text = readme.README.read_text()
    assert readme.write_tables(text, json.loads(readme.FIGURES.read_text())["rows"]) == text


def test_every_table_is_made_of_rows_that_are_there() -> None:
    shapes = [KEY, SKEWED, *select(Wanted(models=["gptoss-20b", "qwen3-32b"]))]
    rows = [measured(key, 50.0, None if key.tokens == 8 else 100.0) for key in shapes]
    for name in readme.TABLES:
        made = readme.write_tables(f"<!-- figures: {name} -->\n<!-- end -->", rows)
        lines = [line for line in made.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
        assert "nan" not in made
    assert "2.0×" in readme.write_tables("<!-- figures: dense -->\n<!-- end -->", rows)
