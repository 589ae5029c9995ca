"""A model folder without weights: configuration, tokenizer, and a weight file that is a header over a hole.

The engine fills its tensors from a seed (random_weights.py), so that nothing of gigabytes is written or read. What stands for the
content's hash is the configuration and the seed.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from benchmarks.serving.shapes import checkpoint_tensors

_ELEMENT_BYTES = {"BF16": 2, "U8": 1}


def write_model(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """The folder; beside it `hashes.json` says what the worker would otherwise read the weights for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, config["vocab_size"])
    weights = folder / "model.safetensors"
    _write_header(weights, config)
    status = weights.stat()
    entry = {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": identity(config, seed)}
    hash_cache(folder).write_text(json.dumps({str(weights.resolve()): entry}))
    return folder


def hash_cache(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.hashes.json"


def identity(config: dict[str, Any], seed: int) -> str:
    """Of the random weights: two runs with the same configuration and seed serve the same base."""
    return hashlib.sha256(json.dumps({"config": config, "seed": seed}, sort_keys=True).encode()).hexdigest()


def _write_header(path: Path, config: dict[str, Any]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, shape, dtype in checkpoint_tensors(config):
        start, end = end, end + _ELEMENT_BYTES[dtype] * _product(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word for each id. Prompts are token ids, so that only its decoding is used."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{number}": number for number in range(vocabulary)}, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
