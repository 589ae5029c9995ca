"""Shares of a tenant's quota: never more than the quota in use, whatever registries, workers, reports and deaths do in between."""

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.contracts.tenancy import Share, TenantLimits, TenantShares
from shared.policy.shares import UNKNOWN, Use, decide

WORKERS = ("w1", "w2", "w3")
CACHES = {"w1": 40, "w2": 16, "w3": 64}


def split(
    entry: TenantShares | None,
    limits: TenantLimits,
    workers: dict[str, str],
    uses: dict[str, Use] | None = None,
    revision: int = 1,
) -> TenantShares:
    return decide(entry, revision, "tn_a", "a", limits, workers, uses or {})


def parts(shares: TenantShares) -> dict[str, int | None]:
    return {worker_id: share.concurrent for worker_id, share in shares.workers.items()}


def held(shares: TenantShares) -> int:
    return sum(share.held_concurrent for share in shares.workers.values())


def settled(shares: TenantShares, limits: TenantLimits, workers: dict[str, str], **waiting: int) -> TenantShares:
    """After as many rounds as change something, each worker using its part whole where it has work and acknowledging at once."""
    for _ in range(40):
        uses = {
            w: Use(
                incarnation=workers[w],
                revision=1,
                running=(share.concurrent or 0) if w in waiting else 0,
                waiting=waiting.get(w, 0),
            )
            for w, share in shares.workers.items()
        }
        after = split(shares, limits, workers, uses)
        if after == shares:
            return shares
        shares = after
    raise AssertionError("it never settles")


TEN = TenantLimits(max_concurrent=10)
TWO = {"w1": "i1", "w2": "i2"}


def test_without_limits_nothing_is_split() -> None:
    assert split(None, TenantLimits(), TWO).workers["w1"] == Share(incarnation="i1")


def test_a_quota_is_split_evenly_at_first_and_wholly() -> None:
    assert parts(split(None, TEN, TWO)) == {"w1": 5, "w2": 5}
    assert parts(split(None, TenantLimits(max_concurrent=1), TWO)) == {"w1": 1, "w2": 0}
    assert parts(split(None, TenantLimits(max_concurrent=0), TWO)) == {"w1": 0, "w2": 0}


def test_room_goes_to_the_worker_where_work_waits_and_only_once_the_other_has_agreed() -> None:
    start = split(None, TEN, TWO)
    asking = {
        "w1": Use(incarnation="i1", revision=1, running=5, waiting=9),
        "w2": Use(incarnation="i2", revision=1),
    }
    cut = split(start, TEN, TWO, asking)
    assert parts(cut) == {"w1": 5, "w2": 2}
    assert cut.workers["w2"].held_concurrent == 5
    assert split(cut, TEN, TWO, asking, revision=2) == cut, "reports of before the cut prove nothing"
    agreed = {"w1": asking["w1"], "w2": Use(incarnation="i2", revision=2, running=4)}
    some = split(cut, TEN, TWO, agreed, revision=2)
    assert parts(some) == {"w1": 6, "w2": 2}, "four still run on w2"
    assert held(some) == 10


def test_work_on_one_worker_alone_gets_all_of_the_quota_in_the_end() -> None:
    assert parts(settled(split(None, TEN, TWO), TEN, TWO, w2=40)) == {"w1": 0, "w2": 10}


def test_two_workers_with_the_same_work_keep_what_they_have() -> None:
    start = split(None, TEN, TWO)
    assert settled(start, TEN, TWO, w1=40, w2=40) == start


def test_what_is_idle_is_evened_out_again_so_that_no_worker_starts_from_nothing() -> None:
    all_on_one = settled(split(None, TEN, TWO), TEN, TWO, w2=40)
    assert parts(settled(all_on_one, TEN, TWO)) == {"w1": 5, "w2": 5}


def test_a_new_worker_gets_room_from_those_that_are_idle() -> None:
    start = split(None, TEN, {"w1": "i1"})
    assert parts(start) == {"w1": 10}
    assert parts(settled(start, TEN, TWO)) == {"w1": 5, "w2": 5}


def test_a_dead_incarnations_room_is_free_at_once() -> None:
    start = split(None, TEN, TWO)
    cut = split(start, TEN, TWO, {"w1": Use(incarnation="i1", revision=1, running=5, waiting=9), "w2": Use(incarnation="i2", revision=1)})
    assert held(cut) == 10
    assert held(split(cut, TEN, {"w1": "i1", "w2": "i3"})) == 10, "what it held is shared out again"
    assert parts(split(cut, TEN, {"w1": "i1"})) == {"w1": 10}


def test_lowering_a_quota_evicts_nothing_and_gives_nothing_out() -> None:
    start = split(None, TEN, TWO)
    lower = TenantLimits(max_concurrent=4)
    lowered = split(start, lower, TWO)
    assert parts(lowered) == {"w1": 2, "w2": 2}
    assert held(lowered) == 10
    busy = {w: Use(incarnation=i, revision=2, running=5, waiting=3) for w, i in TWO.items()}
    assert held(split(lowered, lower, TWO, busy, revision=2)) == 10
    done = {w: Use(incarnation=i, revision=2, running=1) for w, i in TWO.items()}
    assert held(split(lowered, lower, TWO, done, revision=2)) == 4


def test_who_was_not_limited_may_hold_anything_until_it_says_otherwise() -> None:
    free = split(None, TenantLimits(), TWO)
    limited = split(free, TEN, TWO)
    assert parts(limited) == {"w1": 5, "w2": 5}
    assert [share.held_concurrent for share in limited.workers.values()] == [UNKNOWN, UNKNOWN]
    uses = {"w1": Use(incarnation="i1", revision=2, running=7), "w2": Use(incarnation="i2", revision=1)}
    assert [share.held_concurrent for share in split(limited, TEN, TWO, uses, revision=2).workers.values()] == [7, UNKNOWN]


def test_work_on_a_worker_whose_cache_is_smaller_than_the_quota_gets_all_of_the_cache_and_the_rest_stays_where_it_is_of_use() -> None:
    limits, caches = TenantLimits(kv_quota_bytes=60), {"w1": 20, "w2": 80}
    shares = decide(None, 1, "tn_a", "a", limits, TWO, {}, caches)
    assert {w: share.kv_bytes for w, share in shares.workers.items()} == {"w1": 12, "w2": 48}
    seen: list[TenantShares] = []
    for _ in range(40):
        uses = {
            "w1": Use(incarnation="i1", revision=1, running=4, waiting=9, kv_bytes=shares.workers["w1"].kv_bytes or 0),
            "w2": Use(incarnation="i2", revision=1),
        }
        shares = decide(shares, 1, "tn_a", "a", limits, TWO, uses, caches)
        seen.append(shares)
    assert {w: share.kv_bytes for w, share in shares.workers.items()} == {"w1": 20, "w2": 40}
    assert seen[-1] == seen[-2], "it comes to rest"


@pytest.mark.parametrize("quota", [1, 7, 10**6, 2**53])
def test_parts_always_sum_to_the_quota_once_all_agree(quota: int) -> None:
    limits = TenantLimits(kv_quota_bytes=quota, max_concurrent=quota)
    three = {w: w for w in WORKERS}
    shares = split(None, limits, three)
    assert sum(share.kv_bytes or 0 for share in shares.workers.values()) == quota
    assert sum(share.concurrent or 0 for share in shares.workers.values()) == quota


class _Worker:
    """Enforces the newest part that it has seen given to its own incarnation."""

    def __init__(self, incarnation: str, revision: int, entry: TenantShares | None) -> None:
        self.incarnation = incarnation
        self.revision = revision
        self.entry = entry
        self.running = 0
        self.waiting = 0
        self.kv_bytes = 0

    def share(self, worker_id: str) -> Share | None:
        share = self.entry.workers.get(worker_id) if self.entry is not None else None
        return share if share is not None and share.incarnation == self.incarnation else None


class _Registry:
    def __init__(self) -> None:
        self.uses: dict[str, Use] = {}
        self.read: tuple[int, TenantShares | None, dict[str, str], TenantLimits] | None = None


class Pool(RuleBasedStateMachine):
    """Registries read, hear and write at any time; reports are lost, late, repeated; workers lag, die and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = TenantLimits(kv_quota_bytes=64, max_concurrent=7)
        self.revision = 0
        self.history: list[tuple[int, TenantShares]] = []
        self.workers: dict[str, _Worker] = {}
        self.incarnations = 0
        self.registries = [_Registry() for _ in range(3)]
        self.reports: list[tuple[str, Use]] = []
        self.most = {"kv_bytes": 64, "concurrent": 7}  # held by entries: the quota, or less and less of an earlier one

    @property
    def entry(self) -> TenantShares | None:
        return self.history[-1][1] if self.history else None

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_starts_anew(self, worker_id: str) -> None:
        self.incarnations += 1
        self.workers[worker_id] = _Worker(f"i{self.incarnations}", self.revision, self.entry)

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_is_removed(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)

    @rule(worker_id=st.sampled_from(WORKERS), steps=st.integers(1, 3))
    def a_worker_sees_more(self, worker_id: str, steps: int) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            for revision, entry in [item for item in self.history if item[0] > worker.revision][:steps]:
                worker.revision, worker.entry = revision, entry

    @rule(worker_id=st.sampled_from(WORKERS), kv_bytes=st.integers(0, 40), waiting=st.integers(0, 5))
    def work_comes(self, worker_id: str, kv_bytes: int, waiting: int) -> None:
        worker = self.workers.get(worker_id)
        share = worker.share(worker_id) if worker is not None else None
        if worker is None or share is None:
            return
        worker.waiting = waiting
        if worker.running < (share.concurrent or 0) and worker.kv_bytes + kv_bytes <= (share.kv_bytes or 0):
            worker.running += 1
            worker.kv_bytes += kv_bytes

    @rule(worker_id=st.sampled_from(WORKERS), kv_bytes=st.integers(0, 64))
    def work_ends(self, worker_id: str, kv_bytes: int) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and worker.running:
            worker.running -= 1
            worker.kv_bytes = max(0, worker.kv_bytes - kv_bytes) if worker.running else 0

    @rule(worker_id=st.sampled_from(WORKERS))
    def a_worker_reports(self, worker_id: str) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            use = Use(
                incarnation=worker.incarnation,
                revision=worker.revision,
                running=worker.running,
                waiting=worker.waiting,
                kv_bytes=worker.kv_bytes,
            )
            self.reports.append((worker_id, use))

    @rule(registry=st.integers(0, 2), data=st.data())
    def a_registry_hears_some_report(self, registry: int, data: st.DataObject) -> None:
        if self.reports:
            worker_id, use = data.draw(st.sampled_from(self.reports[-12:]))
            self.registries[registry].uses[worker_id] = use

    @rule(registry=st.integers(0, 2))
    def a_registry_reads(self, registry: int) -> None:
        workers = {worker_id: worker.incarnation for worker_id, worker in self.workers.items()}
        self.registries[registry].read = (self.revision, self.entry, workers, self.limits)

    @rule(registry=st.integers(0, 2))
    def a_registry_writes(self, registry: int) -> None:
        found = self.registries[registry].read
        if found is None or found[0] != self.revision:
            return
        revision, entry, workers, limits = found
        caches = {worker_id: CACHES[worker_id] for worker_id in workers}
        after = decide(entry, revision, "tn_a", "a", limits, workers, self.registries[registry].uses, caches)
        if after != entry:
            self.revision += 1
            self.history.append((self.revision, after))
            self._check(after)
        self.registries[registry].read = None

    @rule(kv_bytes=st.integers(0, 100), concurrent=st.integers(0, 12))
    def the_quota_changes(self, kv_bytes: int, concurrent: int) -> None:
        self.limits = TenantLimits(kv_quota_bytes=kv_bytes, max_concurrent=concurrent)

    def _check(self, entry: TenantShares) -> None:
        quota = {"kv_bytes": entry.limits.kv_quota_bytes or 0, "concurrent": entry.limits.max_concurrent or 0}
        for resource, limit in quota.items():
            shares = entry.workers.values()
            assert sum(getattr(share, resource) for share in shares) <= limit
            assert resource == "concurrent" or all(share.kv_bytes <= CACHES[w] for w, share in entry.workers.items())
            assert all(getattr(share, f"held_{resource}") >= getattr(share, resource) >= 0 for share in shares)
            total = sum(getattr(share, f"held_{resource}") for share in shares)
            assert total <= max(limit, self.most[resource])
            self.most[resource] = max(limit, total)

    @invariant()
    def no_worker_uses_more_than_the_entry_counts_for_it(self) -> None:
        """And so the sum over the pool is never above the quota."""
        for worker_id, worker in self.workers.items():
            share = self.entry.workers.get(worker_id) if self.entry is not None else None
            if share is None or share.incarnation != worker.incarnation:
                continue
            assert worker.running <= share.held_concurrent
            assert worker.kv_bytes <= share.held_kv_bytes


Pool.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestPool = Pool.TestCase


def test_the_model_can_see_an_overdraft() -> None:
    """The machine above would notice a split that forgets what a worker may still hold."""
    pool = Pool()
    share = Share(incarnation="i", kv_bytes=64, held_kv_bytes=64, concurrent=7, held_concurrent=7)
    entry = TenantShares(tenant_id="tn_a", tenant="a", limits=pool.limits, workers={"w1": share, "w2": share})
    with pytest.raises(AssertionError):
        pool._check(entry)
    forgetful = msgspec.structs.replace(share, held_kv_bytes=0)
    with pytest.raises(AssertionError):
        pool._check(msgspec.structs.replace(entry, workers={"w1": forgetful}))
