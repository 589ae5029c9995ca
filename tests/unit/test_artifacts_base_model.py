"""A base is described by its files alone, and known by their contents."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.artifacts.base_model import default_label, describe_base
from shared.artifacts.file_hashes import FileHashes
from shared.contracts.base import BaseDescription, Module
from shared.errors import ConfigInvalid, StartFailed
from tests.adapter_files import Tensors, safetensors_bytes

H, INNER, E = 16, 12, 4


def attention(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.self_attn.q_proj.weight", (H, H)
    yield f"{prefix}.self_attn.q_proj.bias", (H,)
    yield f"{prefix}.self_attn.q_norm.weight", (4,)
    yield f"{prefix}.self_attn.v_proj.weight", (H // 2, H)
    yield f"{prefix}.input_layernorm.weight", (H,)


def split_experts(layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"model.layers.{layer}.mlp.gate.weight", (E, H)
    for expert in range(E):
        for leaf, shape in (("gate_proj", (INNER, H)), ("up_proj", (INNER, H)), ("down_proj", (H, INNER))):
            yield f"model.layers.{layer}.mlp.experts.{expert}.{leaf}.weight", shape


def stacked_experts(layer: int, *shapes: tuple[int, ...], suffix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"model.layers.{layer}.mlp.router.weight", (E, H)
    yield f"model.layers.{layer}.mlp.experts.gate_up_proj{suffix}", shapes[0]
    yield f"model.layers.{layer}.mlp.experts.gate_up_proj_bias", (E, 2 * INNER)
    yield f"model.layers.{layer}.mlp.experts.down_proj{suffix}", shapes[1]


def tensors_of(shapes: Iterator[tuple[str, tuple[int, ...]]], seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    outer = {"model.embed_tokens.weight": (64, H), "lm_head.weight": (64, H), "model.norm.weight": (H,)}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in (outer | dict(shapes)).items()}


def checkpoint(folder: Path, *shards: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"architectures": ["TinyForCausalLM"], "model_type": "tiny", "hidden_size": H, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields | config))
    (folder / "tokenizer.json").write_text("{}")
    if len(shards) == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(shards[0]))
        return folder
    weight_map = {}
    for n, shard in enumerate(shards, start=1):
        name = f"model-{n}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(shard))
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def described(folder: Path, label: str | None = "tiny", dtype: str = "float32", cache: Path | None = None) -> BaseDescription:
    return describe_base(folder, label=label, dtype=dtype, cache=cache)


def sizes(base: BaseDescription) -> dict[str, tuple[int, int, int]]:
    return {m.path.removeprefix("model.layers.0."): (m.in_features, m.out_features, m.experts) for m in base.modules}


ATTENTION_SIZES = {"self_attn.q_proj": (H, H, 0), "self_attn.v_proj": (H, H // 2, 0)}
EXPERT_SIZES = {
    "mlp.experts.gate_proj": (H, INNER, E),
    "mlp.experts.up_proj": (H, INNER, E),
    "mlp.experts.down_proj": (INNER, H, E),
}


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "moe", tensors_of((*attention(0), *split_experts(0))), num_experts=E)


def test_only_the_linear_layers_that_can_be_adapted_are_modules(moe: Path):
    base = described(moe)
    assert sizes(base) == ATTENTION_SIZES | EXPERT_SIZES
    assert (base.experts_layout, base.num_experts, base.num_layers, base.hidden_size) == ("split", E, 1, H)
    assert (base.architecture, base.model_type, base.quantization) == ("TinyForCausalLM", "tiny", "none")


def test_a_dense_base_has_no_experts(tmp_path: Path):
    mlp = [(f"model.layers.0.mlp.{leaf}.weight", (INNER, H)) for leaf in ("gate_proj", "up_proj")]
    base = described(checkpoint(tmp_path / "dense", tensors_of((*attention(0), *mlp))))
    assert (base.experts_layout, base.num_experts) == ("none", 0)
    assert Module(path="model.layers.0.mlp.up_proj", in_features=H, out_features=INNER) in base.modules


@pytest.mark.parametrize(
    ("model_type", "shapes", "suffix", "layout"),
    [
        ("qwen3_moe", ((E, 2 * INNER, H), (E, H, INNER)), "", "concatenated"),
        ("gpt_oss", ((E, H, 2 * INNER), (E, INNER, H)), "", "interleaved"),
    ],
)
def test_stacked_experts_are_the_same_modules(model_type: str, shapes: Any, suffix: str, layout: str, tmp_path: Path):
    tensors = tensors_of((*attention(0), *stacked_experts(0, *shapes, suffix=suffix)))
    base = described(checkpoint(tmp_path / "base", tensors, model_type=model_type))
    assert sizes(base) == ATTENTION_SIZES | EXPERT_SIZES
    assert base.experts_layout == layout


def test_mxfp4_blocks_count_as_the_values_they_hold(tmp_path: Path):
    shapes = ((E, 2 * INNER, 2, 16), (E, 64, 1, 16))
    tensors = tensors_of((*attention(0), *stacked_experts(0, *shapes, suffix="_blocks")))
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    base = described(checkpoint(tmp_path / "base", tensors, model_type="gpt_oss", **quantized))
    assert base.quantization == "mxfp4"
    assert sizes(base)["mlp.experts.gate_proj"] == (64, INNER, E)
    assert sizes(base)["mlp.experts.down_proj"] == (32, 64, E)


def test_shards_are_read_together_and_layers_beyond_the_models_are_left(tmp_path: Path):
    one, two, extra = tensors_of(attention(0)), dict(tensors_of(split_experts(0))), tensors_of(attention(1))
    base = described(checkpoint(tmp_path / "base", one, two | extra))
    assert sizes(base) == ATTENTION_SIZES | EXPERT_SIZES


def test_the_same_files_elsewhere_are_the_same_base(moe: Path, tmp_path: Path):
    copy = checkpoint(tmp_path / "copy", tensors_of((*attention(0), *split_experts(0))), num_experts=E, _name_or_path="x")
    assert described(copy) == described(moe)
    assert described(moe, label="other").digest == described(moe).digest


def test_other_weights_of_the_same_shapes_are_another_base(moe: Path, tmp_path: Path):
    other = checkpoint(tmp_path / "other", tensors_of((*attention(0), *split_experts(0)), seed=1), num_experts=E)
    assert described(other).modules == described(moe).modules
    assert described(other).identity != described(moe).identity


@pytest.mark.parametrize("change", ["config", "tokenizer", "dtype"])
def test_whatever_changes_an_answer_makes_another_base(change: str, moe: Path):
    before = described(moe)
    if change == "config":
        fields = json.loads((moe / "config.json").read_text())
        (moe / "config.json").write_text(json.dumps(fields | {"rope_theta": 5.0}))
    if change == "tokenizer":
        (moe / "tokenizer.json").write_text('{"added_tokens": []}')
    assert described(moe, dtype="bfloat16" if change == "dtype" else "float32").identity != before.identity


def test_a_second_description_reads_no_weights_and_a_changed_file_is_seen(moe: Path, tmp_path: Path):
    cache = tmp_path / "cache" / "hashes.json"
    first = described(moe, cache=cache)
    weights = moe / "model.safetensors"
    status = weights.stat()
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert described(moe, cache=cache) == first  # same size and mtime: the cached hash was used
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert described(moe, cache=cache).identity != first.identity


def test_a_damaged_cache_is_only_slower(moe: Path, tmp_path: Path):
    cache = tmp_path / "hashes.json"
    cache.write_text("{not json")
    assert described(moe, cache=cache) == described(moe)


def test_a_hub_snapshots_blobs_are_taken_at_their_names(tmp_path: Path):
    blob = tmp_path / "models--org--name" / "blobs" / ("ab" * 32)
    blob.parent.mkdir(parents=True)
    blob.write_text("never read")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    assert FileHashes(None).sha256(snapshot / "model.safetensors") == "ab" * 32
    assert default_label(snapshot) == "org/name"


def test_a_label_defaults_to_the_folders_name(moe: Path):
    assert described(moe, label=None).label == "moe"


@pytest.mark.parametrize(("label", "dtype"), [("a@b", "float32"), ("a b", "float32"), ("a", "auto"), ("a", "int8")])
def test_a_label_or_dtype_that_cannot_be_one_is_refused(label: str, dtype: str, moe: Path):
    with pytest.raises(ConfigInvalid):
        described(moe, label=label, dtype=dtype)


def _spoil(moe: Path, kind: str) -> None:
    weights = moe / "model.safetensors"
    if kind == "no config.json":
        (moe / "config.json").unlink()
    elif kind == "cannot be read":
        (moe / "config.json").write_text("{")
    elif kind == "only pickles":
        weights.rename(moe / "pytorch_model.bin")
    elif kind == "found none":
        weights.unlink()
    elif kind == "cut off":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif kind == "missing weight file":
        (moe / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-7.safetensors"}}')
    elif kind == "no linear layer":
        weights.write_bytes(safetensors_bytes(tensors_of(iter(()))))


@pytest.mark.parametrize(
    "kind",
    ["no config.json", "cannot be read", "only pickles", "found none", "cut off", "missing weight file", "no linear layer"],
)
def test_a_folder_that_is_no_base_is_one_clear_line(kind: str, moe: Path):
    _spoil(moe, kind)
    with pytest.raises(StartFailed) as failure:
        described(moe)
    assert kind in failure.value.message
    assert "\n" not in failure.value.message
