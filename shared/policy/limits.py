"""Which limits a tenant may be given: every field with its bounds, and changes to some of them."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.contracts.state import NAME_PATTERN
from shared.contracts.tenancy import TenantLimits
from shared.errors import InvalidRequest

MAX_BYTES = 1 << 50
BOUNDS: dict[str, tuple[float, float]] = {
    "kv_quota_bytes": (0, MAX_BYTES),
    "max_concurrent": (0, 1_000_000),
    "requests_per_minute": (0, 10**9),
    "tokens_per_minute": (0, 10**12),
    "host_cache_bytes": (0, MAX_BYTES),
    "artifact_bytes": (0, MAX_BYTES),
    "weight": (1, 1_000_000),
    "default_max_tokens": (1, 10**7),
    "queue_limit": (0, 1_000_000),
    "queue_deadline_s": (0.001, 3600.0),
}
_GROUP = re.compile(NAME_PATTERN)
_FIELDS = {field.name: field for field in msgspec.structs.fields(TenantLimits)}


def changed(limits: TenantLimits, changes: Mapping[str, Any]) -> TenantLimits | InvalidRequest:
    """`limits` with these fields (plain JSON values; None takes a limit away), or which field is wrong."""
    values: dict[str, Any] = {}
    for name, value in changes.items():
        field = _FIELDS.get(name)
        if field is None:
            known = ", ".join(sorted(_FIELDS))
            return InvalidRequest(f"there is no limit {name[:80]!r}; known are: {known}", field=f"limits.{name[:80]}")
        try:
            values[name] = msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            return _wrong(name, value, str(error))
        if name == "cache_group":
            if value is not None and not _GROUP.fullmatch(value):
                return _wrong(name, value, f"expected a name of {NAME_PATTERN}")
            continue
        lowest, highest = BOUNDS.get(name, (0, 1))
        if values[name] is not None and not lowest <= values[name] <= highest:
            return _wrong(name, value, f"expected {lowest:g} to {highest:g}")
    return msgspec.structs.replace(limits, **values)


def _wrong(name: str, value: object, why: str) -> InvalidRequest:
    shown = repr(value)[:40]
    return InvalidRequest(f"limits.{name} is {shown}: {why}", field=f"limits.{name}", got=shown)
