"""A tenant's limits as people write them, on the command line and in YAML: memory in MB, everything else as it is."""

from collections.abc import Mapping
from typing import Any

from shared.contracts.tenancy import TenantLimits
from shared.errors import ConfigInvalid, InvalidRequest
from shared.policy.limits import changed

MB = 1024 * 1024
NAMES: dict[str, tuple[str, int]] = {
    "kv_quota_mb": ("kv_quota_bytes", MB),
    "max_concurrent": ("max_concurrent", 1),
    "requests_per_minute": ("requests_per_minute", 1),
    "tokens_per_minute": ("tokens_per_minute", 1),
    "host_cache_mb": ("host_cache_bytes", MB),
    "artifact_mb": ("artifact_bytes", MB),
    "burst": ("burst", 1),
    "weight": ("weight", 1),
    "default_max_tokens": ("default_max_tokens", 1),
    "queue_limit": ("queue_limit", 1),
    "queue_deadline_s": ("queue_deadline_s", 1),
    "cache_group": ("cache_group", 1),
}
_WRITTEN = {field: name for name, (field, _) in NAMES.items()}


def of_written(values: Mapping[str, Any]) -> dict[str, Any]:
    """The contract's fields of what was written; None takes a limit away.

    :raises ConfigInvalid: a value out of bounds, by the name it was written under.
    """
    fields = {NAMES[name][0]: value * NAMES[name][1] if _is_scaled(name, value) else value for name, value in values.items()}
    wrong = changed(TenantLimits(), fields)
    if isinstance(wrong, InvalidRequest):
        name = _WRITTEN[wrong.fields["field"].removeprefix("limits.")]
        raise ConfigInvalid(f"{name} is {values[name]!r}: {wrong.message.partition(': ')[2]}", where=name)
    return fields


def of_options(options: Mapping[str, str | bool | None]) -> dict[str, Any]:
    """Of command-line options by their names: numbers, or `none`; None where an option was not given.

    :raises ConfigInvalid: neither a number nor `none`, or out of bounds.
    """
    values: dict[str, Any] = {}
    for name, text in options.items():
        if text is None:
            continue
        if isinstance(text, bool) or text == "none" or name == "cache_group":
            values[name] = None if text == "none" else text
            continue
        try:
            values[name] = float(text) if name == "queue_deadline_s" else int(text)
        except ValueError as error:
            raise ConfigInvalid(f"--{name.replace('_', '-')} is {text[:40]!r}: expected a number, or `none`", where=name) from error
    return of_written(values)


def said(limits: TenantLimits) -> dict[str, Any]:
    """By the names that people write, memory in MB (None: no limit)."""
    return {name: _unscaled(getattr(limits, field), unit) for name, (field, unit) in NAMES.items()}


def _is_scaled(name: str, value: Any) -> bool:
    return NAMES[name][1] != 1 and isinstance(value, int) and not isinstance(value, bool)


def _unscaled(value: Any, unit: int) -> Any:
    if unit == 1 or value is None:
        return value
    return value // unit if value % unit == 0 else value / unit
