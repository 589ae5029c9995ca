"""Which worker is asked, which incarnation is believed, and when a worker is gone."""

from services.router.fleet import Fleet
from shared.contracts.adapters import PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.workers import AdapterUse, WorkerReport

LIMITS = EngineLimits(slots=1, max_rank=8, bytes_per_rank=1)


def worker(name: str) -> PoolWorker:
    return PoolWorker(worker_id=name, incarnation="01A", limits=LIMITS)


def report(name: str, in_flight: int, *, state: str = "ready", incarnation: str = "01A", capacity: int = 8) -> WorkerReport:
    return WorkerReport(
        worker_id=name,
        incarnation=incarnation,
        pool_id="p",
        generation=1,
        state=state,
        in_flight=in_flight,
        waiting=0,
        capacity=capacity,
        base=AdapterUse(adapter_id="", residency="device"),
    )


def test_the_least_loaded_ready_worker_is_picked() -> None:
    fleet = Fleet()
    for row in (report("a", 5), report("b", 2), report("c", 0, state="stopping"), report("d", 4, capacity=64)):
        fleet.reported(row, 1.0)
    workers = tuple(worker(name) for name in "abcd")
    assert {fleet.pick(workers, set()).worker_id for _ in range(8)} == {"d"}  # type: ignore[union-attr]
    assert {fleet.pick(workers, {"d"}).worker_id for _ in range(8)} == {"b"}  # type: ignore[union-attr]
    assert {fleet.pick(workers, {"a", "b", "d"}).worker_id for _ in range(8)} == {"c"}  # type: ignore[union-attr]
    assert fleet.pick(workers, set("abcd")) is None


def test_equals_take_turns_and_own_outstanding_work_counts_before_a_report_does() -> None:
    fleet = Fleet()
    workers = (worker("a"), worker("b"))
    assert {fleet.pick(workers, set()).worker_id for _ in range(4)} == {"a", "b"}  # type: ignore[union-attr]
    fleet.peer("a").open = 3
    assert {fleet.pick(workers, set()).worker_id for _ in range(4)} == {"b"}  # type: ignore[union-attr]


def test_an_older_incarnation_is_not_believed_and_a_newer_one_replaces() -> None:
    fleet = Fleet()
    assert fleet.heard("a", "01B", 1.0) == ""
    assert fleet.heard("a", "01A", 2.0) is None
    assert fleet.heard("a", "01C", 3.0) == "01B"
    assert fleet.heard("a", "01C", 4.0) == ""


def test_an_incarnation_that_sorts_lower_is_believed_when_the_pool_names_it() -> None:
    fleet = Fleet()
    fleet.heard("a", "01B", 1.0)
    fleet.registered = {"a": "00Z"}
    assert fleet.heard("a", "00Z", 2.0) == "01B"


def test_only_quiet_workers_with_open_work_are_pinged() -> None:
    fleet = Fleet()
    for name in ("busy", "talking", "idle"):
        fleet.heard(name, "01A", 0.0)
    fleet.peer("busy").open = fleet.peer("talking").open = 1
    fleet.heard("talking", "01A", 0.9)
    assert [peer.worker_id for peer in fleet.to_ping(1.0)] == ["busy"]
    assert fleet.to_ping(1.05) == []


def test_a_worker_is_gone_after_three_missed_pings_in_a_row_and_never_right_after_our_own_reconnect() -> None:
    fleet = Fleet()
    assert [fleet.missed_ping("a", 10.0) for _ in range(2)] == [False, False]
    fleet.heard("a", "01A", 1.0)
    assert [fleet.missed_ping("a", 10.0) for _ in range(3)] == [False, False, True]
    assert [fleet.missed_ping("b", 1.0) for _ in range(9)] == [False] * 9
