"""Quotas, ceilings and slots: what is refused, with which figures; and that no order of events ever breaks the ledger."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.contracts.adapters import AdapterDrained, AdapterFailed, AdapterLoaded, DrainOrder, PoolEntry
from shared.contracts.errors import ErrorInfo
from shared.errors import Conflict, NoFreeSlot, QuotaExceeded, TenantryError
from shared.policy.admission import Reserved, decide, held_bytes, largest_versions_bytes, rank_class, slot_bytes
from shared.policy.lifecycle import HOLDS_RESERVATION, AdapterState
from shared.policy.mounts import Change, acknowledge, order_drain, order_waiting, worker_arrived, worker_removed
from shared.policy.placement import slots_held
from tests.unit.pool_values import BASE, PER_RANK, admit, ask, limits, pool, ready, refused, reserved, tenant, worker

SLOT = 8 * PER_RANK


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (2, 8), (8, 8), (9, 16), (16, 16), (17, 24), (24, 24)])
def test_the_rank_class_is_the_smallest_that_holds_the_rank_and_the_engines_maximum_is_one(rank: int, expected: int) -> None:
    assert rank_class(rank, limits(max_rank=24)) == expected
    assert slot_bytes(rank, limits(max_rank=24)) == expected * PER_RANK


def test_a_reservation_is_loading_charged_and_gets_the_next_version() -> None:
    entry = msgspec.structs.replace(pool(), versions={"sales": {"tone": 6}})
    outcome = reserved(decide(entry, tenant(), ask(), revision=17))
    mount = outcome.mount
    assert (mount.state, mount.version, mount.slot_bytes, mount.ordered_after) == (AdapterState.LOADING, 7, SLOT, 17)
    assert outcome.pool.mounts == {"ad_tone": mount}
    assert outcome.pool.versions == {"sales": {"tone": 7}}
    assert held_bytes(outcome.pool, "tn_sales") == SLOT


def test_a_version_that_comes_back_keeps_its_number() -> None:
    entry = msgspec.structs.replace(pool(), versions={"sales": {"tone": 6}})
    outcome = reserved(decide(entry, tenant(), ask(version=2), revision=1))
    assert outcome.mount.version == 2
    assert outcome.pool.versions == {"sales": {"tone": 6}}


def test_over_the_quota_is_refused_with_what_was_asked_held_and_allowed() -> None:
    who = tenant(quota=2 * SLOT - 1)
    entry = admit(pool(), who, ask("one"))
    error = refused(decide(entry, who, ask("two"), revision=1))
    assert isinstance(error, QuotaExceeded)
    assert error.fields["scope"] == "tenant"
    assert (error.fields["asked_bytes"], error.fields["held_bytes"], error.fields["limit_bytes"]) == (SLOT, SLOT, 2 * SLOT - 1)
    assert error.fields["drain_first_helps"] is False


def test_another_tenants_reservations_do_not_count_against_the_quota() -> None:
    entry = admit(pool(), tenant("cs"), ask("theirs"))
    reserved(decide(entry, tenant(quota=SLOT), ask("mine"), revision=1))


def test_over_the_adapters_own_ceiling_is_refused_though_the_tenant_has_room() -> None:
    error = refused(decide(pool(), tenant(tone=SLOT - 1), ask(), revision=1))
    assert isinstance(error, QuotaExceeded)
    assert (error.fields["scope"], error.fields["limit_bytes"]) == ("adapter", SLOT - 1)


def test_no_free_slot_is_refused_with_the_slots() -> None:
    entry = admit(pool(worker(slots=1)), tenant(), ask("one"))
    error = refused(decide(entry, tenant(), ask("two"), revision=1))
    assert isinstance(error, NoFreeSlot)
    assert (error.fields["asked_slots"], error.fields["held_slots"], error.fields["limit_slots"]) == (1, 1, 1)


def test_a_rank_that_no_worker_runs_is_refused_with_the_largest() -> None:
    error = refused(decide(pool(), tenant(), ask(rank=17), revision=1))
    assert isinstance(error, NoFreeSlot)
    assert "rank 17; the largest is 16" in error.message


def test_a_new_version_uses_the_quotas_own_room_without_headroom() -> None:
    who = tenant(quota=2 * SLOT)
    entry = ready(admit(pool(), who, ask("tone", "ad_1")), "ad_1")
    assert set(admit(entry, who, ask("tone", "ad_2")).mounts) == {"ad_1", "ad_2"}


def test_a_new_version_without_room_is_refused_with_the_hint_and_allowed_with_headroom() -> None:
    who = tenant(quota=SLOT)
    entry = ready(admit(pool(), who, ask("tone", "ad_1")), "ad_1")
    error = refused(decide(entry, who, ask("tone", "ad_2"), revision=1))
    assert isinstance(error, QuotaExceeded)
    assert "--drain-first" in error.message
    assert "alias is down" in error.message
    assert set(admit(entry, tenant(quota=SLOT, headroom=SLOT), ask("tone", "ad_2")).mounts) == {"ad_1", "ad_2"}


def test_headroom_is_not_for_a_second_adapter() -> None:
    who = tenant(quota=SLOT, headroom=SLOT)
    entry = ready(admit(pool(), who, ask("tone")), "ad_tone")
    assert isinstance(decide(entry, who, ask("other"), revision=1), QuotaExceeded)


def test_a_larger_new_version_must_itself_fit_the_quota() -> None:
    who = tenant(quota=SLOT, headroom=10 * SLOT)
    entry = ready(admit(pool(), who, ask("tone", "ad_1")), "ad_1")
    error = refused(decide(entry, who, ask("tone", "ad_2", rank=16), revision=1))
    assert error.fields["limit_bytes"] == SLOT


def test_a_third_version_while_the_second_still_loads_is_a_conflict() -> None:
    entry = ready(admit(pool(worker(slots=9)), tenant(), ask("tone", "ad_1")), "ad_1")
    entry = admit(entry, tenant(), ask("tone", "ad_2"))
    error = refused(decide(entry, tenant(), ask("tone", "ad_3"), revision=1))
    assert isinstance(error, Conflict)
    assert error.fields["version"] == 2


def test_drain_first_takes_the_alias_down_drains_the_old_and_waits_for_its_room() -> None:
    who = tenant(quota=SLOT)
    entry = ready(admit(pool(worker(slots=1)), who, ask("tone", "ad_1")), "ad_1")
    outcome = reserved(decide(entry, who, ask("tone", "ad_2", drain_first=True), revision=5))
    assert outcome.mount.state is AdapterState.ADMITTED
    assert outcome.pool.mounts["ad_1"].state is AdapterState.DRAINING
    assert outcome.pool.aliases == {"sales": {}}
    assert held_bytes(outcome.pool, who.tenant_id) == SLOT
    drained = acknowledge(outcome.pool, _drained(outcome.pool, "ad_1", 6), revision=6)
    assert drained is not None
    assert [order.adapter_id for order in drained.orders] == ["ad_2"]
    assert drained.pool.mounts["ad_2"].state is AdapterState.LOADING


def test_drain_first_of_a_larger_version_asks_only_for_the_difference() -> None:
    entry = ready(admit(pool(worker(slots=1)), tenant(), ask("tone", "ad_1")), "ad_1")
    fits = reserved(decide(entry, tenant(quota=2 * SLOT), ask("tone", "ad_2", rank=16, drain_first=True), revision=1))
    assert held_bytes(fits.pool, "tn_sales") == 2 * SLOT
    assert isinstance(decide(entry, tenant(quota=2 * SLOT - 1), ask("tone", "ad_2", rank=16, drain_first=True), revision=1), QuotaExceeded)


def test_who_waits_for_one_that_waits_itself_inherits_its_place() -> None:
    who = tenant(quota=SLOT)
    entry = ready(admit(pool(worker(slots=1)), who, ask("tone", "ad_1")), "ad_1")
    entry = admit(entry, who, ask("tone", "ad_2", drain_first=True))
    entry = order_drain(entry, ["ad_2"], DrainOrder(), revision=2).pool
    entry = admit(entry, who, ask("tone", "ad_3", drain_first=True), revision=3)
    assert entry.mounts["ad_3"].waits_for == "ad_2"
    left = acknowledge(entry, _drained(entry, "ad_2", 4), revision=4)
    assert left is not None
    assert left.orders == ()
    assert left.pool.mounts["ad_3"].waits_for == "ad_1"
    assert (slots_held(left.pool, "w1"), held_bytes(left.pool, who.tenant_id)) == (1, SLOT)


def test_a_decision_leaves_the_entry_it_was_given_as_it_was() -> None:
    entry = ready(admit(pool(), tenant(), ask("tone", "ad_1")), "ad_1")
    before = msgspec.json.encode(entry)
    decide(entry, tenant(), ask("tone", "ad_2", drain_first=True), revision=1)
    assert msgspec.json.encode(entry) == before


def test_an_acknowledgement_of_an_earlier_order_or_of_another_incarnation_changes_nothing() -> None:
    entry = admit(pool(), tenant(), ask(), revision=20)
    assert acknowledge(entry, _loaded(entry, "ad_tone", 20), revision=21) is None
    assert acknowledge(entry, msgspec.structs.replace(_loaded(entry, "ad_tone", 21), incarnation="i0"), revision=21) is None
    assert acknowledge(entry, _drained(entry, "ad_tone", 21), revision=21) is None
    assert acknowledge(entry, _loaded(entry, "ad_tone", 21), revision=21) is not None


def test_a_worker_that_offers_less_than_is_mounted_on_it_is_refused_with_the_figures() -> None:
    entry = admit(admit(pool(), tenant(), ask("one")), tenant(), ask("two"))
    error = worker_arrived(entry, worker(incarnation="i2", slots=1), BASE, revision=1)
    assert isinstance(error, Conflict)
    assert (error.fields["field"], error.fields["asked"], error.fields["allowed"]) == ("slots", 2, 1)


def _common(entry: PoolEntry, adapter_id: str, generation: int) -> dict[str, object]:
    mount = entry.mounts[adapter_id]
    holder = entry.workers[mount.worker_id]
    return {
        "pool_id": entry.pool_id,
        "adapter_id": adapter_id,
        "worker_id": holder.worker_id,
        "incarnation": holder.incarnation,
        "generation": generation,
    }


def _loaded(entry: PoolEntry, adapter_id: str, generation: int) -> AdapterLoaded:
    common = _common(entry, adapter_id, generation)
    return msgspec.convert(
        {**common, "type": "loaded", "modules_matched": 1, "probe_difference": 1.0, "fetch_ms": 1.0, "load_ms": 1.0, "bytes_loaded": 1},
        AdapterLoaded,
    )


def _drained(entry: PoolEntry, adapter_id: str, generation: int) -> AdapterDrained:
    figures = dict.fromkeys(
        ("slot_bytes_returned", "host_bytes_freed", "device_free_bytes_before", "device_free_bytes_after", "completed", "aborted"), 0
    )
    return msgspec.convert({**_common(entry, adapter_id, generation), "type": "drained", **figures}, AdapterDrained)


def _failed(entry: PoolEntry, adapter_id: str, generation: int) -> AdapterFailed:
    return AdapterFailed(**_common(entry, adapter_id, generation), error=ErrorInfo(code="load_failed", message="no"))  # pyright: ignore


class Ledger(RuleBasedStateMachine):
    """Every operation in any order, on two workers and two tenants with two names each; workers answer late, twice or never."""

    names = st.sampled_from(["one", "two"])
    owners = st.sampled_from(["sales", "cs"])
    workers = st.sampled_from(["w1", "w2"])

    @initialize()
    def begin(self) -> None:
        self.entry = pool(worker("w1", slots=2), worker("w2", slots=1))
        self.revision = 1
        self.tenants = {"sales": tenant("sales", quota=2 * SLOT, headroom=SLOT, one=2 * SLOT), "cs": tenant("cs", quota=3 * SLOT)}
        self.sent: list[AdapterLoaded | AdapterDrained | AdapterFailed] = []

    def take(self, change: Change | None) -> None:
        if change is None:
            return
        for order in change.orders:
            assert change.pool.mounts[order.adapter_id] == order
            assert order.state in (AdapterState.LOADING, AdapterState.DRAINING)
        for outcome in change.outcomes:
            assert (outcome.mount.adapter_id in change.pool.mounts) == (outcome.state in HOLDS_RESERVATION)
        self.entry = change.pool
        self.revision += 1

    def add(self, owner: str, name: str, rank: int, drain_first: bool, number: int) -> None:
        adapter_id = f"ad_{owner}_{name}_{number}"  # a version that left may come back under its own id
        if adapter_id in self.entry.mounts:
            return
        before = msgspec.json.encode(self.entry)
        outcome = decide(
            self.entry, self.tenants[owner], ask(name, adapter_id, rank=rank, drain_first=drain_first, version=number), self.revision
        )
        assert msgspec.json.encode(self.entry) == before
        if isinstance(outcome, Reserved):
            self.entry, self.revision = outcome.pool, self.revision + 1

    @rule(owner=owners, name=names, rank=st.sampled_from([4, 4, 16]), drain_first=st.booleans(), number=st.integers(1, 4))
    def add_one(self, owner: str, name: str, rank: int, drain_first: bool, number: int) -> None:
        self.add(owner, name, rank, drain_first, number)

    @rule(number=st.integers(1, 4), drain_first=st.booleans())
    def upgrade(self, number: int, drain_first: bool) -> None:
        self.add("sales", "one", 4, drain_first, number)

    @rule()
    def every_worker_obeys(self) -> None:
        for adapter_id in sorted(self.entry.mounts):
            self.obey(adapter_id)

    @rule(data=st.data())
    def a_worker_obeys(self, data: st.DataObject) -> None:
        if self.entry.mounts:
            self.obey(data.draw(st.sampled_from(sorted(self.entry.mounts))))

    def obey(self, adapter_id: str) -> None:
        mount = self.entry.mounts.get(adapter_id)
        if mount is not None and mount.state in (AdapterState.LOADING, AdapterState.DRAINING):
            ack = (_loaded if mount.state is AdapterState.LOADING else _drained)(self.entry, adapter_id, self.revision)
            self.sent.append(ack)
            change = acknowledge(self.entry, ack, self.revision)
            assert change is not None
            self.take(change)

    @rule(data=st.data(), kind=st.sampled_from([_loaded, _drained, _failed]), late=st.booleans())
    def a_worker_answers_anything(self, data: st.DataObject, kind: object, late: bool) -> None:
        if not self.entry.mounts:
            return
        mount = self.entry.mounts[data.draw(st.sampled_from(sorted(self.entry.mounts)))]
        if mount.worker_id not in self.entry.workers or (mount.state is AdapterState.ADMITTED):
            return
        ack = kind(self.entry, mount.adapter_id, self.revision)  # type: ignore[operator]
        self.sent.append(ack)
        if not late:
            self.take(acknowledge(self.entry, ack, self.revision))

    @rule()
    def every_answer_so_far_comes_again(self) -> None:
        for ack in self.sent:
            mount = self.entry.mounts.get(ack.adapter_id)
            change = acknowledge(self.entry, ack, self.revision)
            if mount is None or ack.generation <= mount.ordered_after:
                assert change is None
            self.take(change)

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        if self.entry.mounts:
            adapter_id = data.draw(st.sampled_from(sorted(self.entry.mounts)))
            self.take(order_drain(self.entry, [adapter_id, "ad_unknown"], DrainOrder(), self.revision))
            assert adapter_id not in {target for names in self.entry.aliases.values() for target in names.values()}

    @rule(worker_id=workers, slots=st.integers(1, 2))
    def a_worker_starts(self, worker_id: str, slots: int) -> None:
        self.worker_starts(worker_id, slots)

    def worker_starts(self, worker_id: str, slots: int) -> None:
        before = self.entry
        change = worker_arrived(self.entry, worker(worker_id, f"i{self.revision + 1}", slots), BASE, self.revision)
        if isinstance(change, TenantryError):
            assert slots < slots_held(before, worker_id) or before.workers.get(worker_id) is None
            return
        self.take(change)
        assert all(mount.state is not AdapterState.READY for mount in self.entry.mounts.values() if mount.worker_id == worker_id)

    @rule(worker_id=workers, chance=st.integers(0, 3))
    def worker_is_removed(self, worker_id: str, chance: int) -> None:
        if chance:
            return
        self.take(worker_removed(self.entry, worker_id, self.revision))
        assert all(mount.worker_id != worker_id for mount in self.entry.mounts.values())
        self.worker_starts(worker_id, 2)

    @rule()
    def reconcile(self) -> None:
        self.take(order_waiting(self.entry, self.revision))

    @invariant()
    def no_tenant_holds_more_than_it_may(self) -> None:
        for who in self.tenants.values():
            mounts = [mount for mount in self.entry.mounts.values() if mount.tenant_id == who.tenant_id]
            switching = len({mount.name for mount in mounts}) < len(mounts)
            allowed = who.vram_quota_bytes + (who.upgrade_headroom_bytes if switching else 0)
            assert held_bytes(self.entry, who.tenant_id) <= allowed
            assert largest_versions_bytes(self.entry, who.tenant_id) <= who.vram_quota_bytes

    @invariant()
    def no_worker_has_more_mounts_than_slots(self) -> None:
        for known in self.entry.workers.values():
            assert slots_held(self.entry, known.worker_id) <= known.limits.slots

    @invariant()
    def every_mount_holds_its_reservation_on_a_worker_that_is_there(self) -> None:
        for adapter_id, mount in self.entry.mounts.items():
            assert mount.adapter_id == adapter_id
            assert mount.state in HOLDS_RESERVATION
            assert mount.worker_id in self.entry.workers

    @invariant()
    def an_alias_points_at_a_mount_of_its_own_name_that_does_not_drain(self) -> None:
        for owner, names in self.entry.aliases.items():
            for name, adapter_id in names.items():
                mount = self.entry.mounts[adapter_id]
                assert (mount.tenant, mount.name) == (owner, name)
                assert mount.state in (AdapterState.READY, AdapterState.LOADING)

    @invariant()
    def what_waits_does_so_for_something_that_drains(self) -> None:
        for mount in self.entry.mounts.values():
            if mount.state is AdapterState.ADMITTED:
                assert self.entry.mounts[mount.waits_for].state is AdapterState.DRAINING


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
