"""What limits a tenant may be given, and what a pool can guarantee."""

from typing import Any

import msgspec
import pytest

from shared.contracts.adapters import PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.tenancy import TenantLimits
from shared.errors import InvalidRequest, QuotaExceeded
from shared.policy.limits import BOUNDS, changed, guarantee, pool_kv_bytes

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
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_limit_is_refused_by_its_name(name: str, value: Any) -> None:
    refused = changed(TenantLimits(), {name: value})
    assert isinstance(refused, InvalidRequest)
    assert refused.fields["field"] == f"limits.{name[:80]}"
    assert len(refused.message) < 600


@pytest.mark.parametrize(
    "name", [name for name, field in ((f.name, f) for f in msgspec.structs.fields(TenantLimits)) if field.default is None]
)
def test_null_takes_a_limit_away_and_zero_does_not(name: str) -> None:
    lowest = int(BOUNDS[name][0])
    limited = changed(TenantLimits(weight=3), {name: lowest})
    assert isinstance(limited, TenantLimits)
    assert (getattr(limited, name), limited.weight) == (lowest, 3)
    assert changed(limited, {name: None}) == TenantLimits(weight=3)


def pool(*kv_blocks: int, **guaranteed: int) -> PoolEntry:
    workers = {
        f"w{i}": PoolWorker(
            worker_id=f"w{i}",
            incarnation="i",
            limits=EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=blocks, kv_block_bytes=10),
        )
        for i, blocks in enumerate(kv_blocks)
    }
    return PoolEntry(pool_id="main", base="b", workers=workers, guaranteed=guaranteed)


def test_what_is_guaranteed_in_sum_fits_the_pools_kv_cache() -> None:
    two = pool(10, 10, tn_b=150)
    assert pool_kv_bytes(two) == 200
    fits = guarantee(two, "tn_a", 50)
    assert isinstance(fits, PoolEntry)
    assert fits.guaranteed == {"tn_b": 150, "tn_a": 50}
    refused = guarantee(two, "tn_a", 51)
    assert isinstance(refused, QuotaExceeded)
    assert {name: refused.fields[name] for name in ("asked_bytes", "held_bytes", "limit_bytes")} == {
        "asked_bytes": 51,
        "held_bytes": 150,
        "limit_bytes": 200,
    }


def test_less_than_before_can_always_be_guaranteed_even_where_the_pool_has_shrunk() -> None:
    shrunk = pool(10, tn_a=150, tn_b=20)
    lower = guarantee(shrunk, "tn_a", 120)
    assert isinstance(lower, PoolEntry)
    assert lower.guaranteed == {"tn_a": 120, "tn_b": 20}
    assert isinstance(guarantee(shrunk, "tn_b", 21), QuotaExceeded)
    gone = guarantee(shrunk, "tn_a", None)
    assert isinstance(gone, PoolEntry)
    assert gone.guaranteed == {"tn_b": 20}


def test_a_worker_that_has_not_said_what_it_has_leaves_the_sum_unchecked() -> None:
    assert pool_kv_bytes(pool(10, 0)) is None
    assert pool_kv_bytes(pool()) is None
    assert isinstance(guarantee(pool(10, 0), "tn_a", 10**9), PoolEntry)
