"""Turns whatever PEFT layout was uploaded into the one form the engine's fast path takes; the same input gives the same bytes.

One rank for all modules (the adapter's largest; A padded with zero rows, B with zero columns), every scaling folded into B in
float32 so that the engine applies 1.0, one dtype, and every expert of a layer that any tensor touches present (the engine packs
experts in full). Experts go one by one, except where the base itself interleaves gate and up (GPT-OSS): there fused, as PEFT does.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.artifacts.bundle import CHAT_TEMPLATE_NAME, CONFIG_NAME, WEIGHTS_NAME, Bundle
from shared.artifacts.digest import BundleFile, describe_file, digest_of_files
from shared.artifacts.fused import experts_of
from shared.artifacts.mapping import Form, LoraPair
from shared.artifacts.reasons import RejectReason, rejected
from shared.artifacts.tensors import DTYPE_CODES, NUMPY_DTYPES, PlannedTensor, read_tensor, write_tensors
from shared.artifacts.validate import ValidAdapter
from shared.contracts.base import BaseDescription

Array = npt.NDArray[Any]

PER_EXPERT = "per_expert"
FUSED = "fused"

_PREFIX = "base_model.model."


class NormalisedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that the engine can be given; `layout` says whether its experts lie one by one or fused."""

    root: Path
    files: tuple[BundleFile, ...]
    digest: str
    source_digest: str
    rank: int
    dtype: str
    layout: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A run of output tensors and what makes their arrays, one at a time, when it is their turn."""

    planned: tuple[PlannedTensor, ...]
    arrays: Callable[[], Iterator[Array]]


def normalise(bundle: Bundle, valid: ValidAdapter, base: BaseDescription, out_dir: Path) -> NormalisedAdapter:
    """Writes the adapter into `out_dir` (made; must not hold an adapter yet), at most one source pair in memory.

    :raises AdapterRejected: not_finite, where a value does not fit the base's dtype.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    is_fused = base.experts_layout == "interleaved"
    parts = [_part(bundle.weights_path, pair, valid, is_fused) for pair in valid.pairs]
    present = {tensor.name for part in parts for tensor in part.planned}
    parts += [_zeros(tensor) for tensor in _expected(valid, base, is_fused) if tensor.name not in present]
    planned = [tensor for part in parts for tensor in part.planned]
    arrays = (array for part in parts for array in part.arrays())
    weights = write_tensors(out_dir / WEIGHTS_NAME, base.dtype, planned, _in_dtype(planned, arrays, base.dtype))
    (out_dir / CONFIG_NAME).write_bytes(_config(planned, valid.rank, base))
    files = [weights, describe_file(out_dir / CONFIG_NAME)]
    if (bundle.root / CHAT_TEMPLATE_NAME).is_file():
        shutil.copyfile(bundle.root / CHAT_TEMPLATE_NAME, out_dir / CHAT_TEMPLATE_NAME)
        files.append(describe_file(out_dir / CHAT_TEMPLATE_NAME))
    files.sort(key=lambda file: file.name)
    return NormalisedAdapter(
        root=out_dir,
        files=tuple(files),
        digest=digest_of_files(files),
        source_digest=valid.digest,
        rank=valid.rank,
        dtype=base.dtype,
        layout=FUSED if is_fused and any(pair.form is Form.FUSED for pair in valid.pairs) else PER_EXPERT,
    )


def _config(planned: list[PlannedTensor], rank: int, base: BaseDescription) -> bytes:
    leaves = {tensor.name.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for tensor in planned}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.identity,
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "bias": "none",
        "target_modules": sorted(leaves),
    }
    return msgspec.json.format(msgspec.json.encode(config))


def _part(weights: Path, pair: LoraPair, valid: ValidAdapter, is_fused: bool) -> _Part:
    scaling = valid.config.scaling_of(pair.pattern_name, pair.rank)
    if pair.fused is None:
        name = pair.module if pair.expert is None else _expert_name(pair.module, pair.expert)
        shapes = _plan(name, pair.a.shape[1], pair.b.shape[0], valid.rank)
        return _Part(planned=shapes, arrays=lambda: _plain(weights, pair, scaling, valid.rank))
    experts = pair.fused.experts
    in_features, out_features = (pair.b.shape[0], pair.a.shape[1]) if pair.fused.is_transposed else (pair.a.shape[1], pair.b.shape[0])
    is_gate_up = pair.fused.parameter == "gate_up_proj"
    if is_fused:
        name = f"{pair.module}.base_layer" if is_gate_up else pair.module
        planned = _plan(name, in_features, out_features, valid.rank, experts)
        return _Part(planned=planned, arrays=lambda: _fused_again(weights, pair, scaling, valid.rank))
    halves = {"gate_proj": slice(0, out_features // 2), "up_proj": slice(out_features // 2, out_features)}
    rows = halves if is_gate_up else {"down_proj": slice(0, out_features)}
    planned = tuple(
        tensor
        for expert in range(experts)
        for leaf, half in rows.items()
        for tensor in _plan(_expert_name(f"{pair.module}.{leaf}", expert), in_features, half.stop - half.start, valid.rank)
    )
    return _Part(planned=planned, arrays=lambda: _expert_by_expert(weights, pair, scaling, valid.rank, list(rows.values())))


def _plan(name: str, in_features: int, out_features: int, rank: int, experts: int = 1) -> tuple[PlannedTensor, ...]:
    return (
        PlannedTensor(name=f"{_PREFIX}{name}.lora_A.weight", shape=(experts * rank, in_features)),
        PlannedTensor(name=f"{_PREFIX}{name}.lora_B.weight", shape=(out_features, rank * experts)),
    )


def _expert_name(module: str, expert: int) -> str:
    experts, leaf = module.rsplit(".", 1)
    return f"{experts}.{expert}.{leaf}"


def _plain(weights: Path, pair: LoraPair, scaling: float, rank: int) -> Iterator[Array]:
    yield _padded(read_tensor(weights, pair.a), (rank, pair.a.shape[1]))
    yield _padded(_scaled(read_tensor(weights, pair.b), scaling), (pair.b.shape[0], rank))


def _expert_by_expert(weights: Path, pair: LoraPair, scaling: float, rank: int, rows: list[slice]) -> Iterator[Array]:
    assert pair.fused is not None
    a, b = experts_of(pair.fused, read_tensor(weights, pair.a), read_tensor(weights, pair.b))
    for expert in range(pair.fused.experts):
        for part in rows:
            yield _padded(a[expert], (rank, a.shape[2]))
            yield _padded(_scaled(b[expert, part], scaling), (part.stop - part.start, rank))


def _fused_again(weights: Path, pair: LoraPair, scaling: float, rank: int) -> Iterator[Array]:
    """The fused form with every expert's rank padded: A [E * rank, in] expert-major, B [out, rank * E] expert fastest."""
    assert pair.fused is not None
    a, b = experts_of(pair.fused, read_tensor(weights, pair.a), read_tensor(weights, pair.b))
    experts, _, in_features = a.shape
    yield _padded(a, (experts, rank, in_features)).reshape(experts * rank, in_features)
    padded = _padded(_scaled(b, scaling), (experts, b.shape[1], rank))
    yield np.transpose(padded, (1, 2, 0)).reshape(b.shape[1], rank * experts)


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    out = np.zeros(shape, dtype=array.dtype)
    out[tuple(slice(0, size) for size in array.shape)] = array
    return out


def _scaled(b: Array, scaling: float) -> Array:
    return b.astype(np.float32) * np.float32(scaling)


def _zeros(tensor: PlannedTensor) -> _Part:
    return _Part(planned=(tensor,), arrays=lambda: iter((np.zeros(tensor.shape, dtype=np.float32),)))


def _expected(valid: ValidAdapter, base: BaseDescription, is_fused: bool) -> Iterator[PlannedTensor]:
    """Every tensor of the experts' layers that the adapter touches."""
    touched = {
        pair.module if pair.form is Form.FUSED else pair.module.rsplit(".", 1)[0] for pair in valid.pairs if pair.form is not Form.DENSE
    }
    for module in base.modules:
        experts, _, leaf = module.path.rpartition(".")
        if experts not in touched or not module.experts:
            continue
        if not is_fused:
            for expert in range(module.experts):
                yield from _plan(_expert_name(module.path, expert), module.in_features, module.out_features, valid.rank)
        elif leaf == "down_proj":
            yield from _plan(experts, module.in_features, module.out_features, valid.rank, module.experts)
        elif leaf == "gate_proj":
            inner = f"{experts}.base_layer"
            yield from _plan(inner, module.in_features, 2 * module.out_features, valid.rank, module.experts)


def _in_dtype(planned: list[PlannedTensor], arrays: Iterator[Array], dtype: str) -> Iterator[Array]:
    wanted = NUMPY_DTYPES[DTYPE_CODES[dtype]]
    for tensor, array in zip(planned, arrays, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(wanted, copy=False)
        if not np.isfinite(cast).all():
            raise rejected(
                RejectReason.NOT_FINITE,
                f"{tensor.name}: values do not fit {dtype} once the scaling is applied",
                tensor=tensor.name,
                expected=dtype,
            )
        yield cast
