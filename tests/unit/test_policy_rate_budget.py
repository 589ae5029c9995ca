"""A minute's budget in blocks: never more than the limit in a minute, whatever is lost, late or dies."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.policy.rate_budget import Lease


def leased(limit: int, amount: int, *, now_s: float = 0.0) -> Lease:
    lease = Lease(limit, 7, now_s)
    lease.ask(amount)
    assert lease.granted(7, amount, amount, now_s) == 0
    return lease


def test_what_is_leased_can_be_taken_and_no_more() -> None:
    lease = leased(100, 10)
    assert lease.take(7, 0.0, 6)
    assert not lease.take(7, 0.0, 5)
    assert lease.take(7, 0.0, 4)


def test_of_a_block_that_passes_the_limit_only_what_lies_below_it_is_granted() -> None:
    lease = Lease(100, 7, 0.0)
    lease.ask(30)
    assert lease.granted(7, 30, 110, 0.0) == 10, "the rest is given back"
    assert lease.left == 20
    assert lease.want(7, 0.5) == 0, "a full counter is not asked again at once"
    assert not lease.may_come(25, 0.5)


def test_a_block_is_of_one_minute_alone() -> None:
    lease = leased(100, 10)
    assert not lease.take(8, 60.0, 1)
    assert lease.left == 0
    lease.ask(5)
    assert lease.granted(7, 5, 5, 60.0) == 5, "an answer of the minute before is given back whole"


def test_more_than_a_whole_minutes_budget_is_not_waited_for() -> None:
    assert not Lease(100, 7, 0.0).may_come(101, 0.0)
    assert Lease(100, 7, 0.0).may_come(100, 0.0)


def test_blocks_follow_demand() -> None:
    lease = Lease(6000, 7, 0.0)
    lease.take(7, 0.0, 1)
    first = lease.want(7, 0.0)
    assert first == 60
    for step in range(1, 40):
        now_s = step * 0.1
        amount = lease.want(7, now_s)
        if amount:
            lease.ask(amount)
            assert lease.granted(7, amount, amount, now_s) == 0
        for _ in range(20):
            lease.take(7, now_s, 1)
    assert 200 <= lease.want(7, 4.0) + lease.left <= 1500


def test_an_idle_block_is_given_back_whole_and_a_large_one_in_part() -> None:
    lease = leased(1000, 200)
    lease.take(7, 1.0, 1)
    assert lease.surplus(1.5) == 179
    assert lease.surplus(4.0) == 19
    assert (lease.left, lease.surplus(4.0)) == (1, 0), "one more request like the last"
    assert not lease.want(7, 4.0)
    assert not lease.is_over(6.0)
    assert lease.surplus(400.0) == 1
    assert lease.is_over(400.0)


def test_what_a_request_did_not_use_comes_back_in_its_minute_and_not_in_the_next() -> None:
    lease = leased(1000, 100)
    assert lease.take(7, 0.0, 100)
    lease.settle(7, 7, 100, 40)
    assert lease.left == 60
    assert lease.take(7, 0.0, 60)
    lease.settle(7, 8, 60, 10)
    assert (lease.left, lease.owed) == (0, 0)


def test_what_was_used_beyond_the_charge_is_owed_and_paid_first_in_the_next_minute_too() -> None:
    lease = leased(1000, 100)
    assert lease.take(7, 0.0, 100)
    lease.settle(7, 7, 100, 150)
    assert lease.owed == 50
    assert not lease.take(8, 60.0, 1), "a debt is paid before anything else"
    assert lease.want(8, 60.0) >= 50
    lease.ask(55)
    lease.granted(8, 55, 55, 60.0)
    assert (lease.owed, lease.left) == (0, 5)


def test_another_limit_gives_the_block_back() -> None:
    lease = leased(100, 40)
    assert lease.relimit(100) == 0
    assert lease.relimit(10) == 40
    assert lease.left == 0


def test_a_limit_of_nothing_lets_nothing_through() -> None:
    lease = Lease(0, 7, 0.0)
    assert not lease.take(7, 0.0, 1)
    assert not lease.may_come(1, 0.0)
    assert lease.want(7, 0.0) == 0


def test_a_minute_begins_with_what_was_leased_ahead_of_it_in_measure_of_the_demand() -> None:
    lease = leased(1000, 100)
    assert lease.take(7, 0.0, 30)
    ahead = lease.want_ahead(7, 0.5)
    assert ahead == 60, "twice what a request takes lately"
    lease.ask_ahead(ahead)
    assert lease.want_ahead(7, 0.6) == 0, "it is asked for once"
    assert lease.granted(8, ahead, 100, 0.7) == 0
    assert lease.want_ahead(7, 0.8) == 0
    assert (lease.left_in(7), lease.left_in(8)) == (70, 60)
    assert lease.take(8, 1.0, 50)
    assert (lease.left, lease.total) == (10, 100)


def test_an_answer_ahead_that_comes_late_counts_in_its_minute_and_of_a_full_counter_little_is_granted() -> None:
    lease = leased(100, 10)
    assert lease.take(7, 0.0, 5)
    lease.ask_ahead(20)
    assert not lease.take(8, 60.0, 1)
    assert lease.asked == 20, "still on its way"
    assert lease.granted(8, 20, 115, 60.0) == 15
    assert lease.take(8, 60.0, 5)


def test_a_debt_is_paid_from_what_was_leased_ahead() -> None:
    lease = leased(1000, 100)
    assert lease.take(7, 0.0, 100)
    lease.settle(7, 7, 100, 150)
    ahead = lease.want_ahead(7, 1.0)
    lease.ask_ahead(ahead)
    lease.granted(8, ahead, ahead, 1.0)
    assert lease.take(8, 60.0, ahead - 50)
    assert (lease.owed, lease.left) == (0, 0)


def test_an_idle_router_keeps_enough_for_one_more_request_unless_the_budget_is_of_few() -> None:
    sparse = leased(1000, 100)
    assert sparse.take(7, 0.0, 40)
    assert sparse.surplus(10.0) == 20
    assert sparse.want_ahead(7, 10.0) == 40
    small = leased(100, 20)
    assert small.take(7, 0.0, 10)
    assert small.surplus(10.0) == 10, "a tenth of the minute is not left lying about"
    assert small.want_ahead(7, 10.0) == 0


class _Router:
    def __init__(self, limit: int, minute: int, now_s: float) -> None:
        self.lease = Lease(limit, minute, now_s)


class Minute(RuleBasedStateMachine):
    """Several routers, one counter a minute; asks, answers and what is given back may be lost or late; routers die."""

    LIMIT = 20

    def __init__(self) -> None:
        super().__init__()
        self.minute = 0
        self.now_s = 0.0
        self.routers = [_Router(self.LIMIT, 0, 0.0) for _ in range(3)]
        self.counters: dict[int, int] = {}
        self.asks: list[tuple[_Router, int, int]] = []  # on their way to the server
        self.answers: list[tuple[_Router, int, int, int]] = []  # and back
        self.returns: list[tuple[int, int]] = []
        self.used: dict[int, int] = {}
        self.refunds: list[tuple[_Router, int, int]] = []

    @rule(number=st.integers(0, 2), amount=st.integers(1, 9))
    def a_request_comes(self, number: int, amount: int) -> None:
        router = self.routers[number]
        lease = router.lease
        if lease.take(self.minute, self.now_s, amount):
            self.used[self.minute] = self.used.get(self.minute, 0) + amount
            self.refunds.append((router, self.minute, amount))
        elif lease.may_come(amount, self.now_s):
            lease.waiting = amount

    @rule(number=st.integers(0, 2))
    def a_router_asks(self, number: int) -> None:
        router = self.routers[number]
        amount = router.lease.want(self.minute, self.now_s)
        if amount:
            router.lease.ask(amount)
            self.asks.append((router, self.minute, amount))
        router.lease.waiting = 0

    @rule(number=st.integers(0, 2))
    def a_router_asks_ahead(self, number: int) -> None:
        router = self.routers[number]
        amount = router.lease.want_ahead(self.minute, self.now_s)
        if amount:
            router.lease.ask_ahead(amount)
            self.asks.append((router, self.minute + 1, amount))

    @rule(data=st.data(), is_lost=st.booleans(), answer_is_lost=st.booleans())
    def the_server_reads_an_ask(self, data: st.DataObject, is_lost: bool, answer_is_lost: bool) -> None:
        if not self.asks:
            return
        router, minute, amount = self.asks.pop(data.draw(st.integers(0, len(self.asks) - 1)))
        if is_lost:
            return
        self.counters[minute] = self.counters.get(minute, 0) + amount
        if not answer_is_lost:
            self.answers.append((router, minute, amount, self.counters[minute]))

    @rule(data=st.data())
    def a_router_reads_an_answer(self, data: st.DataObject) -> None:
        if self.answers:
            router, minute, amount, total = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
            over = router.lease.granted(minute, amount, total, self.now_s) if router in self.routers else 0
            if over:
                self.returns.append((minute, over))

    @rule(data=st.data(), is_lost=st.booleans())
    def the_server_reads_what_is_given_back(self, data: st.DataObject, is_lost: bool) -> None:
        if self.returns:
            minute, amount = self.returns.pop(data.draw(st.integers(0, len(self.returns) - 1)))
            if not is_lost:
                self.counters[minute] = self.counters.get(minute, 0) - amount

    @rule(number=st.integers(0, 2))
    def a_router_gives_up_waiting_for_its_answer(self, number: int) -> None:
        router = self.routers[number]
        if router.lease.asked and not any(item[0] is router for item in (*self.asks, *self.answers)):
            router.lease.lost(router.lease.minute, self.now_s)

    @rule(number=st.integers(0, 2))
    def a_router_gives_back(self, number: int) -> None:
        lease = self.routers[number].lease
        spare = lease.surplus(self.now_s)
        if spare:
            self.returns.append((lease.minute, spare))

    @rule(number=st.integers(0, 2))
    def a_router_gives_up(self, number: int) -> None:
        lease = self.routers[number].lease
        self.returns += [(lease.minute, lease.give_up()), (lease.minute + 1, lease.give_up_ahead())]

    @rule(number=st.integers(0, 2))
    def a_router_dies_and_another_starts(self, number: int) -> None:
        self.routers[number] = _Router(self.LIMIT, self.minute, self.now_s)

    @rule(data=st.data())
    def a_request_used_less_than_it_was_charged(self, data: st.DataObject) -> None:
        if self.refunds:
            router, minute, amount = self.refunds.pop(data.draw(st.integers(0, len(self.refunds) - 1)))
            used = data.draw(st.integers(0, amount))
            self.used[minute] -= amount - used
            router.lease.settle(minute, self.minute, amount, used)

    @rule(seconds=st.sampled_from([0.1, 1.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def the_minute_ends(self) -> None:
        self.minute += 1
        self.now_s += 1.0

    @invariant()
    def no_minute_is_used_beyond_the_limit(self) -> None:
        assert all(used <= self.LIMIT for used in self.used.values())

    @invariant()
    def the_counter_holds_all_that_may_still_be_spent(self) -> None:
        for minute in (self.minute, self.minute + 1):
            left = sum(router.lease.left_in(minute) for router in self.routers)
            assert left + self.used.get(minute, 0) <= self.LIMIT
            assert left + self.used.get(minute, 0) <= self.counters.get(minute, 0)


Minute.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestMinute = Minute.TestCase


@pytest.mark.parametrize("limit", [1, 2, 10**12])
def test_asks_stay_within_the_limit_whatever_it_is(limit: int) -> None:
    lease = Lease(limit, 0, 0.0)
    lease.take(0, 0.0, 1)
    lease.waiting = limit
    assert 0 < lease.want(0, 0.0) <= limit
