"""Tuned plans of expert layers: the nearest of the same layer, the rule elsewhere, errors that name file and key."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from lora_kernels import configs
from lora_kernels.configs import ConfigError, file_name, plans
from lora_kernels.configs.plans import LayerShape, plan_for
from lora_kernels.moe_prefill.plan import PrefillPlan, plan_prefill
from lora_kernels.tune.files import write_plans

CPU = torch.device("cpu")
SHAPE = LayerShape(
    dtype="bfloat16",
    rank=32,
    hidden_size=2880,
    intermediate_size=2880,
    slices=1,
    num_experts=32,
    top_k=4,
    num_adapters=8,
    num_tokens=6400,
)


def rule(shape: LayerShape) -> PrefillPlan:
    return plan_prefill(**{key: value for key, value in asdict(shape).items() if key not in ("dtype", "slices")})


TUNED = replace(rule(SHAPE), add_down=replace(rule(SHAPE).add_down, num_warps=2))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(configs.FOLDER_VARIABLE, str(tmp_path))
    plans._read.cache_clear()
    plans._choose.cache_clear()
    return tmp_path / file_name("cpu")


def test_what_was_tuned_serves_batches_of_about_its_size(file: Path) -> None:
    write_plans(file.parent, "cpu", [(SHAPE, TUNED)])
    for tokens in (3000, 6400, 12000):
        assert plan_for(replace(SHAPE, num_tokens=tokens), CPU) == TUNED


@pytest.mark.parametrize("change", [{"num_tokens": 1600, "num_adapters": 1}, {"rank": 64}, {"top_k": 8}, {"hidden_size": 4096}], ids=str)
def test_another_layer_or_a_far_batch_gets_the_plain_rule(file: Path, change: dict[str, int]) -> None:
    write_plans(file.parent, "cpu", [(SHAPE, TUNED)])
    other = replace(SHAPE, **change)
    assert plan_for(other, CPU) == rule(other)


def test_a_plan_written_again_replaces_the_old_one_and_leaves_other_entries(file: Path) -> None:
    file.write_text(json.dumps({"gpu": "cpu", "entries": [{"a": 1}]}))
    write_plans(file.parent, "cpu", [(SHAPE, TUNED), (replace(SHAPE, num_tokens=100), TUNED)])
    write_plans(file.parent, "cpu", [(SHAPE, rule(SHAPE))])
    document = json.loads(file.read_text())
    assert document["entries"] == [{"a": 1}]
    assert len(document["prefill"]) == 2
    assert plan_for(SHAPE, CPU) == rule(SHAPE)


def entry(**changes: object) -> dict:
    plan = asdict(TUNED)
    return {**asdict(SHAPE), "plan": plan, **changes}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        (json.dumps({"prefill": 3}), "prefill: expected a list"),
        (json.dumps({"prefill": [entry(rank="32")]}), r"prefill\[0\].rank: expected a whole number above 0, given '32'"),
        (json.dumps({"prefill": [entry(ranks=32)]}), r"prefill\[0\].ranks: unknown key"),
        (json.dumps({"prefill": [entry(plan=None)]}), r"prefill\[0\].plan: expected an object"),
        (json.dumps({"prefill": [entry(plan={"block_m": 64})]}), r"prefill\[0\].plan: missing"),
        (json.dumps({"prefill": [entry(plan={**asdict(TUNED), "expand_sum": 1})]}), r"prefill\[0\].plan.expand_sum: expected an object"),
        (json.dumps({"prefill": [entry(plan={**asdict(TUNED), "shrink": {"rows": 4}})]}), r"prefill\[0\].plan.shrink.rows: unknown key"),
    ],
)
def test_a_malformed_file_is_named_with_its_key(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file}: {message}"):
        plan_for(SHAPE, CPU)


def test_the_shipped_files_are_well_formed() -> None:
    folder = Path(configs.__file__).parent
    for shipped in folder.glob("*.json"):
        plans._read(str(folder), shipped.stem.replace("_", " "))
