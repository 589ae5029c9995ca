"""Which worker an adapter goes to."""

from shared.policy.placement import choose_worker, slots_held
from tests.unit.pool_values import admit, ask, pool, ready, tenant, worker


def test_the_worker_with_the_fewest_reserved_slots_is_chosen_then_the_smallest_id() -> None:
    entry = pool(worker("w2"), worker("w1"))
    placed = []
    for n in range(4):
        entry = admit(entry, tenant(), ask(f"a{n}"))
        placed.append(entry.mounts[f"ad_a{n}"].worker_id)
    assert placed == ["w1", "w2", "w1", "w2"]


def test_a_worker_without_a_free_slot_is_never_chosen() -> None:
    entry = pool(worker("w1", slots=1), worker("w2", slots=3))
    for n in range(4):
        entry = admit(entry, tenant(), ask(f"a{n}"))
    assert (slots_held(entry, "w1"), slots_held(entry, "w2")) == (1, 3)
    assert choose_worker(entry, rank=8) is None


def test_a_worker_that_does_not_run_the_rank_is_passed_over() -> None:
    entry = pool(worker("w1", max_rank=8), worker("w2", max_rank=64))
    chosen = choose_worker(entry, rank=32)
    assert chosen is not None
    assert chosen.worker_id == "w2"
    assert choose_worker(entry, rank=65) is None


def test_nothing_is_chosen_in_a_pool_without_workers() -> None:
    entry = pool(worker("w1", slots=0))
    assert choose_worker(entry, rank=1) is None


def test_a_version_that_waits_for_anothers_room_holds_no_second_slot() -> None:
    entry = ready(admit(pool(worker(slots=1)), tenant(), ask("tone", "ad_1")), "ad_1")
    entry = admit(entry, tenant(), ask("tone", "ad_2", drain_first=True))
    assert slots_held(entry, "w1") == 1
