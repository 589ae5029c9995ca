"""PEFT's fused experts (`target_parameters`): how the axes of A and B lie, and each expert's own A and B out of them.

A is [E * r, x], expert-major; B is [y, r * E] with the expert fastest. For a parameter stored [E, out, in] PEFT 0.20 and later
give x = in, y = out; older ones give x = out, y = in, the same update transposed (Δ_e = A_eᵀ B_eᵀ instead of B_e A_e).
For one stored [E, in, out] (GPT-OSS) every version but 0.19 gives x = in. Where both fit, the config's peft_version decides.
"""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shared.artifacts.reasons import RejectReason, rejected
from shared.artifacts.tensors import TensorInfo


class FusedShape(msgspec.Struct, frozen=True, kw_only=True):
    parameter: str  # "gate_up_proj" | "down_proj"
    experts: int
    rank: int
    is_transposed: bool  # older PEFT: A faces the parameter's outputs


def fused_role(is_inner: bool, has_inner: bool, target_parameters: tuple[str, ...]) -> str | None:
    """Which parameter the tensors adapt: PEFT wraps gate_up_proj first (inner), then down_proj; None if only shapes can tell."""
    if is_inner:
        return "gate_up_proj"
    if has_inner:
        return "down_proj"
    leaves = {name.rsplit(".", 1)[-1] for name in target_parameters} & {"gate_up_proj", "down_proj"}
    return leaves.pop() if len(leaves) == 1 else None


def fused_axes(
    a: TensorInfo,
    b: TensorInfo,
    parameter: str,
    sizes: tuple[int, int],
    experts: int,
    layout: str,
    peft_version: str | None,
) -> FusedShape | None:
    """The shape if A and B fit a parameter of (in, out) `sizes`, else None.

    :raises AdapterRejected: ambiguous_layout, where both axis orders fit and no peft_version tells which was written.
    """
    in_features, out_features = sizes
    rank, rest = divmod(a.shape[0], experts)
    if rank == 0 or rest or b.shape[1] != a.shape[0]:
        return None
    faces = (a.shape[1], b.shape[0])
    if faces == (in_features, out_features) and in_features != out_features:
        is_transposed = False
    elif faces == (out_features, in_features) and in_features != out_features:
        is_transposed = True
    elif faces == (in_features, out_features):
        is_transposed = _was_transposed(a, layout, peft_version)
    else:
        return None
    return FusedShape(parameter=parameter, experts=experts, rank=rank, is_transposed=is_transposed)


def _was_transposed(a: TensorInfo, layout: str, peft_version: str | None) -> bool:
    try:
        release = tuple(int(part) for part in (peft_version or "").split(".")[:2])
    except ValueError:
        release = ()
    if len(release) != 2:
        raise rejected(
            RejectReason.AMBIGUOUS_LAYOUT,
            f"{a.name}: the base's sizes let two axis orders fit, and adapter_config.json has no peft_version to tell "
            "which was written; save the adapter again with PEFT 0.20 or later",
            tensor=a.name,
            field="peft_version",
        )
    return release == (0, 19) if layout == "interleaved" else release < (0, 20)


def experts_of(shape: FusedShape, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views A [E, r, in] and B [E, out, r] of the fused tensors, so that each expert's update is B_e A_e."""
    a_by_expert = a.reshape(shape.experts, shape.rank, a.shape[1])
    b_by_expert = np.transpose(b.reshape(b.shape[0], shape.rank, shape.experts), (2, 0, 1))
    if not shape.is_transposed:
        return a_by_expert, b_by_expert
    return np.transpose(b_by_expert, (0, 2, 1)), np.transpose(a_by_expert, (0, 2, 1))
