"""When a trial ends by itself: tables, and what must hold of any counts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.adapters import CanaryStop
from shared.policy.canary_stop import Counts, bucket_of, plus, since, upper_ms, verdict

STOP = CanaryStop(min_requests=20, error_rate_margin=0.05, latency_ratio=2.0)


def counts(requests: int, errors: int = 0, ms: float = 10.0) -> Counts:
    answered = requests - errors
    return Counts(requests=requests, errors=errors, first_byte={bucket_of(ms): answered} if answered else {})


@pytest.mark.parametrize(
    ("stable", "trial", "stops"),
    [
        (counts(200), counts(20), ""),
        (counts(200), counts(19, 19), ""),  # too few to judge
        (counts(200), counts(20, 20), "failed"),
        (counts(0), counts(20, 20), "failed"),  # nothing to compare with: its own errors are enough
        (counts(200), counts(20, 1), ""),  # one may always happen
        (counts(200), counts(40, 3), "failed"),
        (counts(200, 100), counts(20, 10), ""),  # both fail alike
        (counts(200, 100), counts(20, 20), "failed"),
        (counts(1000, 10), counts(100, 4), ""),  # 4% against 1%: within the margin
        (counts(1000, 10), counts(100, 8), "failed"),
        (counts(200), counts(20, ms=100.0), "later than"),
        (counts(200), counts(20, ms=15.0), ""),
        (counts(10), counts(20, ms=1000.0), ""),  # the stable version has not shown how long it takes
        (counts(200, ms=400.0), counts(20, ms=20.0), ""),
    ],
)
def test_what_stops_a_trial(stable: Counts, trial: Counts, stops: str) -> None:
    reason = verdict(stable, trial, STOP)
    assert (stops in reason) if stops else reason == ""


@pytest.mark.parametrize(
    ("stable", "trial", "stops"),
    [
        (Counts(requests=190, refused=10), Counts(requests=19, refused=1), ""),  # clients' mistakes come to both alike
        (Counts(requests=200), Counts(refused=20), "refused by the engine"),
        (Counts(requests=200), Counts(requests=1, errors=1, refused=18), ""),  # too few to judge
        (Counts(requests=100, refused=100), Counts(requests=10, refused=12), ""),
        (Counts(requests=200, refused=2), Counts(requests=30, refused=10), "10 of 40 requests were refused by the engine (25.0%)"),
    ],
)
def test_more_refusals_than_the_stable_versions_stop_a_trial(stable: Counts, trial: Counts, stops: str) -> None:
    reason = verdict(stable, trial, STOP)
    assert (stops in reason) if stops else reason == ""


def test_the_reason_gives_the_figures() -> None:
    reason = verdict(counts(200, 2), counts(40, 10), STOP)
    assert reason.startswith("10 of 40 requests failed (25.0%); of the stable version's 2 of 200 (1.0%)")


def test_a_few_late_answers_are_what_chance_explains() -> None:
    slow_tail = Counts(requests=100, first_byte={bucket_of(10): 95, bucket_of(500): 5})
    assert verdict(counts(1000), slow_tail, STOP) == ""
    slower = Counts(requests=100, first_byte={bucket_of(10): 80, bucket_of(500): 20})
    assert "20 of 100" in verdict(counts(1000), slower, STOP)


def test_two_versions_of_one_kind_are_hardly_ever_told_apart() -> None:
    chooser = random.Random(5)

    def drawn(many: int) -> Counts:
        found = Counts()
        for _ in range(many):
            failed = chooser.random() < 0.02
            found = plus(found, counts(1, int(failed), ms=chooser.lognormvariate(3.0, 0.8)))
        return found

    stopped = sum(verdict(drawn(180), drawn(20), STOP) != "" for _ in range(400))
    assert stopped <= 12, f"{stopped} of 400 sound trials were stopped"


@given(st.integers(20, 500), st.integers(0, 500), st.integers(0, 500))
def test_more_errors_never_save_a_trial(requests: int, errors: int, more: int) -> None:
    few, many = sorted((min(errors, requests), min(more, requests)))
    if "failed" in verdict(counts(300, 3), counts(requests, few), STOP):
        assert "failed" in verdict(counts(300, 3), counts(requests, many), STOP)


@given(st.floats(0.001, 1_000_000.0))
def test_a_bucket_holds_its_value(value_ms: float) -> None:
    bucket = bucket_of(value_ms)
    assert value_ms <= upper_ms(bucket) * 1.000001
    assert bucket == 0 or upper_ms(bucket - 1) <= value_ms * 1.000001


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.floats(1, 5000)), max_size=8))
def test_what_came_since_a_reading_is_what_was_added(steps: list[tuple[int, bool, float]]) -> None:
    before, now, added = counts(7, 2), counts(7, 2), Counts()
    for many, failed, ms in steps:
        step = counts(many, many if failed else 0, ms)
        now, added = plus(now, step), plus(added, step)
    assert since(now, before) == added
