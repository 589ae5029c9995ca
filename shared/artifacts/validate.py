"""The verdict on an artifact against a base and an engine's limits, from its files alone; which base it may go on is policy's."""

import msgspec

from shared.artifacts.bundle import Bundle
from shared.artifacts.mapping import LoraPair, map_tensors
from shared.artifacts.peft_config import PeftConfig, read_config
from shared.artifacts.reasons import RejectReason, rejected
from shared.artifacts.tensors import DTYPE_CODES, ITEM_BYTES, read_header, scan_tensor
from shared.contracts.base import BaseDescription, EngineLimits


class ValidAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an artifact that may go on; `config` and `pairs` are for normalising it."""

    digest: str
    rank: int  # the largest of any module
    rank_class: int  # what a slot is charged for
    true_bytes: int  # its own values in the engine's dtype, before any padding
    modules: int  # modules adapted; every expert's counts
    declared_label: str | None  # base_model_name_or_path as written; only the matrix may turn it into an identity
    declared_revision: str | None
    config: PeftConfig
    pairs: tuple[LoraPair, ...]


def validate(bundle: Bundle, base: BaseDescription, limits: EngineLimits) -> ValidAdapter:
    """Checks config, file, names, shapes, ranks and values.

    :raises AdapterRejected: with a RejectReason.
    """
    config = read_config(bundle.config_path)
    tensors = read_header(bundle.weights_path)
    pairs = map_tensors(tensors, base, config, limits.max_rank)
    _refuse_bad_values(bundle, pairs)
    rank = max(pair.rank for pair in pairs)
    item_bytes = ITEM_BYTES[DTYPE_CODES[base.dtype]]
    return ValidAdapter(
        digest=bundle.digest,
        rank=rank,
        rank_class=rank_class(rank, limits),
        true_bytes=item_bytes * sum(pair.a.count + pair.b.count for pair in pairs),
        modules=sum(_modules_of(pair) for pair in pairs),
        declared_label=config.base_model_name_or_path,
        declared_revision=config.revision,
        config=config,
        pairs=pairs,
    )


def rank_class(rank: int, limits: EngineLimits) -> int:
    """The smallest class that holds `rank`; the engine's own maximum is always one."""
    classes = {limits.max_rank, *(known for known in limits.rank_classes if known <= limits.max_rank)}
    return min(known for known in classes if known >= rank)


def _modules_of(pair: LoraPair) -> int:
    if pair.fused is None:
        return 1
    return pair.fused.experts * (2 if pair.fused.parameter == "gate_up_proj" else 1)


def _refuse_bad_values(bundle: Bundle, pairs: tuple[LoraPair, ...]) -> None:
    does_something = False
    for pair in pairs:
        scans = [(tensor, scan_tensor(bundle.weights_path, tensor)) for tensor in (pair.a, pair.b)]
        for tensor, scan in scans:
            if not scan.is_finite:
                raise rejected(RejectReason.NOT_FINITE, f"{tensor.name} holds NaN or infinite values", tensor=tensor.name)
        does_something = does_something or not any(scan.is_zero for _, scan in scans)
    if not does_something:
        raise rejected(RejectReason.DOES_NOTHING, "every lora_A or its lora_B is all zeros: the adapter changes nothing (untrained?)")
