"""KV cache over time: the sum equals what a sum over every microsecond gives."""

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.block_time import BlockTime


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-5, 9)), max_size=30), st.integers(0, 50))
def test_it_equals_the_sum_over_every_microsecond(steps: list[tuple[int, int]], last_us: int) -> None:
    time, now_us, held, expected = BlockTime(), 0, 0, 0
    for waited_us, wanted in steps:
        expected += held * waited_us
        now_us += waited_us
        change = max(wanted, -held)
        time.change(change, now_us)
        held += change
    assert time.blocks == held
    assert time.block_us(now_us + last_us) == expected + held * last_us


def test_looking_changes_nothing() -> None:
    time = BlockTime()
    time.change(3, 10)
    assert [time.block_us(now_us) for now_us in (20, 40, 20)] == [30, 90, 30]
