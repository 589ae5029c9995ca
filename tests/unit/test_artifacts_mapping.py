"""Names as PEFT writes them find their modules; what cannot be placed is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from shared.artifacts.archive import read_bundle
from shared.artifacts.validate import ValidAdapter, rank_class, validate
from shared.contracts.base import BaseDescription, EngineLimits
from shared.errors import AdapterRejected
from tests.adapter_files import Tensors, write_adapter
from tests.adapters_factory import lora_config, make_adapter, make_base, make_limits, random_tensors

EXPERTS = ("gate_proj", "up_proj", "down_proj")


def verdict(folder: Path, base: BaseDescription, work: Path, max_rank: int = 16) -> ValidAdapter:
    return validate(read_bundle(folder, work / "work"), base, make_limits(max_rank))


def refusal_of(tensors: Tensors, base: BaseDescription, work: Path, **changes: object) -> dict[str, object]:
    with pytest.raises(AdapterRejected) as refusal:
        verdict(write_adapter(work / "in", lora_config(base, tensors, **changes), tensors), base, work)
    return refusal.value.fields


@pytest.mark.parametrize(
    ("kind", "form", "modules"),
    [("dense", "per_expert", 14), ("moe", "per_expert", 8 + 24), ("moe", "fused", 8 + 24), ("gpt_oss", "fused", 8 + 24)],
)
def test_every_module_of_a_good_adapter_is_counted(kind: str, form: str, modules: int, tmp_path: Path):
    base = make_base(kind)
    folder = make_adapter(tmp_path / "in", base, form=form, revision="v0")
    valid = verdict(folder, base, tmp_path)
    assert (valid.modules, valid.rank, valid.rank_class) == (modules, 4, 8)
    assert (valid.declared_label, valid.declared_revision) == ("tiny", "v0")


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_with_and_without_pefts_prefix_are_found(prefix: str, tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base, prefix=prefix)
    assert verdict(write_adapter(tmp_path / "in", lora_config(base, tensors), tensors), base, tmp_path).modules == 32


def test_an_expert_that_does_not_exist_is_refused(tmp_path: Path):
    base = make_base("moe")
    tensors = {name.replace(".experts.3.", ".experts.4."): t for name, t in random_tensors(base, leaves=EXPERTS).items()}
    fields = refusal_of(tensors, base, tmp_path)
    assert (fields["reason"], fields["got"], fields["expected"]) == ("unknown_expert", 4, "0..3")


def test_single_experts_on_an_interleaved_base_are_refused(tmp_path: Path):
    base = make_base("gpt_oss")
    assert refusal_of(random_tensors(base, leaves=EXPERTS), base, tmp_path)["reason"] == "unsupported_layout"


def test_a_layers_experts_both_fused_and_one_by_one_are_refused(tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base, leaves=EXPERTS) | random_tensors(base, leaves=EXPERTS, form="fused")
    assert refusal_of(tensors, base, tmp_path)["reason"] == "duplicate_tensor"


def test_fused_experts_of_another_size_name_the_tensor_and_both_shapes(tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(make_base("moe", inner=20), leaves=EXPERTS, form="fused")
    fields = refusal_of(tensors, base, tmp_path)
    assert fields["reason"] == "bad_shape"
    assert fields["tensor"] == "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight"
    assert (fields["got"], fields["expected"]) == ([40, 16], [24, 16])


def test_experts_on_a_dense_base_match_nothing(tmp_path: Path):
    tensors = random_tensors(make_base("moe"), leaves=EXPERTS)
    assert refusal_of(tensors, make_base("dense"), tmp_path)["reason"] == "no_module_matched"


@pytest.mark.parametrize(
    "key", ["q_proj", "self_attn.q_proj", r"model\.layers\.\d+\.self_attn\.q_proj", "^model.layers.0.self_attn.q_proj|q_proj"]
)
def test_ranks_by_pattern_agree_with_the_tensors(key: str, tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base, ranks={"q_proj": 6})
    folder = write_adapter(tmp_path / "in", lora_config(base, tensors, rank_pattern={key: 6}), tensors)
    assert verdict(folder, base, tmp_path).rank == 6


def test_the_fused_forms_patterns_go_by_the_parameters_names(tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base, ranks={"gate_up_proj": 8}, form="fused")
    folder = write_adapter(tmp_path / "in", lora_config(base, tensors, rank_pattern={"experts.gate_up_proj": 8}), tensors)
    assert verdict(folder, base, tmp_path).rank == 8


def test_a_rank_that_no_pattern_explains_is_refused(tmp_path: Path):
    base = make_base("moe")
    fields = refusal_of(random_tensors(base, ranks={"q_proj": 6}), base, tmp_path, rank_pattern={"q_proj": 5})
    assert (fields["reason"], fields["got"], fields["expected"]) == ("rank_mismatch", 6, 5)


def test_a_module_that_the_base_does_not_adapt_is_refused_even_among_good_ones(tmp_path: Path):
    base = make_base("moe")
    tensors = random_tensors(base)
    extra = {f"base_model.model.model.layers.0.mlp.gate.lora_{side}.weight": np.ones((4, 4), np.float32) for side in "AB"}
    fields = refusal_of(tensors | extra, base, tmp_path)
    assert (fields["reason"], fields["tensor"]) == ("unknown_module", "model.layers.0.mlp.gate")


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 40), (40, 40)])
def test_a_rank_class_is_the_smallest_that_holds_the_rank_and_the_maximum_is_one(rank: int, expected: int):
    assert rank_class(rank, EngineLimits(slots=1, max_rank=40, bytes_per_rank=1, rank_classes=(1, 8, 16, 64))) == expected
