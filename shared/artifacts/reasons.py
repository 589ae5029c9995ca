"""The stable `reason` sub-codes of AdapterRejected: every way in which an artifact can be refused before an engine sees it."""

from enum import StrEnum
from typing import Any

from shared.errors import AdapterRejected


class RejectReason(StrEnum):
    """Values cross the bus and are shown to users; a value is never renamed. Comments name the error's own fields."""

    # The archive
    EMPTY = "empty"  # nothing in it
    BAD_ARCHIVE = "bad_archive"  # not tar, tar.gz or zip, damaged, encrypted, a name twice
    TRUNCATED_ARCHIVE = "truncated_archive"  # ends in the middle
    UNSAFE_PATH = "unsafe_path"  # absolute, `..`, backslash, control characters: member
    LINK_OR_DEVICE = "link_or_device"  # a link, device, pipe or sparse member: member
    ARCHIVE_BOMB = "archive_bomb"  # limit, limit_bytes or limit_ratio
    FILE_TOO_BIG = "file_too_big"  # member, limit_bytes
    SEVERAL_ADAPTERS = "several_adapters"  # folders
    MISSING_CONFIG = "missing_config"  # no adapter_config.json
    MISSING_WEIGHTS = "missing_weights"  # no adapter_model.safetensors
    PICKLE = "pickle"  # weights as a pickle, whatever the file is called: member

    # adapter_config.json: field, got, expected
    BAD_CONFIG = "bad_config"
    NOT_LORA = "not_lora"
    DORA = "dora"
    MODULES_TO_SAVE = "modules_to_save"
    BIAS = "bias"
    NEW_TOKENS = "new_tokens"
    UNSUPPORTED_FEATURE = "unsupported_feature"

    # adapter_model.safetensors
    TRUNCATED_WEIGHTS = "truncated_weights"  # expected_bytes, got_bytes
    BAD_WEIGHTS = "bad_weights"  # a damaged header: overlapping or out-of-range tensors, bad JSON
    BAD_DTYPE = "bad_dtype"  # tensor, got, expected
    NOT_FINITE = "not_finite"  # tensor
    DOES_NOTHING = "does_nothing"  # every pair has an all-zero side

    # Tensors against the base: tensor, expected, got
    UNKNOWN_TENSOR = "unknown_tensor"
    UNKNOWN_LAYER = "unknown_layer"
    UNKNOWN_EXPERT = "unknown_expert"
    UNKNOWN_MODULE = "unknown_module"
    NO_MODULE_MATCHED = "no_module_matched"
    EMBEDDINGS = "embeddings"
    DUPLICATE_TENSOR = "duplicate_tensor"
    MISSING_PARTNER = "missing_partner"
    BAD_SHAPE = "bad_shape"
    RANK_MISMATCH = "rank_mismatch"  # the config's rank for the module is not the tensor's
    RANK_TOO_BIG = "rank_too_big"  # asked, allowed
    AMBIGUOUS_LAYOUT = "ambiguous_layout"  # fused experts whose axis order cannot be told
    UNSUPPORTED_LAYOUT = "unsupported_layout"


def rejected(reason: RejectReason, message: str, **fields: Any) -> AdapterRejected:
    """The error to raise; `fields` are plain JSON values."""
    return AdapterRejected(message, reason=reason.value, **fields)
