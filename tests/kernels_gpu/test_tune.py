"""The search for tiles, with a made-up clock instead of a GPU."""

import json
from pathlib import Path

import pytest
from lora_kernels import configs
from lora_kernels.bench.rows import Key
from lora_kernels.bench.selection import Wanted, select
from lora_kernels.configs import file_name
from lora_kernels.moe_prefill.plan import PrefillPlan
from lora_kernels.tune import write
from lora_kernels.tune.candidates import Plan, entries_of, paths_of
from lora_kernels.tune.prefill import layer_shape, rule
from lora_kernels.tune.search import find, plans_to_compile

KEYS = [
    Key(op="moe_lora", model="gptoss-20b", tokens=256, adapters=8, rank=64),
    Key(op="dense_lora", model="qwen3-32b", layer="qkv", tokens=8, adapters=8, rank=32),
]
PREFILL = Key(op="moe_lora_prefill", model="qwen3-30b-a3b", tokens=6400, adapters=8, rank=32)
LONG = Key(op="dense_lora", model="qwen3-32b", layer="qkv", tokens=6400, adapters=8, rank=64)
BOTH = pytest.mark.parametrize("key", KEYS, ids=lambda key: key.op)
ALL = pytest.mark.parametrize("key", [*KEYS, LONG], ids=lambda key: f"{key.op} {key.tokens}")


def made_up_us(plan: Plan) -> float:
    """Every launch is best in its path "pairs" at one block and 2 warps."""
    return sum(10 * (tiles.path != "pairs") + abs(tiles.block - 128) / 64 + tiles.num_warps + tiles.steps for tiles in plan.values())


def quiet(_: str) -> None:
    pass


@BOTH
def test_the_search_finds_the_fastest_tiles_of_every_launch(key: Key) -> None:
    paths = paths_of(key)
    plan, best = find(paths, made_up_us, quiet)
    pairs = next(path for path in paths if path.name == "pairs")
    fastest = {
        launch: min(options, key=lambda tiles, launch=launch: made_up_us({launch: tiles})) for launch, options in pairs.candidates.items()
    }
    assert made_up_us(plan) == best == made_up_us(fastest)


@BOTH
def test_candidates_that_do_not_compile_are_left_out(key: Key) -> None:
    def measure(plan: Plan) -> float:
        if any(tiles.num_warps == 2 for tiles in plan.values()):
            raise RuntimeError("out of resources")
        return made_up_us(plan)

    plan, _ = find(paths_of(key), measure, quiet)
    assert all(tiles.num_warps != 2 for tiles in plan.values())


@ALL
def test_every_candidate_is_compiled_ahead(key: Key) -> None:
    for path in paths_of(key):
        ahead = {launch: {plan[launch] for plan in plans_to_compile(path)} for launch in path.candidates}
        assert ahead == {launch: set(options) for launch, options in path.candidates.items()}


@ALL
def test_what_was_found_is_written_so_that_it_is_looked_up_again(key: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = paths_of(key)[-1].start
    write(tmp_path, "cpu", entries_of(key, plan))
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    for cached in (configs._read, configs._choose):
        cached.cache_clear()
    for shape, tiles in entries_of(key, plan):
        assert configs.tiles_for(shape, configs.torch.device("cpu")) == tiles


def test_what_a_file_holds_beside_the_new_entries_stays(tmp_path: Path) -> None:
    (tmp_path / file_name("cpu")).write_text(json.dumps({"gpu": "cpu", "entries": [], "other": [{"a": 1}]}))
    file = write(tmp_path, "cpu", entries_of(KEYS[0], paths_of(KEYS[0])[0].start))
    document = json.loads(file.read_text())
    assert document["other"] == [{"a": 1}]
    assert len(document["entries"]) == 4


def test_ranks_of_a_model_can_be_tuned_in_one_run() -> None:
    keys = select(Wanted(ops=["moe"], models=["gptoss-20b"], tokens=[1, 8], ranks=[8, 16], adapters=[4]))
    assert {(key.tokens, key.rank, key.adapters) for key in keys} == {(t, r, 4) for t in (1, 8) for r in (8, 16)}


def test_a_layers_search_at_prefill_starts_from_the_rules_plan_and_keeps_to_tiles_the_list_can_serve() -> None:
    paths = paths_of(PREFILL)
    assert rule(layer_shape(PREFILL)) in [PrefillPlan(**path.start) for path in paths]
    for path in paths:
        (block_m,) = path.candidates["block_m"]
        for launch in ("shrink", "activate"):
            assert all(block_m % tiles.block_m == 0 for tiles in path.candidates[launch])


def test_the_fields_of_a_prefill_plan_that_belong_together_are_not_mixed() -> None:
    def us(plan: Plan) -> float:
        return plan["shrink"].num_warps + (plan["block_m"] != 64) + (plan["expand_sum"] is None)

    plan, _ = find(paths_of(PREFILL), us, quiet)
    assert (plan["block_m"], plan["expand_sum"].block_m, plan["shrink"].num_warps) == (64, 64, 4)
