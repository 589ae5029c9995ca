"""Our LoRA path in a real vLLM 0.26 against its own path and against merged weights, with CUDA graphs on, on one GPU.

bfloat16 roundings differ between kernels, and now and then a router's near tie flips an expert; so equal means: log-probabilities of
the same tokens close on the average, few far apart, and the same greedy tokens up to a first position at which the two were likely
alike. Another adapter's answer, or the base's, differs by more than a nat on the average.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_compare import Answer, compare, from_json

HERE = Path(__file__).parent
MODELS = ("qwen3-moe", "gptoss", "qwen3")
MEAN, FAR, SHARE_FAR, NEAR_TIE = 0.06, 0.3, 0.05, 0.75
"""In nats: the most that log-probabilities may differ on the average; what counts as far, for how large a share; and the most by which a
token may have been preferred to the one that the other path took."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.26"),
    pytest.mark.timeout(900),
]

Answers = dict[str, list[Answer]]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    made = {}
    for path in ("off", "on"):
        environment = os.environ | {"TENANTRY_KERNELS": path, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "kernels"), *sys.path])}
        run = subprocess.run(
            [sys.executable, str(HERE / "vllm_answers.py"), str(folder), *MODELS],
            env=environment, capture_output=True, text=True, timeout=420, check=False,
        )  # fmt: skip
        assert run.returncode == 0, f"{path}: {run.stdout[-3000:]}\n{run.stderr[-6000:]}"
        made[path] = json.loads((folder / f"{path}.json").read_text())
    return made


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def answers(documents: dict[str, Any], path: str, model: str, kind: str = "answers") -> Answers:
    return {batch: [from_json(row) for row in rows] for batch, rows in documents[path]["models"][model][kind].items()}


def assert_equal(one: list[Answer], other: list[Answer], what: str) -> None:
    differences = [compare(a, b) for a, b in zip(one, other, strict=True)]
    apart = [value for difference in differences for value in difference.logprobs]
    assert sum(apart) / len(apart) <= MEAN, f"{what}: mean {sum(apart) / len(apart)}"
    assert sum(value > FAR for value in apart) / len(apart) <= SHARE_FAR, f"{what}: {sorted(apart)[-20:]}"
    assert max(difference.margin for difference in differences) <= NEAR_TIE, f"{what}: {[d.margin for d in differences]}"


def test_each_path_is_the_one_that_was_asked_for(documents: dict[str, Any], model: str) -> None:
    assert documents["off"]["status"]["code"] == "off"
    assert documents["on"]["status"]["code"] == "active"
    assert documents["off"]["models"][model]["wrappers"] == ["PunicaWrapperGPU"]
    assert documents["on"]["models"][model]["wrappers"] == ["GpuLoraWrapper"]
    seams = {"qwen3-moe": ["TritonSeamExperts"], "gptoss": ["OaiLoraExperts"], "qwen3": []}
    assert documents["on"]["models"][model]["experts"] == seams[model]


def test_base_and_adapters_alone_and_mixed_answer_as_vllms_own_path(documents: dict[str, Any], model: str) -> None:
    stock, ours = answers(documents, "off", model), answers(documents, "on", model)
    for batch, rows in stock.items():
        assert_equal(rows, ours[batch], f"{model}, {batch}")


@pytest.mark.parametrize("model", ["qwen3-moe", "qwen3"])
def test_each_adapter_answers_as_the_base_with_its_weights_merged(documents: dict[str, Any], model: str) -> None:
    ours, merged = answers(documents, "on", model), answers(documents, "on", model, "merged")
    for adapter, rows in merged.items():
        assert_equal(rows, ours[adapter], f"{model}, {adapter}")


def test_base_answers_have_the_same_bits_with_and_without_adapters_beside_them(documents: dict[str, Any], model: str) -> None:
    ours = answers(documents, "on", model)
    assert ours["base beside base"][:4] == ours["base beside adapters"][:4]


def test_the_adapters_change_the_answers_and_each_in_its_own_way(documents: dict[str, Any], model: str) -> None:
    ours = answers(documents, "on", model)
    with pytest.raises(AssertionError, match="mean"):
        assert_equal(ours["a0"], ours["a1"], "two adapters")
    of_last_prompt = [rows[3].tokens for rows in (ours["base beside base"], ours["a0"], ours["a1"], ours["a2"])]
    assert len(set(of_last_prompt)) == 4


def test_a_batch_asked_again_gets_the_same_bits(documents: dict[str, Any], model: str) -> None:
    assert documents["on"]["models"][model]["repeats"]


def test_slots_can_be_seen_and_a_released_one_is_zero(documents: dict[str, Any], model: str) -> None:
    seen = documents["on"]["models"][model]["inspection"]
    before, after = seen["before"]["slots"][seen["slot"]], seen["after"]["slots"][seen["slot"]]

    assert before["lora_int_id"] == 3 and not before["all_zero"]
    assert after["lora_int_id"] is None and after["all_zero"]
    assert not seen["zeroed_in_use"] and seen["zeroed_free"]
    assert seen["before"]["slot_bytes"] * 4 == seen["before"]["total_bytes"]
    assert seen["warm_up_s"] > 0
