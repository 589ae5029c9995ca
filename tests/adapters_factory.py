"""Adapters as users bring them, good ones and one of every bad kind, for any BaseDescription; folders and archives.

`make_adapter(folder, base)` writes a good one; `BAD_KINDS[name].make(base, folder)` gives the path of a bad one, to be refused
with `BAD_KINDS[name].reason`.
"""

import pickle
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.artifacts.reasons import RejectReason
from shared.contracts.base import BaseDescription, EngineLimits, Module
from tests import adapter_damage as damage
from tests.adapter_files import CONFIG, WEIGHTS, Tensors, pack, tar_bytes, write_adapter

PREFIX = "base_model.model."


def make_base(
    kind: str = "moe",
    *,
    dtype: str = "float32",
    layers: int = 2,
    hidden: int = 16,
    inner: int = 12,
    experts: int = 4,
    label: str = "tiny",
) -> BaseDescription:
    """A tiny base: "dense", "moe" (Qwen3-MoE: gate and up apart) or "gpt_oss" (interleaved)."""
    modules: list[Module] = []
    for layer in range(layers):
        attention = f"model.layers.{layer}.self_attn"
        for leaf, out in (("q_proj", hidden), ("k_proj", hidden // 2), ("v_proj", hidden // 2), ("o_proj", hidden)):
            modules.append(Module(path=f"{attention}.{leaf}", in_features=hidden, out_features=out))
        mlp = f"model.layers.{layer}.mlp" + ("" if kind == "dense" else ".experts")
        count = 0 if kind == "dense" else experts
        for leaf, (fan_in, out) in {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}.items():
            modules.append(Module(path=f"{mlp}.{leaf}", in_features=fan_in, out_features=out, experts=count))
    architecture, model_type, layout = {
        "dense": ("Qwen3ForCausalLM", "qwen3", "none"),
        "moe": ("Qwen3MoeForCausalLM", "qwen3_moe", "split"),
        "gpt_oss": ("GptOssForCausalLM", "gpt_oss", "interleaved"),
    }[kind]
    return BaseDescription(
        identity=f"{label}@{'0' * 64}",
        label=label,
        architecture=architecture,
        model_type=model_type,
        dtype=dtype,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=0 if kind == "dense" else experts,
        experts_layout=layout,
        modules=tuple(modules),
    )


def make_limits(max_rank: int = 16) -> EngineLimits:
    return EngineLimits(slots=4, max_rank=max_rank, bytes_per_rank=1000)


def random_tensors(
    base: BaseDescription,
    *,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    leaves: tuple[str, ...] | None = None,
    form: str = "per_expert",
    seed: int = 0,
    prefix: str = PREFIX,
) -> Tensors:
    """LoRA pairs in float32 for the base's modules (those whose last name is in `leaves`), experts each or "fused" as PEFT does.

    `ranks`: other ranks by last name; in the fused form gate_up_proj's and down_proj's.
    """
    rng = np.random.default_rng(seed)
    ranks = ranks or {}
    tensors: Tensors = {}

    def add(name: str, fan_in: int, out: int, r: int, experts: int = 1) -> None:
        tensors[f"{prefix}{name}.lora_A.weight"] = rng.standard_normal((experts * r, fan_in), dtype=np.float32)
        tensors[f"{prefix}{name}.lora_B.weight"] = rng.standard_normal((out, r * experts), dtype=np.float32)

    for module in base.modules:
        parent, _, leaf = module.path.rpartition(".")
        if leaves is not None and leaf not in leaves:
            continue
        r = ranks.get(leaf, rank)
        if not module.experts:
            add(module.path, module.in_features, module.out_features, r)
        elif form == "per_expert":
            for expert in range(module.experts):
                add(f"{parent}.{expert}.{leaf}", module.in_features, module.out_features, r)
        elif leaf == "gate_proj":
            r = ranks.get("gate_up_proj", rank)
            add(f"{parent}.base_layer", module.in_features, 2 * module.out_features, r, module.experts)
        elif leaf == "down_proj":
            add(parent, module.in_features, module.out_features, r, module.experts)
    return tensors


def default_form(base: BaseDescription) -> str:
    return "fused" if base.experts_layout == "interleaved" else "per_expert"


def lora_config(base: BaseDescription, tensors: Tensors, **changes: Any) -> dict[str, Any]:
    """What PEFT writes beside the tensors."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21.0",
        "base_model_name_or_path": base.label,
        "revision": None,
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}),
        "target_parameters": None,
        "use_rslora": False,
        "use_dora": False,
        "layers_to_transform": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return config | changes


def make_adapter(
    folder: Path,
    base: BaseDescription,
    *,
    rank: int = 4,
    leaves: tuple[str, ...] | None = None,
    form: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A good adapter's folder; `changes` go into its adapter_config.json."""
    tensors = random_tensors(base, rank=rank, leaves=leaves, form=form or default_form(base), seed=seed)
    return write_adapter(folder, lora_config(base, tensors, **{"r": rank, **changes}), tensors, dtype)


@dataclass(frozen=True, kw_only=True)
class BadKind:
    reason: RejectReason
    make: Callable[[BaseDescription, Path], Path]


def _config(reason: RejectReason, **changes: Any) -> BadKind:
    return BadKind(reason=reason, make=lambda base, folder: make_adapter(folder, base, **changes))


def _edited(reason: RejectReason, edit: Callable[[Path], Any]) -> BadKind:
    """A good adapter whose folder was then spoilt."""

    def make(base: BaseDescription, folder: Path) -> Path:
        edit(make_adapter(folder, base))
        return folder

    return BadKind(reason=reason, make=make)


def _tensors(reason: RejectReason, edit: Callable[[BaseDescription, Tensors], Tensors]) -> BadKind:
    """A good adapter's tensors, renamed or reshaped."""

    def make(base: BaseDescription, folder: Path) -> Path:
        tensors = edit(base, random_tensors(base, form=default_form(base)))
        return write_adapter(folder, lora_config(base, tensors), tensors)

    return BadKind(reason=reason, make=make)


def _archive(reason: RejectReason, build: Callable[[Path], bytes]) -> BadKind:
    def make(base: BaseDescription, folder: Path) -> Path:
        content = build(make_adapter(folder / "good", base))
        path = folder / "upload.bin"
        path.write_bytes(content)
        return path

    return BadKind(reason=reason, make=make)


def _renamed(old: str, new: str) -> Callable[[BaseDescription, Tensors], Tensors]:
    return lambda _base, tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _only_first_pair(tensors: Tensors, name: str) -> Tensors:
    a, b = list(tensors.values())[:2]
    return {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}


def _reshaped(_base: BaseDescription, tensors: Tensors) -> Tensors:
    name = next(iter(tensors))
    return tensors | {name: np.ones((tensors[name].shape[0], tensors[name].shape[1] + 8), np.float32)}


def _without_b(_base: BaseDescription, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != list(tensors)[1]}


def _rank_big(base: BaseDescription, folder: Path) -> Path:
    return make_adapter(folder, base, rank=1024, leaves=("q_proj",))


def _several(folder: Path) -> bytes:
    return tar_bytes(damage.members(folder, "sales/") | damage.members(folder, "support/"))


BAD_KINDS: dict[str, BadKind] = {
    "empty upload": _archive(RejectReason.EMPTY, lambda _: b""),
    "archive of nothing": _archive(RejectReason.EMPTY, lambda _: tar_bytes({})),
    "zip of nothing": _archive(RejectReason.EMPTY, lambda _: b"PK\x05\x06" + bytes(18)),
    "not an archive": _archive(RejectReason.BAD_ARCHIVE, lambda _: b"hello, adapter " * 100),
    "name twice in a tar": _archive(RejectReason.BAD_ARCHIVE, lambda f: tar_bytes(damage.members(f) | {"./" + CONFIG: b"{}"})),
    "tar cut off": _archive(RejectReason.TRUNCATED_ARCHIVE, lambda f: pack(f, "tar")[:3000]),
    "tar.gz cut off": _archive(RejectReason.TRUNCATED_ARCHIVE, lambda f: pack(f, "tar.gz")[:-400]),
    "zip cut off": _archive(RejectReason.TRUNCATED_ARCHIVE, lambda f: pack(f, "zip")[:-100]),
    "dot-dot in a tar": _archive(RejectReason.UNSAFE_PATH, lambda f: tar_bytes({"../evil": b"x"} | damage.members(f))),
    "absolute path in a tar": _archive(RejectReason.UNSAFE_PATH, lambda f: tar_bytes({"/etc/evil": b"x"} | damage.members(f))),
    "backslash in a tar": _archive(RejectReason.UNSAFE_PATH, lambda f: tar_bytes({"..\\evil": b"x"} | damage.members(f))),
    "dot-dot in a zip": _archive(RejectReason.UNSAFE_PATH, lambda f: damage.zip_member(f, "a/../../evil")),
    "absolute path in a zip": _archive(RejectReason.UNSAFE_PATH, lambda f: damage.zip_member(f, "/etc/evil")),
    "symlink in a tar": _archive(
        RejectReason.LINK_OR_DEVICE, lambda f: tar_bytes(damage.members(f), (damage.link("x", "/etc/passwd", tarfile.SYMTYPE),))
    ),
    "hard link in a tar": _archive(
        RejectReason.LINK_OR_DEVICE, lambda f: tar_bytes(damage.members(f), (damage.link("x", CONFIG, tarfile.LNKTYPE),))
    ),
    "device in a tar": _archive(
        RejectReason.LINK_OR_DEVICE, lambda f: tar_bytes(damage.members(f), (damage.link("x", "", tarfile.CHRTYPE),))
    ),
    "symlink in a zip": _archive(RejectReason.LINK_OR_DEVICE, damage.zip_link),
    "symlink in a folder": _edited(
        RejectReason.LINK_OR_DEVICE,
        lambda f: [(f / CONFIG).rename(f / "real.json"), (f / CONFIG).symlink_to(f / "real.json")],
    ),
    "gzip bomb": _archive(RejectReason.ARCHIVE_BOMB, damage.gzip_bomb),
    "zip bomb": _archive(RejectReason.ARCHIVE_BOMB, damage.zip_bomb),
    "very many members": _archive(
        RejectReason.ARCHIVE_BOMB, lambda f: tar_bytes({f"file{n}": b"" for n in range(5000)} | damage.members(f))
    ),
    "config of two megabytes": _edited(RejectReason.FILE_TOO_BIG, lambda f: (f / CONFIG).write_bytes(b" " * (2 << 20))),
    "several adapters": _archive(RejectReason.SEVERAL_ADAPTERS, _several),
    "no config": _edited(RejectReason.MISSING_CONFIG, lambda f: (f / CONFIG).unlink()),
    "no weights": _edited(RejectReason.MISSING_WEIGHTS, lambda f: (f / WEIGHTS).unlink()),
    "pickle instead of safetensors": _edited(RejectReason.PICKLE, damage.to_pickle),
    "pickle named safetensors": _edited(
        RejectReason.PICKLE, lambda f: (f / WEIGHTS).write_bytes(pickle.dumps({"weights": [1.0] * 100}, protocol=4))
    ),
    "torch zip named safetensors": _edited(RejectReason.PICKLE, damage.to_zip_in_disguise),
    "config that is not JSON": _edited(RejectReason.BAD_CONFIG, lambda f: (f / CONFIG).write_text("{'r': 4}")),
    "config that is a list": _edited(RejectReason.BAD_CONFIG, lambda f: (f / CONFIG).write_text("[]")),
    "rank of zero": _config(RejectReason.BAD_CONFIG, r=0),
    "alpha missing": _config(RejectReason.BAD_CONFIG, lora_alpha=None),
    "pattern that takes forever": _config(RejectReason.BAD_CONFIG, rank_pattern={"(a+)+b": 4}),
    "prompt tuning": _config(RejectReason.NOT_LORA, peft_type="PROMPT_TUNING"),
    "DoRA": _config(RejectReason.DORA, use_dora=True),
    "modules_to_save": _config(RejectReason.MODULES_TO_SAVE, modules_to_save=["lm_head"]),
    "bias": _config(RejectReason.BIAS, bias="all"),
    "lora_bias": _config(RejectReason.BIAS, lora_bias=True),
    "new tokens": _config(RejectReason.NEW_TOKENS, trainable_token_indices=[1, 2]),
    "activated LoRA": _config(RejectReason.UNSUPPORTED_FEATURE, alora_invocation_tokens=[1]),
    "PiSSA": _config(RejectReason.UNSUPPORTED_FEATURE, init_lora_weights="pissa_niter_4"),
    "weights cut off": _edited(RejectReason.TRUNCATED_WEIGHTS, lambda f: damage.cut(f / WEIGHTS, 0.5)),
    "weights of no bytes": _edited(RejectReason.TRUNCATED_WEIGHTS, lambda f: (f / WEIGHTS).write_bytes(b"")),
    "tensor beyond the file": _edited(RejectReason.TRUNCATED_WEIGHTS, lambda f: damage.swap_header(f, damage.out_of_range)),
    "header that is not JSON": _edited(RejectReason.BAD_WEIGHTS, lambda f: (f / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"oops")),
    "header of a terabyte": _edited(RejectReason.BAD_WEIGHTS, lambda f: (f / WEIGHTS).write_bytes((1 << 40).to_bytes(8, "little") + b"{}")),
    "tensors that overlap": _edited(RejectReason.BAD_WEIGHTS, lambda f: damage.swap_header(f, damage.overlap)),
    "bytes after the tensors": _edited(RejectReason.BAD_WEIGHTS, lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes() + b"more")),
    "unknown dtype": _edited(RejectReason.BAD_DTYPE, lambda f: damage.swap_header(f, lambda header: damage.first(header, dtype="F31"))),
    "float64": BadKind(reason=RejectReason.BAD_DTYPE, make=lambda base, f: make_adapter(f, base, dtype="float64")),
    "NaN": _edited(RejectReason.NOT_FINITE, lambda f: damage.set_value(f, float("nan"))),
    "infinity": _edited(RejectReason.NOT_FINITE, lambda f: damage.set_value(f, float("-inf"))),
    "all zeros": _tensors(RejectReason.DOES_NOTHING, lambda _, t: {name: tensor * 0 for name, tensor in t.items()}),
    "stray tensor": _tensors(RejectReason.UNKNOWN_TENSOR, lambda _, t: t | {"optimizer.step": np.ones(1)}),
    "lora_B bias tensor": _tensors(RejectReason.BIAS, lambda _, t: t | {"model.x.lora_B.bias": np.ones(4)}),
    "DoRA tensor": _tensors(RejectReason.DORA, lambda _, t: t | {"model.x.lora_magnitude_vector": np.ones(4)}),
    "layers that do not exist": _tensors(RejectReason.UNKNOWN_LAYER, _renamed(".layers.1.", ".layers.97.")),
    "unknown module": _tensors(RejectReason.UNKNOWN_MODULE, _renamed("q_proj", "qq_proj")),
    "no module matched": _tensors(RejectReason.NO_MODULE_MATCHED, _renamed("model.layers.", "transformer.h.")),
    "no tensors": _tensors(RejectReason.NO_MODULE_MATCHED, lambda _base, _tensors: {}),
    "output layer": _tensors(RejectReason.EMBEDDINGS, lambda _, t: t | _only_first_pair(t, "lm_head")),
    "embeddings": _tensors(RejectReason.EMBEDDINGS, lambda _, t: t | {PREFIX + "model.embed_tokens.lora_embedding_A": np.ones((4, 9))}),
    "router gate": _tensors(RejectReason.UNKNOWN_MODULE, lambda _, t: t | _only_first_pair(t, "model.layers.0.mlp.gate")),
    "same side twice": _tensors(RejectReason.DUPLICATE_TENSOR, lambda _, t: t | {name.removeprefix(PREFIX): v for name, v in t.items()}),
    "lora_B missing": _tensors(RejectReason.MISSING_PARTNER, _without_b),
    "wrong shape": _tensors(RejectReason.BAD_SHAPE, _reshaped),
    "rank not the config's": _config(RejectReason.RANK_MISMATCH, r=8),
    "rank too big": BadKind(reason=RejectReason.RANK_TOO_BIG, make=_rank_big),
}
