"""What limits a tenant may be given."""

from typing import Any

import msgspec
import pytest

from shared.contracts.tenancy import TenantLimits
from shared.errors import InvalidRequest
from shared.policy.limits import BOUNDS, changed

WRONG = [
    *[(name, value) for name in BOUNDS for value in (-1, 10**30, "many", True, [], float("nan"), float("inf"))],
    ("max_concurrent", 1.5),
    ("weight", 0),
    ("weight", None),
    ("default_max_tokens", 0),
    ("queue_deadline_s", 0),
    ("queue_limit", None),
    ("burst", 1),
    ("kv_quota", 1),
    ("x" * 10_000, 1),
    *[("cache_group", value) for value in ("", "Upper", "two words", "x" * 64, 7, True, ["a"])],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_limit_is_refused_by_its_name(name: str, value: Any) -> None:
    refused = changed(TenantLimits(), {name: value})
    assert isinstance(refused, InvalidRequest)
    assert refused.fields["field"] == f"limits.{name[:80]}"
    assert len(refused.message) < 600


@pytest.mark.parametrize(
    "name",
    [name for name, field in ((f.name, f) for f in msgspec.structs.fields(TenantLimits)) if field.default is None and name in BOUNDS],
)
def test_null_takes_a_limit_away_and_zero_does_not(name: str) -> None:
    lowest = int(BOUNDS[name][0])
    limited = changed(TenantLimits(weight=3), {name: lowest})
    assert isinstance(limited, TenantLimits)
    assert (getattr(limited, name), limited.weight) == (lowest, 3)
    assert changed(limited, {name: None}) == TenantLimits(weight=3)


def test_a_cache_group_is_a_name_and_null_leaves_it() -> None:
    shared = changed(TenantLimits(), {"cache_group": "legal-family"})
    assert shared == TenantLimits(cache_group="legal-family")
    assert isinstance(shared, TenantLimits)
    assert changed(shared, {"cache_group": None}) == TenantLimits()
