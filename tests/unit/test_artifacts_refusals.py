"""Every bad artifact is refused with its own reason, before anything else sees it, and leaves nothing behind."""

from pathlib import Path

import pytest

from shared.artifacts.archive import read_bundle
from shared.artifacts.reasons import RejectReason
from shared.artifacts.validate import validate
from shared.errors import AdapterRejected
from tests.adapters_factory import BAD_KINDS, make_base, make_limits

BASES = {kind: make_base(kind) for kind in ("moe", "dense", "gpt_oss")}


@pytest.mark.parametrize("kind", BAD_KINDS)
@pytest.mark.parametrize("base", BASES)
def test_a_bad_artifact_is_refused_with_its_own_reason(base: str, kind: str, tmp_path: Path):
    bad = BAD_KINDS[kind]
    source = bad.make(BASES[base], tmp_path / "upload")
    with pytest.raises(AdapterRejected) as refusal:
        validate(read_bundle(source, tmp_path / "work"), BASES[base], make_limits())
    assert refusal.value.fields["reason"] == bad.reason.value, refusal.value.message


ARCHIVE_REASONS = {"unsafe_path", "link_or_device", "archive_bomb", "truncated_archive", "several_adapters", "missing_config"}


@pytest.mark.parametrize("kind", [name for name, bad in BAD_KINDS.items() if bad.reason.value in ARCHIVE_REASONS])
def test_a_refused_archive_leaves_no_file_behind_and_nothing_outside(kind: str, tmp_path: Path):
    source = BAD_KINDS[kind].make(BASES["moe"], tmp_path / "upload")
    before = {path for path in tmp_path.rglob("*")}
    with pytest.raises(AdapterRejected):
        read_bundle(source, tmp_path / "work")
    assert {path for path in tmp_path.rglob("*")} == before | {tmp_path / "work"}


def test_every_reason_has_an_artifact_that_earns_it():
    special = {  # each has a test of its own in test_artifacts_mapping.py
        RejectReason.UNKNOWN_EXPERT,
        RejectReason.AMBIGUOUS_LAYOUT,
        RejectReason.UNSUPPORTED_LAYOUT,
    }
    assert {bad.reason for bad in BAD_KINDS.values()} | special == set(RejectReason)


def _refusal(kind: str, tmp_path: Path) -> AdapterRejected:
    base = BASES["moe"]
    with pytest.raises(AdapterRejected) as refusal:
        validate(read_bundle(BAD_KINDS[kind].make(base, tmp_path / "upload"), tmp_path / "work"), base, make_limits())
    return refusal.value


def test_a_wrong_shape_names_the_tensor_what_was_expected_and_what_came(tmp_path: Path):
    fields = _refusal("wrong shape", tmp_path).fields
    assert fields["tensor"] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert (fields["expected"], fields["got"]) == ([4, 16], [4, 24])


def test_a_rank_that_is_too_big_names_what_was_asked_and_allowed(tmp_path: Path):
    fields = _refusal("rank too big", tmp_path).fields
    assert (fields["asked"], fields["allowed"]) == (1024, 16)


@pytest.mark.parametrize("kind", ["DoRA", "bias", "modules_to_save", "rank of zero", "PiSSA"])
def test_a_refused_config_names_the_field(kind: str, tmp_path: Path):
    fields = _refusal(kind, tmp_path).fields
    field = {"DoRA": "use_dora", "rank of zero": "r", "PiSSA": "init_lora_weights"}.get(kind, kind)
    assert fields["field"] == field
    assert "got" in fields
    assert "expected" in fields
