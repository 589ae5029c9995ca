"""The image of an adapter's slot: the bytes that the engine's slot tensors will hold, made from the adapter's files without the engine.

Mounting is then only a copy. Knows neither torch nor vLLM; runs in the stager's process.
"""

import math
import mmap
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.artifacts.tensors import DTYPE_CODES, NUMPY_DTYPES, TensorInfo, read_header
from shared.errors import LoadFailed, TenantryError

PIECE_BYTES = 1 << 20
"""One transfer to the device, and what one checksum is over: small enough that a step's own transfers hardly wait behind it."""

_ALIGN = 256
_TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
Bytes = npt.NDArray[np.uint8]


class Form(StrEnum):
    PLAIN = "plain"
    EXPERTS = "experts"  # one pair of tensors for each expert
    FUSED = "fused"  # all experts in one: A [experts * rank, in], B [out, rank * experts] with the expert fastest


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One slot tensor's place in the image."""

    module: str  # as the engine names it
    side: str  # A | B
    form: Form
    shape: tuple[int, int, int]  # of one slot: [experts or 1, rows, columns]; A: rows are ranks, B: columns are
    sources: tuple[str, ...]  # the adapter's modules that go in; EXPERTS: one for each expert
    offset: int = 0


class SlotLayout(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str  # float32 | float16 | bfloat16
    max_rank: int
    parts: tuple[Part, ...]
    image_bytes: int

    def part_bytes(self, part: Part) -> int:
        return math.prod(part.shape) * NUMPY_DTYPES[DTYPE_CODES[self.dtype]].itemsize


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    modules: tuple[str, ...]  # the engine's modules that the adapter changes
    sums: tuple[int, ...]  # by part and piece: its 32-bit words, signed, added up
    true_bytes: int  # of the adapter's tensors in the engine's dtype
    file_bytes: int


class _Config(msgspec.Struct, frozen=True):
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    modules_to_save: list[str] | None = None

    @property
    def scaling(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def place(dtype: str, max_rank: int, parts: list[Part]) -> SlotLayout:
    """The parts one after another."""
    item_bytes = NUMPY_DTYPES[DTYPE_CODES[dtype]].itemsize
    placed: list[Part] = []
    end = 0
    for part in parts:
        placed.append(msgspec.structs.replace(part, offset=end))
        end += -(-math.prod(part.shape) * item_bytes // _ALIGN) * _ALIGN
    return SlotLayout(dtype=dtype, max_rank=max_rank, parts=tuple(placed), image_bytes=end)


def pack(folder: Path, layout: SlotLayout, image: Bytes) -> Packed:
    """Writes all of `image`, which may hold another adapter's bytes.

    :raises LoadFailed: what is in the folder does not fit the engine's slots.
    """
    config = _read_config(folder, layout.max_rank)
    weights = folder / "adapter_model.safetensors"
    tensors = _read_names(weights)
    found = _check_places(layout, tensors)
    with weights.open("rb") as file:
        packer = _Packer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), config, layout)
    sums: list[int] = []
    for part in layout.parts:
        here = image[part.offset : part.offset + layout.part_bytes(part)]
        packer.fill(part, tensors, here)
        sums.extend(sums_of(here))
    item_bytes = NUMPY_DTYPES[DTYPE_CODES[layout.dtype]].itemsize
    return Packed(
        rank=config.r,
        modules=found,
        sums=tuple(sums),
        true_bytes=sum(tensor.count for sides in tensors.values() for tensor in sides.values()) * item_bytes,
        file_bytes=weights.stat().st_size,
    )


def sums_of(part: Bytes) -> list[int]:
    words = part.view(np.int32)
    step = PIECE_BYTES // 4
    return [int(words[first : first + step].sum(dtype=np.int64)) for first in range(0, len(words), step)]


class _Packer:
    def __init__(self, content: mmap.mmap, config: _Config, layout: SlotLayout) -> None:
        self._content = content
        self._rank = config.r
        self._scaling = np.float32(config.scaling)
        self._dtype = NUMPY_DTYPES[DTYPE_CODES[layout.dtype]]

    def fill(self, part: Part, tensors: dict[str, dict[str, TensorInfo]], here: Bytes) -> None:
        slot = here.view(self._dtype).reshape(part.shape)
        given = [self._values(tensors[source][part.side], part) if source in tensors else None for source in part.sources]
        if any(values is None or values.shape != part.shape[-values.ndim :] for values in given):
            here[:] = 0
        for index, values in enumerate(given):
            if values is not None:
                target = slot if part.form is Form.FUSED else slot[index]
                target[tuple(slice(0, size) for size in values.shape)] = values

    def _values(self, tensor: TensorInfo, part: Part) -> npt.NDArray[Any]:
        """[rank, columns] or [rows, rank]; fused: with the experts before that. Without a copy unless something changes."""
        experts, rows, columns = part.shape
        many = experts if part.form is Form.FUSED else 1
        wanted = (many * self._rank, columns) if part.side == "A" else (rows, self._rank * many)
        ranks, other = (0, 1) if part.side == "A" else (1, 0)
        fits = len(tensor.shape) == 2 and tensor.shape[ranks] == wanted[ranks]
        if not fits or (tensor.shape[other] != wanted[other] and (part.form is Form.PLAIN or tensor.shape[other] > wanted[other])):
            # An engine may pad its experts' dimensions; their adapters' stay what they are.
            raise _refused(f"{tensor.name} has shape {list(tensor.shape)}, its place in the engine {list(wanted)}")
        values = np.frombuffer(self._content, NUMPY_DTYPES[tensor.dtype], tensor.count, tensor.start).reshape(tensor.shape)
        if part.side == "A":
            return values.reshape(experts, self._rank, -1) if part.form is Form.FUSED else values
        values = values.astype(self._dtype, copy=False)
        if self._scaling != 1.0:
            values = (values.astype(np.float32) * self._scaling).astype(self._dtype)
        return values.reshape(-1, self._rank, experts).transpose(2, 0, 1) if part.form is Form.FUSED else values


def _read_config(folder: Path, max_rank: int) -> _Config:
    try:
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise _refused(f"adapter_config.json cannot be read: {error}") from error
    if not 0 < config.r <= max_rank:
        raise _refused(f"rank {config.r} is not one of 1 to {max_rank}")
    for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if getattr(config, name):
            raise _refused(f"adapter_config.json has {name}: only normalised adapters are mounted")
    if config.bias != "none":
        raise _refused("adapters with biases are not served")
    return config


def _read_names(weights: Path) -> dict[str, dict[str, TensorInfo]]:
    try:
        header = read_header(weights)
    except (OSError, TenantryError) as error:
        raise _refused(f"adapter_model.safetensors cannot be read: {error}") from error
    tensors: dict[str, dict[str, TensorInfo]] = {}
    for tensor in header:
        match = _TENSOR_NAME.fullmatch(tensor.name)
        if match is None or tensor.dtype not in NUMPY_DTYPES:
            raise _refused(f"{tensor.name} ({tensor.dtype}) is not a LoRA tensor")
        tensors.setdefault(match["module"], {})[match["side"]] = tensor
    for module, sides in tensors.items():
        if len(sides) != 2:
            raise _refused(f"{module} has only one of lora_A and lora_B")
    return tensors


def _check_places(layout: SlotLayout, tensors: dict[str, dict[str, TensorInfo]]) -> tuple[str, ...]:
    """The engine's modules that the tensors are for.

    :raises LoadFailed: the engine has no place for one of them.
    """
    places: dict[str, str] = {source: part.module for part in layout.parts for source in part.sources}
    unmatched = sorted(module for module in tensors if module not in places)
    if len(unmatched) == len(tensors):
        raise LoadFailed("no module of the base matches the adapter's", reason="no_module_matched", unmatched=unmatched[:5])
    if unmatched:
        raise LoadFailed(f"the base has no place for {unmatched[0]}", reason="unmatched_modules", unmatched=unmatched[:5])
    return tuple(sorted({places[module] for module in tensors}))


def _refused(message: str) -> LoadFailed:
    return LoadFailed(f"the engine refused the adapter: {message}", reason="refused_by_engine")
