"""Describes a base model from its files alone: what an adapter may target, and the digest that is the base's identity."""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from shared.artifacts.file_hashes import FileHashes
from shared.artifacts.tensors import DTYPE_CODES, TensorInfo, read_header
from shared.contracts.base import BaseDescription, Module
from shared.errors import AdapterRejected, ConfigInvalid, StartFailed

_INDEX_NAME = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
# Fields of config.json that say where the files came from or what wrote them, not what they compute.
_VOLATILE_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_TOWER = re.compile(r"(?:^|\.)(visual|vision\w*|audio\w*|mtp)\.")
_WEIGHT = re.compile(r"(?P<path>.+\.(?:\w+_proj|kv_a_proj_with_mqa))\.weight")
_EXPERT_WEIGHT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+_proj|w[123])\.weight")
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<parameter>gate_up_proj|down_proj)(?P<blocks>_blocks)?")
_MXFP4_BLOCK = 32  # values that share one scale; stored two to a byte


def describe_base(model_dir: Path, label: str | None, dtype: str, cache: Path | None) -> BaseDescription:
    """Reads config.json, the tokenizer's files and the weight files' headers, and hashes their contents.

    `dtype` is the engine's compute dtype; `cache` a JSON file that keeps hashes by path, size and mtime, so that a second start
    reads no weights. Blocking: gigabytes are hashed the first time.

    :raises StartFailed: no config, no safetensors, a missing or damaged shard, nothing that can be adapted.
    :raises ConfigInvalid: a label or dtype that cannot be one.
    """
    label = label or default_label(model_dir)
    if not label or "@" in label or any(char.isspace() for char in label):
        raise ConfigInvalid(f"a base's label has no '@' or spaces; got {label!r}", where="label", got=label)
    if dtype not in DTYPE_CODES:
        raise ConfigInvalid(
            f"the engine's dtype must be one of {', '.join(DTYPE_CODES)}; got {dtype!r}",
            where="dtype",
            expected=list(DTYPE_CODES),
            got=dtype,
        )
    config = _read_config(model_dir)
    text: dict[str, Any] = config.get("text_config") or config
    shards = _shards(model_dir)
    num_layers = int(text.get("num_hidden_layers") or 0)
    model_type = str(config.get("model_type") or "")
    modules, is_fused = _modules(shards, num_layers, is_interleaved=model_type == "gpt_oss")
    quantized: dict[str, Any] = config.get("quantization_config") or {}
    quantization = str(quantized.get("quant_method") or "none")
    if not modules:
        raise StartFailed(
            f"{model_dir}: no linear layer of the checkpoint can be adapted (quantisation: {quantization})", where=str(model_dir)
        )
    has_experts = any(module.experts for module in modules)
    return BaseDescription(
        identity=f"{label}@{_identity_digest(model_dir, config, shards, dtype, quantization, cache)}",
        label=label,
        architecture=str((config.get("architectures") or [""])[0]),
        model_type=model_type,
        dtype=dtype,
        quantization=quantization,
        hidden_size=int(text.get("hidden_size") or 0),
        num_layers=num_layers,
        num_experts=max(module.experts for module in modules),
        experts_layout=_layout(has_experts, is_fused, model_type),
        modules=modules,
    )


def default_label(model_dir: Path) -> str:
    """The folder's name; for a hub snapshot (`models--ORG--NAME/snapshots/REVISION`) the repository's."""
    folder = model_dir.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return re.sub(r"[@\s]+", "-", folder.name)


def _layout(has_experts: bool, is_fused: bool, model_type: str) -> str:
    if not has_experts:
        return "none"
    if model_type == "gpt_oss":
        return "interleaved"
    return "concatenated" if is_fused else "split"


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise StartFailed(f"{model_dir} holds no config.json: not a model folder", where=str(model_dir)) from error
    except (OSError, msgspec.DecodeError) as error:
        raise StartFailed(f"{path} cannot be read: {error}", where=str(path)) from error


def _shards(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX_NAME
    if index.is_file():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, msgspec.Raw])["weight_map"]
            names = sorted(set(msgspec.json.decode(weight_map, type=dict[str, str]).values()))
        except (KeyError, msgspec.DecodeError) as error:
            raise StartFailed(f"{index} is damaged: {error}", where=str(index)) from error
        shards = [model_dir / name for name in names]
    else:
        shards = sorted(path for path in model_dir.glob("*.safetensors") if not path.name.startswith("adapter_"))
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise StartFailed(f"{model_dir}: missing weight file {', '.join(missing[:3])}; fetch the model again", where=str(model_dir))
    if not shards:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in model_dir.glob(pattern))
        found = f"only pickles ({', '.join(pickles[:3])})" if pickles else "none"
        raise StartFailed(f"{model_dir}: weights must be *.safetensors files, found {found}", where=str(model_dir))
    return shards


def _modules(shards: list[Path], num_layers: int, is_interleaved: bool) -> tuple[tuple[Module, ...], bool]:
    """The linear layers that can be adapted, sorted by path, and whether the experts lie fused."""
    found: dict[str, Module] = {}
    is_fused = False
    for shard in shards:
        try:
            tensors = read_header(shard)
        except AdapterRejected as error:
            raise StartFailed(f"{shard}: {error.message}", where=str(shard)) from error
        for tensor in tensors:
            layer = _LAYER.search(tensor.name)
            if layer is None or int(layer[1]) >= num_layers or _OTHER_TOWER.search(tensor.name):
                continue
            modules = _modules_of(tensor, is_interleaved)
            is_fused = is_fused or (bool(modules) and len(tensor.shape) > 2)
            for module in modules:
                known = found.get(module.path)
                if known is None or known.experts < module.experts:
                    found[module.path] = module
    return tuple(found[path] for path in sorted(found)), is_fused


def _modules_of(tensor: TensorInfo, is_interleaved: bool) -> list[Module]:
    if expert := _EXPERT_WEIGHT.fullmatch(tensor.name):
        path, count = f"{expert['experts']}.{expert['leaf']}", int(expert["expert"]) + 1
        return [_module(path, tensor.shape[1], tensor.shape[0], count)] if len(tensor.shape) == 2 else []
    if fused := _FUSED.fullmatch(tensor.name):
        return _fused_modules(fused, tensor, is_interleaved)
    if (dense := _WEIGHT.fullmatch(tensor.name)) and len(tensor.shape) == 2:
        return [_module(dense["path"], tensor.shape[1], tensor.shape[0], 0)]
    return []


def _fused_modules(match: re.Match[str], tensor: TensorInfo, is_interleaved: bool) -> list[Module]:
    """[E, out, in]; GPT-OSS [E, in, out], or with MXFP4 [E, out, in / 32, 16]. Gate and up count apart, whatever their order."""
    if match["blocks"] and len(tensor.shape) == 4:
        experts, out_features, in_features = tensor.shape[0], tensor.shape[1], tensor.shape[2] * _MXFP4_BLOCK
    elif len(tensor.shape) == 3 and is_interleaved:
        experts, in_features, out_features = tensor.shape
    elif len(tensor.shape) == 3:
        experts, out_features, in_features = tensor.shape
    else:
        return []
    if match["parameter"] == "down_proj":
        return [_module(f"{match['experts']}.down_proj", in_features, out_features, experts)]
    return [_module(f"{match['experts']}.{leaf}", in_features, out_features // 2, experts) for leaf in ("gate_proj", "up_proj")]


def _module(path: str, in_features: int, out_features: int, experts: int) -> Module:
    return Module(path=path, in_features=in_features, out_features=out_features, experts=experts)


def _identity_digest(model_dir: Path, config: dict[str, Any], shards: list[Path], dtype: str, quantization: str, cache: Path | None) -> str:
    """Two revisions have the same shapes, so the contents of every file that changes an answer go in; names and places do not."""
    hashes = FileHashes(cache)
    tokenizer = {name: hashes.sha256(model_dir / name) for name in _TOKENIZER_FILES if (model_dir / name).is_file()}
    weights = {shard.name: hashes.sha256(shard) for shard in shards}
    hashes.save()
    content = {
        "version": 1,
        "architecture": {field: value for field, value in config.items() if field not in _VOLATILE_FIELDS},
        "dtype": dtype,
        "quantization": quantization,
        "tokenizer": tokenizer,
        "weights": weights,
    }
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()
