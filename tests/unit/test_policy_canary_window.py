"""Windows by differences of counters: what came lately is found, what came long ago is not, and nothing is counted twice."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.canary_stop import Counts
from shared.policy.canary_window import Readings

WINDOW_S = 60.0


def counts(requests: int, errors: int = 0) -> Counts:
    return Counts(requests=requests, errors=errors, first_byte={3: requests} if requests else {})


def test_the_first_reading_of_a_trial_that_begins_counts_and_that_of_one_under_way_does_not() -> None:
    assert Readings(10.0, counts(5), 0).over(0.0) == counts(5)
    assert Readings(10.0, counts(5), 1).over(0.0) == Counts()


def test_a_reading_that_comes_twice_or_late_says_nothing() -> None:
    readings = Readings(0.0, counts(0), 0)
    readings.read(1.0, counts(4), 2, WINDOW_S)
    readings.read(1.1, counts(4), 2, WINDOW_S)
    readings.read(1.2, counts(2), 1, WINDOW_S)
    assert readings.over(-60.0) == counts(4)


def test_a_router_that_says_nothing_any_more_has_nothing_in_the_window() -> None:
    readings = Readings(0.0, counts(9), 0)
    assert readings.over(0.5) == Counts()


@given(st.lists(st.tuples(st.floats(0.2, 20.0), st.integers(0, 30)), min_size=1, max_size=120), st.floats(5.0, 120.0))
def test_a_window_holds_what_came_in_it_and_at_most_a_reading_more(steps: list[tuple[float, int]], window_s: float) -> None:
    readings, total, at_s = Readings(0.0, Counts(), 0), 0, 0.0
    told: list[tuple[float, int]] = [(0.0, 0)]
    for number, (later_s, more) in enumerate(steps, start=1):
        at_s += later_s
        total += more
        told.append((at_s, total))
        readings.read(at_s, counts(total), number, window_s)
    found = readings.over(at_s - window_s).requests
    slack_s = window_s / 120 + max(later_s for later_s, _ in steps)
    exactly = total - max(count for when_s, count in told if when_s <= max(at_s - window_s, 0.0))
    at_most = total - max(count for when_s, count in told if when_s <= max(at_s - window_s - slack_s, 0.0))
    assert exactly <= found <= at_most


def test_few_readings_are_kept_however_long_it_runs() -> None:
    readings, chooser, total = Readings(0.0, Counts(), 0), random.Random(1), 0
    for second in range(1, 5000):
        total += chooser.randrange(3)
        readings.read(float(second), counts(total), second, WINDOW_S)
    assert len(readings._earlier) <= 122
    assert readings.over(4999.0 - WINDOW_S).requests < 180
