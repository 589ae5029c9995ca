"""Tuned plans of whole expert layers at prefill: the list "prefill" of a GPU's file, else the rule of `moe_prefill.plan`.

An entry is a layer's shape and a plan, key by key as `LayerShape` and `PrefillPlan` have them: `{"dtype": "bfloat16", "rank": 32, ...,
"num_tokens": 6400, "plan": {"block_m": 128, ...}}`.
"""

import functools
import json
import math
import os
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from lora_kernels.configs import FOLDER_VARIABLE, ConfigError, bits, file_name, padded_rank
from lora_kernels.moe_prefill.plan import PrefillPlan, plan_prefill

NEAR = 1.5
"""Powers of two by which tokens, and adapters counted double, may differ from an entry's: farther away the rule knows better. Twice
the tokens of an adapter fill twice the cache."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """slices: stacks of gate_up, 1 where gate and up are interleaved."""

    dtype: str
    rank: int
    hidden_size: int
    intermediate_size: int
    slices: int
    num_experts: int
    top_k: int
    num_adapters: int
    num_tokens: int

    def layer(self) -> tuple[int, ...]:
        """What must be an entry's own: the parts a plan cuts a layer into divide its sizes."""
        sizes = (self.hidden_size, self.intermediate_size, self.slices, self.num_experts, self.top_k)
        return (bits(self.dtype), padded_rank(self.rank), *sizes)


def plan_for(shape: LayerShape, device: torch.device) -> PrefillPlan:
    """The nearest plan tuned for this GPU and layer, or the rule's.

    :raises ConfigError: a file for this GPU is malformed.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return _choose(shape, gpu, os.environ.get(FOLDER_VARIABLE, ""))


@functools.lru_cache(maxsize=4096)
def _choose(shape: LayerShape, gpu: str, user_folder: str) -> PrefillPlan:
    for folder in (user_folder, str(Path(__file__).parent)):
        near = [(_distance(entry, shape), plan) for entry, plan in (_read(folder, gpu) if folder else ()) if entry.layer() == shape.layer()]
        near = [found for found in near if found[0] <= NEAR]
        if near:
            return min(near, key=lambda found: found[0])[1]
    return plan_prefill(
        num_tokens=shape.num_tokens,
        top_k=shape.top_k,
        num_adapters=shape.num_adapters,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        rank=shape.rank,
    )


def _distance(entry: LayerShape, shape: LayerShape) -> float:
    pairs = ((1, entry.num_tokens, shape.num_tokens), (2, entry.num_adapters, shape.num_adapters))
    return sum(weight * abs(math.log2(max(one, 1) / max(other, 1))) for weight, one, other in pairs)


@functools.lru_cache(maxsize=32)
def _read(folder: str, gpu: str) -> tuple[tuple[LayerShape, PrefillPlan], ...]:
    file = Path(folder) / file_name(gpu)
    if not file.exists():
        return ()
    try:
        document = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: expected JSON: {error}") from error
    entries = document.get("prefill", []) if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: prefill: expected a list")
    read = []
    for index, entry in enumerate(entries):
        where = f"prefill[{index}]"
        if not isinstance(entry, dict):
            raise ConfigError(f"{file}: {where}: expected an object")
        shape = _parse(LayerShape, {key: value for key, value in entry.items() if key != "plan"}, file, where)
        read.append((shape, _parse(PrefillPlan, entry.get("plan"), file, f"{where}.plan")))
    return tuple(read)


def _parse(kind: Any, given: Any, file: Path, where: str) -> Any:
    """An instance of a dataclass, an int, a bool or a text, from what JSON holds."""
    if isinstance(kind, types.UnionType):
        wanted = next(one for one in typing.get_args(kind) if one is not type(None))
        return None if given is None else _parse(wanted, given, file, where)
    if not is_dataclass(kind):
        fits = isinstance(given, kind) and (kind is bool or not isinstance(given, bool)) and (kind is not int or given >= 1)
        if not fits:
            what = {int: "a whole number above 0", bool: "true or false", str: "text"}[kind]
            raise ConfigError(f"{file}: {where}: expected {what}, given {given!r}")
        return given
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: {where}: expected an object")
    hints = typing.get_type_hints(kind)
    for key in given:
        if key not in hints:
            raise ConfigError(f"{file}: {where}.{key}: unknown key")
    parsed = {field.name: _parse(hints[field.name], given[field.name], file, f"{where}.{field.name}")
              for field in fields(kind) if field.name in given}  # fmt: skip
    try:
        return kind(**parsed)
    except TypeError as error:
        raise ConfigError(f"{file}: {where}: {str(error).split('() ')[-1]}") from error
