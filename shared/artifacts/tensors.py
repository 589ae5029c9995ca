"""safetensors files: the header checked without loading, tensors read one at a time, files written in a stream.

Format: 8 bytes header length, little-endian; JSON {name: {dtype, shape, data_offsets}}; the tensors' bytes without holes.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from shared.artifacts.digest import BundleFile
from shared.artifacts.reasons import RejectReason, rejected

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
NUMPY_DTYPES: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_MAX_HEADER_BYTES = 64 << 20
_SCAN_ITEMS = 1 << 20
# As unsigned integers: the sign bit cleared, infinities and NaNs are those at or above the exponent of all ones.
_SCAN = {"F32": ("<u4", 0x7FFFFFFF, 0x7F800000), "F16": ("<u2", 0x7FFF, 0x7C00), "BF16": ("<u2", 0x7FFF, 0x7F80)}


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor's place in its file; `start` and `end` count from the beginning of the file."""

    name: str
    dtype: str  # as in the file: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class TensorScan(msgspec.Struct, frozen=True, kw_only=True):
    is_finite: bool
    is_zero: bool


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """Every tensor of the file in file order.

    :raises AdapterRejected: pickle, truncated_weights, bad_weights, bad_dtype.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        _refuse_pickle(path.name, head)
        if len(head) < 8:
            raise _truncated(path.name, 8, size_bytes)
        header_bytes = int.from_bytes(head, "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise _damaged(path.name, f"its header claims {header_bytes} bytes, more than {_MAX_HEADER_BYTES}")
        if 8 + header_bytes > size_bytes:
            raise _truncated(path.name, 8 + header_bytes, size_bytes)
        raw = file.read(header_bytes)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path.name, f"its header is not what safetensors writes: {error}") from error
    return _placed(path.name, entries, data_start=8 + header_bytes, size_bytes=size_bytes)


def _placed(file_name: str, entries: dict[str, _Entry], data_start: int, size_bytes: int) -> tuple[TensorInfo, ...]:
    placed: list[TensorInfo] = []
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        item_bytes = ITEM_BYTES.get(entry.dtype)
        if item_bytes is None:
            raise rejected(
                RejectReason.BAD_DTYPE,
                f"{name}: unknown dtype {entry.dtype!r}",
                tensor=name,
                got=entry.dtype,
                expected=sorted(NUMPY_DTYPES),
            )
        if any(n < 0 for n in entry.shape):
            raise _damaged(file_name, f"{name} has a negative dimension")
        begin, stop = entry.data_offsets
        if data_start + begin != end:
            raise _damaged(
                file_name,
                f"{name} begins at byte {begin}, expected {end - data_start}: tensors overlap or leave holes",
            )
        if stop - begin != math.prod(entry.shape) * item_bytes:
            raise _damaged(file_name, f"{name} takes {stop - begin} bytes, not what {entry.dtype} {entry.shape} needs")
        end = data_start + stop
        placed.append(TensorInfo(name=name, dtype=entry.dtype, shape=tuple(entry.shape), start=data_start + begin, end=end))
    if end > size_bytes:
        raise _truncated(file_name, end, size_bytes)
    if end < size_bytes:
        raise _damaged(file_name, f"{size_bytes - end} bytes after the last tensor")
    return tuple(placed)


def read_tensor(path: Path, tensor: TensorInfo) -> npt.NDArray[Any]:
    """The tensor in its own dtype (F32, F16 or BF16)."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    return np.fromfile(path, dtype=dtype, count=tensor.count, offset=tensor.start).reshape(tensor.shape)


def scan_tensor(path: Path, tensor: TensorInfo) -> TensorScan:
    """Whether every value is finite, and whether all are zero; read in pieces of a million values."""
    code, magnitude, exponent = _SCAN[tensor.dtype]
    is_zero = True
    item_bytes = ITEM_BYTES[tensor.dtype]
    for first in range(0, tensor.count, _SCAN_ITEMS):
        count = min(_SCAN_ITEMS, tensor.count - first)
        values = np.fromfile(path, dtype=code, count=count, offset=tensor.start + first * item_bytes)
        values &= np.array(magnitude, dtype=code)
        largest = int(values.max())
        if largest >= exponent:
            return TensorScan(is_finite=False, is_zero=False)
        is_zero = is_zero and largest == 0
    return TensorScan(is_finite=True, is_zero=is_zero)


class PlannedTensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shape: tuple[int, ...]


def write_tensors(path: Path, dtype: str, plan: Iterable[PlannedTensor], arrays: Iterator[npt.NDArray[Any]]) -> BundleFile:
    """Writes the planned tensors in order, each taken from `arrays` only when its turn comes; the same input gives the same bytes."""
    code = DTYPE_CODES[dtype]
    item_bytes = ITEM_BYTES[code]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    planned = list(plan)
    for tensor in planned:
        begin, end = end, end + math.prod(tensor.shape) * item_bytes
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    head = len(raw).to_bytes(8, "little") + raw
    hasher = hashlib.sha256(head)
    try:
        with path.open("xb") as out:
            out.write(head)
            for tensor, array in zip(planned, arrays, strict=True):
                assert array.shape == tensor.shape
                content = np.ascontiguousarray(array, dtype=NUMPY_DTYPES[code]).tobytes()
                hasher.update(content)
                out.write(content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return BundleFile(name=path.name, size_bytes=len(head) + end, sha256=hasher.hexdigest())


def _refuse_pickle(file_name: str, head: bytes) -> None:
    """A header's length whose second byte is 2 to 5 is told from a pickle's protocol byte by the six bytes that follow."""
    is_zip = head.startswith(b"PK\x03\x04")  # what torch.save writes: a zip with a pickle inside
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and any(head[4:])
    if is_zip or is_pickle:
        raise rejected(
            RejectReason.PICKLE,
            f"{file_name} is a {'zip' if is_zip else 'pickle'}, not safetensors, whatever its name says",
            member=file_name,
        )


def _truncated(file_name: str, expected_bytes: int, got_bytes: int) -> Exception:
    return rejected(
        RejectReason.TRUNCATED_WEIGHTS,
        f"{file_name} is cut off: {got_bytes} bytes, its header needs {expected_bytes}",
        expected_bytes=expected_bytes,
        got_bytes=got_bytes,
    )


def _damaged(file_name: str, what: str) -> Exception:
    return rejected(RejectReason.BAD_WEIGHTS, f"{file_name} is damaged: {what}", file=file_name)
