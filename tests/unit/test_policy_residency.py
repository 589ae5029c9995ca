"""What the ledger charged, told exactly: over any history of a pool, published whenever, the records sum to the charges held."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.adapters import PoolEntry
from shared.contracts.usage import Residency
from shared.policy.admission import charged_bytes
from shared.policy.residency import accounted, ended, held, published
from tests.unit.pool_values import admit, ask, pool, ready, tenant, worker


def without(entry: PoolEntry, adapter_id: str) -> PoolEntry:
    mounts = {known: mount for known, mount in entry.mounts.items() if known != adapter_id}
    mounts = {
        known: msgspec.structs.replace(mount, waits_for="") if mount.waits_for == adapter_id else mount
        for known, mount in mounts.items()
    }  # fmt: skip
    return msgspec.structs.replace(entry, mounts=mounts)


def test_a_charge_lasts_from_the_stamp_that_stored_it_to_the_stamp_that_stored_its_end() -> None:
    empty = pool()
    reserved = accounted(empty, admit(empty, tenant(), ask()), 1000)
    (open_charge,) = held(reserved, 2000, 2500)
    assert (open_charge.since_ms, open_charge.until_ms, open_charge.bytes, open_charge.final) == (2000, 2500, 800, False)
    assert (open_charge.tenant, open_charge.alias, open_charge.base) == ("sales", "tone", empty.base)
    gone = accounted(reserved, without(reserved, "ad_tone"), 2000)
    assert held(gone, 7000, 8000) == []
    (end,) = ended(gone, 7000)
    assert (end.since_ms, end.until_ms, end.final) == (2000, 7000, True)
    later = accounted(gone, msgspec.structs.replace(gone, guaranteed={"t": 1}), 7000)
    assert ended(later, 9000) == [end]
    assert published(later, [end]).left == ()


def test_what_is_held_at_the_moment_of_its_reservation_is_told_only_once_time_has_passed() -> None:
    empty = pool()
    reserved = accounted(empty, admit(empty, tenant(), ask()), 1000)
    assert held(reserved, 2000, 2000) == []
    assert held(reserved, 2000, 1500) == []


def test_a_version_that_waits_for_anothers_room_is_charged_what_it_needs_beyond_it_and_then_all() -> None:
    one_slot = pool(worker(slots=1))
    first = ready(accounted(one_slot, admit(one_slot, tenant(), ask(adapter_id="old", rank=4)), 1), "old")
    both = accounted(first, admit(first, tenant(), ask(adapter_id="new", rank=16, drain_first=True)), 10)
    assert {record.adapter_id: record.bytes for record in held(both, 20, 25)} == {"old": 800, "new": 800}
    alone = accounted(both, without(both, "old"), 20)
    assert [(record.adapter_id, record.bytes, record.since_ms, record.until_ms) for record in ended(alone, 30)] == [
        ("old", 800, 10, 30),
        ("new", 800, 20, 30),
    ]
    assert [(record.adapter_id, record.bytes, record.since_ms) for record in held(alone, 30, 40)] == [("new", 1600, 30)]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add a", "add b", "drop a", "drop b", "touch", "publish", "checkpoint"]), st.integers(1, 500)),
        max_size=30,
    )
)
def test_over_any_history_the_records_sum_to_what_was_charged(steps: list[tuple[str, int]]) -> None:
    entry, stored_ms = pool(worker(slots=2)), 1000
    charged = 0  # byte-milliseconds, counted as time passes
    told: dict[tuple[str, int], Residency] = {}
    versions = 0

    def take(records: list[Residency]) -> None:
        for record in records:
            known = told.get((record.adapter_id, record.since_ms))
            if known is None or record.until_ms >= known.until_ms:
                told[(record.adapter_id, record.since_ms)] = record

    now_ms = stored_ms
    for what, passes_ms in steps:
        charged += passes_ms * sum(charged_bytes(entry, mount) for mount in entry.mounts.values())
        now_ms += passes_ms
        after = entry
        kind, _, name = what.partition(" ")
        mounted = next((mount.adapter_id for mount in entry.mounts.values() if mount.name == name), "")
        if kind == "add" and not mounted:
            versions += 1
            after = admit(entry, tenant(), ask(name, adapter_id=f"{name}{versions}"))
        elif kind == "drop" and mounted:
            after = without(entry, mounted)
        elif kind == "touch":
            after = msgspec.structs.replace(entry, guaranteed={"t": now_ms})
        elif kind == "publish":
            take(ended(entry, stored_ms))
            after = published(entry, ended(entry, stored_ms))
        elif kind == "checkpoint":
            take(held(entry, stored_ms, now_ms))
        if after != entry:
            entry, stored_ms = accounted(entry, after, stored_ms), now_ms
    take(ended(entry, stored_ms))
    take(held(entry, stored_ms, now_ms))
    assert sum(record.bytes * (record.until_ms - record.since_ms) for record in told.values()) == charged
