"""What a pool's KV cache can guarantee: in sum, on each worker, and when the pool has shrunk below it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.adapters import PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.tenancy import TenantLimits, TenantShares
from shared.errors import QuotaExceeded
from shared.policy.guarantees import assured_bytes, guarantee, kv_caches, overcommitted_bytes, pool_kv_bytes
from shared.policy.kv_ledger import Fit, KvLedger, KvShare
from shared.policy.shares import Use, decide


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


@pytest.mark.parametrize("silent", [pool(10, 0), pool(0)])
def test_no_quota_is_given_where_a_worker_has_not_said_what_it_has(silent: PoolEntry) -> None:
    assert pool_kv_bytes(silent) is None
    refused = guarantee(silent, "tn_a", 1)
    assert isinstance(refused, QuotaExceeded)
    assert "has not said" in refused.message
    assert refused.fields["field"] == "limits.kv_quota_bytes"


def test_a_pool_without_workers_gives_what_it_is_asked_for_and_looks_again_when_one_comes() -> None:
    given_ = guarantee(pool(), "tn_a", 10**9)
    assert isinstance(given_, PoolEntry)
    assert overcommitted_bytes(given_) == 0


def test_a_pool_that_has_shrunk_is_overcommitted_and_assures_what_it_can() -> None:
    shrunk = pool(10, tn_a=150, tn_b=50)
    assert overcommitted_bytes(shrunk) == 100
    assert assured_bytes(kv_caches(shrunk), shrunk.guaranteed, "tn_a") == {"w0": 75}
    assert assured_bytes(kv_caches(shrunk), shrunk.guaranteed, "tn_b") == {"w0": 25}
    assert overcommitted_bytes(pool(10, 10, tn_a=150, tn_b=50)) == 0


@given(
    blocks=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    asked=st.lists(st.integers(0, 12_000), min_size=1, max_size=6),
    waiting=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_whatever_moves_no_part_passes_its_workers_cache_and_all_that_is_assured_there_fits(
    blocks: list[int], asked: list[int], waiting: list[int]
) -> None:
    """Every tenant's work waits on one worker, so that its parts go there as far as they can."""
    entry = pool(*blocks)
    for number, size in enumerate(asked):
        more = guarantee(entry, f"tn_{number}", size)
        entry = more if isinstance(more, PoolEntry) else entry
    caches = kv_caches(entry)
    workers = {worker_id: "i" for worker_id in entry.workers}
    assured: dict[str, int] = dict.fromkeys(workers, 0)
    for number in range(len(asked)):
        tenant_id = f"tn_{number}"
        limits = TenantLimits(kv_quota_bytes=entry.guaranteed.get(tenant_id, 0))
        mine = assured_bytes(caches, entry.guaranteed, tenant_id)
        wanted = f"w{waiting[number % len(waiting)] % len(blocks)}"
        shares = TenantShares(tenant_id=tenant_id, tenant=tenant_id, limits=limits)
        for _ in range(30):
            known = {w: share.kv_bytes or 0 for w, share in shares.workers.items()}
            uses = {
                w: Use(incarnation="i", revision=1, waiting=int(w == wanted), kv_bytes=known.get(w, 0) * (w == wanted)) for w in workers
            }
            shares = decide(shares, 1, tenant_id, tenant_id, limits, workers, uses, caches, mine)
            assert all((share.kv_bytes or 0) <= caches[w] for w, share in shares.workers.items())
            assert sum(share.held_kv_bytes for share in shares.workers.values()) <= (limits.kv_quota_bytes or 0)
        parts = {w: share.kv_bytes or 0 for w, share in shares.workers.items()}
        assert sum(parts.values()) == limits.kv_quota_bytes
        assert parts[wanted] == min(caches[wanted], limits.kv_quota_bytes or 0), "it went where the work waits"
        for w, share in shares.workers.items():
            assured[w] += min(parts[w], share.assured_kv_bytes or 0)
    assert all(size <= caches[w] for w, size in assured.items())


def test_parts_are_made_in_measure_of_the_workers_caches() -> None:
    caches = {"w1": 100, "w2": 900}
    shares = decide(None, 0, "tn_a", "a", TenantLimits(kv_quota_bytes=500), {"w1": "i", "w2": "i"}, {}, caches, {"w1": 50, "w2": 450})
    assert {w: (share.kv_bytes, share.assured_kv_bytes) for w, share in shares.workers.items()} == {"w1": (50, 50), "w2": (450, 450)}


def test_a_worker_that_comes_back_with_less_cache_has_a_part_that_fits_it() -> None:
    limits = TenantLimits(kv_quota_bytes=100)
    first = decide(None, 0, "tn_a", "a", limits, {"w1": "i1", "w2": "i2"}, {}, {"w1": 100, "w2": 100})
    assert [share.kv_bytes for share in first.workers.values()] == [50, 50]
    again = decide(first, 1, "tn_a", "a", limits, {"w1": "i3", "w2": "i2"}, {}, {"w1": 20, "w2": 100})
    assert {w: share.kv_bytes for w, share in again.workers.items()} == {"w1": 20, "w2": 80}


def test_a_part_beyond_what_is_assured_takes_nothing_of_what_others_are_assured() -> None:
    book = KvLedger(100)
    book.set_share("a", KvShare(100, assured=50))  # its whole quota of two such workers has moved here
    book.set_share("b", KvShare(50, assured=50))
    assert book.fit("a", 51) is Fit.OWN_FULL, "it keeps nobody else waiting meanwhile"
    book.reserve("r1", "a", 50)
    assert book.fit("b", 50) is Fit.NOW
    book.set_share("b", KvShare(10, assured=50))  # of which most has moved away
    assert book.fit("a", 40) is Fit.NOW
    assert book.fit("a", 41) is Fit.OWN_FULL
