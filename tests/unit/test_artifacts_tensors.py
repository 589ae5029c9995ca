"""Damaged bytes of any kind end in a refusal, never in another exception; values are scanned whatever their place."""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.artifacts.archive import read_bundle
from shared.artifacts.peft_config import parse_config
from shared.artifacts.tensors import read_header, scan_tensor
from shared.artifacts.validate import validate
from shared.errors import AdapterRejected
from tests.adapter_files import NUMPY, pack, safetensors_bytes
from tests.adapters_factory import make_adapter, make_base, make_limits

BASE = make_base("moe", layers=1, experts=2)


@functools.cache
def good_archive(kind: str) -> bytes:
    with TemporaryDirectory() as work:
        return pack(make_adapter(Path(work) / "in", BASE), kind)


edits = st.lists(st.tuples(st.sampled_from(["head", "tail", "any"]), st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(kind=st.sampled_from(["tar", "tar.gz", "zip"]), edits=edits)
def test_damage_anywhere_in_an_archive_is_a_refusal_or_changes_nothing_that_counts(kind: str, edits: list[tuple[str, int, int]]):
    raw = bytearray(good_archive(kind))
    for where, offset, value in edits:
        at = {"head": offset % 600, "tail": -1 - offset % 300, "any": offset % len(raw)}[where]
        raw[at] = value
    with TemporaryDirectory() as work:
        try:
            validate(read_bundle(bytes(raw), Path(work) / "work"), BASE, make_limits())
        except AdapterRejected as refusal:
            assert refusal.fields["reason"]


@settings(max_examples=200, deadline=None)
@given(head=st.binary(max_size=200), length=st.integers(0, 300) | st.integers(0, 2**64 - 1))
def test_a_header_of_any_bytes_is_a_refusal_or_a_list(head: bytes, length: int, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("fuzz") / "adapter_model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + head)
    try:
        read_header(path)
    except AdapterRejected as refusal:
        assert refusal.fields["reason"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "revision", "use_rslora")


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3))
def test_a_config_with_any_values_is_a_refusal_that_names_the_field_or_a_config(changes: dict[str, object]):
    raw = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | changes).encode()
    try:
        assert parse_config(raw).r > 0
    except AdapterRejected as refusal:
        assert refusal.fields["field"].split(".")[0] in changes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("at", [0, (1 << 20) - 1, 1 << 20, -1])
def test_one_bad_value_is_found_wherever_it_is(dtype: str, value: float, at: int, tmp_path: Path):
    values = np.full((1 << 20) + 7, -1.5, dtype=np.float32)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"good": values.astype(NUMPY[dtype])}, dtype))
    assert scan_tensor(path, read_header(path)[0]).is_finite
    values[at] = value
    path.write_bytes(safetensors_bytes({"bad": values.astype(NUMPY[dtype])}, dtype))
    assert not scan_tensor(path, read_header(path)[0]).is_finite


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_numbers_of_a_dtype_are_finite_and_minus_zero_is_zero(dtype: str, tmp_path: Path):
    largest = ml_dtypes.finfo(NUMPY[dtype]).max
    path = tmp_path / "x.safetensors"
    tensors = {"large": np.array([largest, -largest], dtype=NUMPY[dtype]), "zero": np.array([0.0, -0.0], dtype=NUMPY[dtype])}
    path.write_bytes(safetensors_bytes(tensors, dtype))
    large, zero = read_header(path)
    assert scan_tensor(path, large).is_finite
    assert not scan_tensor(path, large).is_zero
    assert scan_tensor(path, zero).is_zero
