"""Whatever layout, rank, alpha or dtype came, the normalised adapter is the same update of the base's weights."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shared.artifacts.archive import read_bundle
from shared.artifacts.bundle import Bundle
from shared.artifacts.normalise import NormalisedAdapter, normalise
from shared.artifacts.tensors import read_header, read_tensor
from shared.artifacts.validate import ValidAdapter, validate
from shared.contracts.base import BaseDescription
from shared.errors import AdapterRejected
from tests.adapter_files import CONFIG, NUMPY, WEIGHTS, Tensors, pack, write_adapter
from tests.adapters_factory import PREFIX, lora_config, make_adapter, make_base, make_limits, random_tensors

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def run(folder: Path, base: BaseDescription, work: Path) -> tuple[Bundle, ValidAdapter, NormalisedAdapter]:
    bundle = read_bundle(folder, work / "bundle")
    valid = validate(bundle, base, make_limits(max_rank=64))
    return bundle, valid, normalise(bundle, valid, base, work / "out")


def loaded(root: Path) -> Tensors:
    path = root / WEIGHTS
    return {tensor.name.removeprefix(PREFIX): read_tensor(path, tensor) for tensor in read_header(path)}


def deltas(tensors: Tensors, base: BaseDescription, scale: Any) -> dict[str, np.ndarray]:
    """Every module's update in float64 by PEFT's own formulas, experts one by one; `scale(name, rank)` is the factor."""
    found: dict[str, np.ndarray] = {}
    for name in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        a = tensors[f"{name}.lora_A.weight"].astype(np.float64)
        b = tensors[f"{name}.lora_B.weight"].astype(np.float64)
        if not name.endswith((".experts", ".base_layer")):
            found[name] = scale(name, a.shape[0]) * (b @ a)
            continue
        experts = name.removesuffix(".base_layer")
        leaf = "gate_up_proj" if name.endswith(".base_layer") else "down_proj"
        r = a.shape[0] // base.num_experts
        stacked = np.einsum(
            "ore,eri->eoi",
            b.reshape(b.shape[0], r, base.num_experts),
            a.reshape(base.num_experts, r, a.shape[1]),
        )
        for expert, delta in enumerate(stacked * scale(f"{experts}.{leaf}", r)):
            if leaf == "down_proj":
                found[f"{experts}.{expert}.down_proj"] = delta
            elif base.experts_layout == "interleaved":
                found[f"{experts}.{expert}.gate_proj"] = delta[0::2]
                found[f"{experts}.{expert}.up_proj"] = delta[1::2]
            else:
                half = delta.shape[0] // 2
                found[f"{experts}.{expert}.gate_proj"] = delta[:half]
                found[f"{experts}.{expert}.up_proj"] = delta[half:]
    return found


def one(_name: str, _rank: int) -> float:
    return 1.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_normalised_adapter_is_the_same_update_of_the_base(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    kind, form = data.draw(st.sampled_from([("dense", "per_expert"), ("moe", "per_expert"), ("moe", "fused"), ("gpt_oss", "fused")]))
    base = make_base(kind)
    ranks = data.draw(st.dictionaries(st.sampled_from((*ATTENTION, *EXPERTS, "gate_up_proj")), st.integers(1, 6)))
    alphas = data.draw(st.dictionaries(st.sampled_from((*ATTENTION, *EXPERTS, "gate_up_proj")), st.integers(1, 32)))
    rank, alpha = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 32))
    uses_rslora = data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    source_ranks = ranks | ({"gate_proj": ranks.get("gate_up_proj", rank)} if form == "fused" else {})
    tensors = random_tensors(base, rank=rank, ranks=source_ranks, form=form, seed=data.draw(st.integers(0, 99)))
    config = lora_config(base, tensors, r=rank, lora_alpha=alpha, use_rslora=uses_rslora, rank_pattern=ranks, alpha_pattern=alphas)
    work = tmp_path_factory.mktemp("normalise")
    _, valid, done = run(write_adapter(work / "in", config, tensors, dtype), base, work)

    def scale(name: str, r: int) -> float:
        used = alphas.get(name.rsplit(".", 1)[-1], alpha)
        return used / math.sqrt(r) if uses_rslora else used / r

    stored = {name.removeprefix(PREFIX): tensor.astype(NUMPY[dtype]) for name, tensor in tensors.items()}
    expected, got = deltas(stored, base, scale), deltas(loaded(done.root), base, one)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert valid.rank == max(tensor.shape[0] // (1 if "experts.lora" not in n and "base_layer" not in n else base.num_experts)
                             for n, tensor in tensors.items() if "lora_A" in n)  # fmt: skip


def test_old_pefts_transposed_experts_are_told_by_their_shapes(tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base, leaves=EXPERTS, form="fused")
    old: Tensors = {}
    for name in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        e, r = base.num_experts, 4
        old[f"{name}.lora_A.weight"] = b.reshape(-1, r, e).transpose(2, 1, 0).reshape(e * r, -1)
        old[f"{name}.lora_B.weight"] = a.reshape(e, r, -1).transpose(2, 1, 0).reshape(-1, r * e)
    new_folder = write_adapter(tmp_path / "new", lora_config(base, tensors), tensors)
    old_folder = write_adapter(tmp_path / "old", lora_config(base, old, peft_version="0.18.1"), old)
    _, _, of_new = run(new_folder, base, tmp_path / "a")
    _, _, of_old = run(old_folder, base, tmp_path / "b")
    assert of_old.digest == of_new.digest


def test_where_sizes_cannot_tell_the_axis_order_peft_version_does(tmp_path: Path):
    base = make_base("moe", hidden=16, inner=8)  # gate_up is [16, 16]
    tensors = random_tensors(base, leaves=EXPERTS, form="fused")
    digests = {}
    for version in ("0.18.1", "0.19.0", "0.20.0", "0.21.0"):
        folder = write_adapter(tmp_path / version, lora_config(base, tensors, peft_version=version), tensors)
        _, _, done = run(folder, base, tmp_path / f"work{version}")
        digests[version] = done.digest
    assert digests["0.18.1"] == digests["0.19.0"] != digests["0.20.0"] == digests["0.21.0"]
    folder = write_adapter(tmp_path / "unknown", lora_config(base, tensors, peft_version=None), tensors)
    with pytest.raises(AdapterRejected) as refusal:
        run(folder, base, tmp_path / "work")
    assert refusal.value.fields["reason"] == "ambiguous_layout"


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_a_single_fused_parameter_is_recognised_and_the_other_is_filled_with_zeros(target: str, tmp_path: Path):
    base = make_base("moe")
    whole = random_tensors(base, leaves=EXPERTS, form="fused")
    if target == "gate_up_proj":
        tensors = {name.replace(".base_layer", ""): tensor for name, tensor in whole.items() if "base_layer" in name}
    else:
        tensors = {name: tensor for name, tensor in whole.items() if "base_layer" not in name}
    _, _, done = run(write_adapter(tmp_path / "in", lora_config(base, tensors), tensors), base, tmp_path)
    of_whole = run(write_adapter(tmp_path / "whole", lora_config(base, whole), whole), base, tmp_path / "w")[2]
    changed = EXPERTS[:2] if target == "gate_up_proj" else EXPERTS[2:]
    got, expected = loaded(done.root), loaded(of_whole.root)
    assert got.keys() == expected.keys()
    for name in expected:
        wanted = expected[name] if name.split(".lora_")[0].rsplit(".", 1)[1] in changed else 0 * expected[name]
        np.testing.assert_array_equal(got[name], wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_engine_gets_one_rank_one_dtype_and_a_scaling_of_one(dtype: str, tmp_path: Path):
    base = make_base("moe", dtype=dtype)
    tensors = random_tensors(base, rank=4, ranks={"q_proj": 7})
    folder = write_adapter(tmp_path / "in", lora_config(base, tensors, rank_pattern={"q_proj": 7}), tensors)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    _, valid, done = run(folder, base, tmp_path)
    config = json.loads((done.root / CONFIG).read_text())
    assert (valid.rank, valid.rank_class, done.rank) == (7, 8, 7)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (7, 7, False)
    assert config["base_model_name_or_path"] == base.identity
    assert config["target_modules"] == sorted((*ATTENTION, *EXPERTS))
    assert {t.shape[0 if "lora_A" in name else 1] for name, t in loaded(done.root).items()} == {7}
    assert {tensor.dtype for tensor in loaded(done.root).values()} == {np.dtype(NUMPY[dtype])}
    assert (done.root / "chat_template.jinja").read_text() == "{{ messages }}"
    assert valid.true_bytes == sum(t.size for t in tensors.values()) * np.dtype(NUMPY[dtype]).itemsize


def test_experts_that_the_adapter_leaves_out_are_there_as_zeros(tmp_path: Path):
    base = make_base("moe")
    tensors = {n: t for n, t in random_tensors(base, leaves=("gate_proj",)).items() if ".layers.0.mlp.experts.2." in n}
    _, valid, done = run(write_adapter(tmp_path / "in", lora_config(base, tensors), tensors), base, tmp_path)
    got = loaded(done.root)
    assert valid.modules == 1
    assert len(got) == base.num_experts * 3 * 2
    assert {name for name, tensor in got.items() if tensor.any()} == {name.removeprefix(PREFIX) for name in tensors}


def test_the_same_artifact_gives_the_same_bytes_whatever_it_was_packed_in(tmp_path: Path):
    base = make_base("moe")
    folder = make_adapter(tmp_path / "in", base, form="fused")
    _, _, first = run(folder, base, tmp_path / "a")
    archive = tmp_path / "upload"
    archive.write_bytes(pack(folder, "tar.gz", "top"))
    _, _, second = run(archive, base, tmp_path / "b")
    assert first.digest == second.digest
    assert first.files == second.files


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path):
    base = make_base("moe")
    _, _, done = run(make_adapter(tmp_path / "in", base), base, tmp_path)
    ours = loaded(done.root)
    with safe_open(done.root / WEIGHTS, framework="np") as theirs:
        names = theirs.keys()
        assert {name.removeprefix(PREFIX) for name in names} == set(ours)
        for name in names:
            np.testing.assert_array_equal(theirs.get_tensor(name), ours[name.removeprefix(PREFIX)])


def test_a_value_that_does_not_fit_the_bases_dtype_is_refused_and_nothing_is_left(tmp_path: Path):
    base = make_base("dense", dtype="float16")
    folder = make_adapter(tmp_path / "in", base, lora_alpha=4_000_000)
    with pytest.raises(AdapterRejected) as refusal:
        run(folder, base, tmp_path)
    assert refusal.value.fields["reason"] == "not_finite"
    assert list((tmp_path / "out").iterdir()) == []
