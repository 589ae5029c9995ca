"""The clock that routers share."""

import pytest

from services.router.clock import ClusterClock, seconds_of


class Monotonic:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def clock(monotonic: Monotonic) -> ClusterClock:
    return ClusterClock(monotonic)


def test_it_runs_on_without_anybody(clock: ClusterClock, monotonic: Monotonic) -> None:
    assert clock.unix_s() == 0.0
    clock.heard(5000.0)
    monotonic.now_s += 90.0
    assert clock.unix_s() == 5090.0


def test_a_heartbeat_that_was_long_on_its_way_does_not_set_it_back(clock: ClusterClock, monotonic: Monotonic) -> None:
    clock.heard(5000.0)
    monotonic.now_s += 10.0
    clock.heard(5007.0)
    assert clock.unix_s() == 5010.0
    clock.heard(5010.5)
    assert clock.unix_s() == 5010.5


def test_one_old_heartbeat_is_no_step_and_many_in_a_row_are(clock: ClusterClock, monotonic: Monotonic) -> None:
    clock.heard(5000.0)
    clock.heard(1000.0)
    assert clock.unix_s() == 5000.0
    for _ in range(8):
        clock.heard(1000.0)
    assert clock.unix_s() == 1000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T00:01:00.250000Z", 60.25),
        ("1970-01-01T00:01:00.250000123Z", 60.25),
        ("1970-01-01T01:01:00+01:00", 60.0),
        ("1970-01-01T00:01:00", 60.0),
    ],
)
def test_timestamps_are_read_with_any_fraction_and_zone(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1970-13-01T00:00:00Z"])
def test_what_is_no_timestamp_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        seconds_of(text)
