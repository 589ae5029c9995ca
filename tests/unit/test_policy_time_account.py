"""The account of an engine's time, beside one that looks at every nanosecond."""

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.time_account import BUSY, IDLE, TimeAccount

intervals = st.lists(
    st.tuples(st.sampled_from([BUSY, IDLE, "schedule", "ipc", "output"]), st.integers(0, 60), st.integers(0, 60)).map(
        lambda one: (one[0], min(one[1:]), max(one[1:]))
    ),
    max_size=12,
)


def kinds(told: list[tuple[str, int, int]], until_ns: int) -> list[str]:
    """By moment: busy, before overhead, before idle, before nothing."""
    found: list[str] = []
    for moment in range(until_ns):
        here = {name for name, start, end in told if start <= moment < end}
        overhead = here - {BUSY, IDLE}
        found.append(BUSY if BUSY in here else "overhead" if overhead else IDLE if here else "")
    return found


@given(intervals, st.lists(st.integers(0, 60), max_size=4))
def test_every_moment_counts_once_wherever_the_account_is_closed_in_between(told: list[tuple[str, int, int]], closings: list[int]) -> None:
    account = TimeAccount(0)
    for interval in told:
        account.add(*interval)
    for until_ns in [*sorted(closings), 60]:
        account.close(until_ns)
        expected = kinds(told, until_ns)
        assert (account.busy_ns, account.idle_ns) == (expected.count(BUSY), expected.count(IDLE))
        assert sum(account.overhead_ns.values()) == expected.count("overhead")
        assert account.unaccounted_ns == expected.count("")


def test_of_two_overheads_at_once_the_one_that_began_last_counts() -> None:
    account = TimeAccount(0)
    account.add("prepare", 0, 10)
    account.add("kv_zeroing", 2, 5)
    account.close(10)
    assert account.overhead_ns == {"prepare": 7, "kv_zeroing": 3}


def test_an_overlapping_steps_scheduling_costs_nothing_beside_the_step_that_computes() -> None:
    account = TimeAccount(0)
    account.add(BUSY, 0, 100)
    account.add("schedule", 40, 60)
    account.add(BUSY, 100, 180)
    account.close(180)
    assert (account.busy_ns, account.overhead_ns, account.unaccounted_ns) == (180, {}, 0)


def test_what_is_told_too_late_stays_unaccounted() -> None:
    account = TimeAccount(0)
    account.close(50)
    account.add(BUSY, 20, 70)
    account.close(70)
    assert (account.busy_ns, account.unaccounted_ns) == (20, 50)
