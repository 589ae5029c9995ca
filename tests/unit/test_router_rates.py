"""A router's dealings with the counters: what it asks for, what it gives back, and what happens to answers that are lost or late."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from services.router.clock import ClusterClock
from services.router.dispatch import Dispatcher
from services.router.metrics import Metrics
from services.router.rates import Rates
from shared.bus import INCREMENT_HEADER, Message
from shared.contracts.rates import REQUESTS, TOKENS, rate_subject
from shared.contracts.tenancy import TenantLimits
from shared.errors import RequestRateExceeded, TokenRateExceeded

TENANT = "tn_1"
MINUTE = 1000


class Counters:
    """The bus and the dispatcher, as far as budgets see them. `answering`: each ask is answered at once."""

    def __init__(self) -> None:
        self.connected = True
        self.answering = True
        self.totals: dict[str, int] = {}
        self.moves: list[tuple[str, int]] = []
        self.unanswered: list[tuple[str, int]] = []
        self.hear: Callable[[str, Message], None] = lambda _number, _message: None

    @property
    def bus(self) -> "Counters":
        return self

    def on_side(self, _kind: str, handler: Callable[[str, Message], None]) -> None:
        self.hear = handler

    def side_subject(self, _kind: str, number: str) -> str:
        return number

    async def publish(self, subject: str, _data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        assert headers is not None
        amount = int(headers[INCREMENT_HEADER])
        self.moves.append((subject, amount))
        self.totals[subject] = self.totals.get(subject, 0) + amount
        if reply and self.answering:
            self.answer(reply, self.totals[subject])
        elif reply:
            self.unanswered.append((reply, self.totals[subject]))

    def answer(self, number: str, total: int) -> None:
        data = b'{"stream":"S","seq":1,"val":"%d"}' % total
        asyncio.get_running_loop().call_soon(self.hear, number, Message("", data, "", ""))

    def refuse(self, number: str, status: str = "") -> None:
        self.hear(number, Message("", b'{"error":{"code":400,"description":"no"},"seq":0}', "", status))


@pytest.fixture
def counters() -> Counters:
    return Counters()


class Time:
    def __init__(self) -> None:
        self.unix_s = MINUTE * 60.0 + 1.0

    def __call__(self) -> float:
        return self.unix_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def rates(counters: Counters, time: Time) -> Rates:
    clock = ClusterClock(time)
    clock.heard(time.unix_s)
    return Rates(cast(Dispatcher, counters), clock, Metrics())


async def admit(rates: Rates, tokens: int = 0, **limits: Any) -> Any:
    return await rates.admit(TENANT, TenantLimits(**limits), tokens, asyncio.get_running_loop().time())


def standing(counters: Counters, kind: str) -> int:
    return counters.totals.get(rate_subject(TENANT, kind, MINUTE), 0)


async def test_nothing_is_asked_for_a_tenant_without_budgets(rates: Rates, counters: Counters) -> None:
    assert await admit(rates) is None
    assert counters.moves == []


async def test_the_first_request_waits_for_one_answer_and_the_next_for_none(rates: Rates, counters: Counters) -> None:
    await admit(rates, requests_per_minute=1000)
    assert counters.moves == [(rate_subject(TENANT, REQUESTS, MINUTE), 11)]
    for _ in range(10):
        await admit(rates, requests_per_minute=1000)
    assert len(counters.moves) == 1


async def test_a_refused_budget_of_tokens_costs_no_request(rates: Rates) -> None:
    with pytest.raises(TokenRateExceeded):
        await admit(rates, 101, requests_per_minute=1, tokens_per_minute=100)
    assert (await admit(rates, 100, requests_per_minute=1, tokens_per_minute=100)).tokens == 100
    with pytest.raises(RequestRateExceeded):
        await admit(rates, 0, requests_per_minute=1, tokens_per_minute=100)


async def test_what_it_stops_with_goes_back_once_and_nothing_is_asked_for_again(rates: Rates, counters: Counters) -> None:
    await admit(rates, 40, requests_per_minute=1000, tokens_per_minute=1000)
    await rates.stop()
    await rates.stop()
    assert (standing(counters, REQUESTS), standing(counters, TOKENS)) == (1, 40)
    moves = len(counters.moves)
    await asyncio.wait_for(rates.run(), 5.0)
    assert len(counters.moves) == moves


async def test_a_block_of_another_limit_goes_back(rates: Rates, counters: Counters) -> None:
    await admit(rates, requests_per_minute=1000)
    await admit(rates, requests_per_minute=500)
    await rates.stop()
    assert standing(counters, REQUESTS) == 2


async def test_an_answer_that_does_not_come_is_not_waited_for_long_and_given_back_when_it_comes_late(
    rates: Rates, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.rates._LOST_S", 0.0)
    counters.answering = False
    with pytest.raises(RequestRateExceeded):
        await admit(rates, requests_per_minute=1000)
    running = asyncio.get_running_loop().create_task(rates.run())
    account = rates.account(REQUESTS, TENANT)
    assert account is not None
    while account.lease.asked:
        await asyncio.sleep(0.01)
    assert standing(counters, REQUESTS) == 11
    ((number, total), *_) = counters.unanswered
    counters.answer(number, total)
    while standing(counters, REQUESTS):
        await asyncio.sleep(0.01)
    assert account.lease.left == 0
    await rates.stop()
    await running


@pytest.mark.parametrize("status", ["", "503"])
async def test_a_counter_that_refuses_is_closed_for_a_while(rates: Rates, counters: Counters, status: str) -> None:
    counters.answering = False
    first = asyncio.get_running_loop().create_task(admit(rates, requests_per_minute=1000))
    while not counters.unanswered:
        await asyncio.sleep(0)
    counters.refuse(counters.unanswered[0][0], status)
    with pytest.raises(RequestRateExceeded):
        await first
    with pytest.raises(RequestRateExceeded):
        await admit(rates, requests_per_minute=1000)
    assert len(counters.unanswered) == 1, "it is not asked with every request"


async def test_a_long_requests_debt_is_remembered_after_its_account_was_forgotten(rates: Rates, counters: Counters) -> None:
    charge = await admit(rates, 10, tokens_per_minute=1000)
    rates._tokens.clear()
    rates.settle(charge, 500, asyncio.get_running_loop().time())
    account = rates.account(TOKENS, TENANT)
    assert account is not None
    assert account.lease.owed == 490


async def test_without_the_bus_what_is_held_is_served_and_no_more(rates: Rates, counters: Counters) -> None:
    await admit(rates, requests_per_minute=100)
    counters.connected = False
    account = rates.account(REQUESTS, TENANT)
    assert account is not None
    for _ in range(account.lease.left):
        await admit(rates, requests_per_minute=100)
    with pytest.raises(RequestRateExceeded) as caught:
        await admit(rates, requests_per_minute=100)
    assert caught.value.fields["retry_after_s"] == pytest.approx(59.0, abs=0.5)


def at_once(rates: Rates, **limits: Any) -> bool:
    """Whether a request is let in without giving the loop a turn, and so without waiting for anybody."""
    asking = rates.admit(TENANT, TenantLimits(**limits), 300, asyncio.get_running_loop().time())
    try:
        asking.send(None)
    except StopIteration:
        return True
    asking.close()
    return False


async def test_with_a_slow_bus_the_requests_of_the_next_minute_wait_for_nothing(rates: Rates, counters: Counters, time: Time) -> None:
    """Every answer takes seconds: those for the next minute are there before it."""
    limits = {"requests_per_minute": 1000, "tokens_per_minute": 100_000}
    await admit(rates, 300, **limits)
    counters.answering = False
    now_s = asyncio.get_running_loop().time()
    time.unix_s = (MINUTE + 1) * 60.0 - 0.9
    await rates._tend(now_s + 1.0)
    asked = [(subject, amount) for subject, amount in counters.moves if subject.endswith(f".{MINUTE + 1}")]
    assert sorted(subject for subject, _ in asked) == sorted(rate_subject(TENANT, kind, MINUTE + 1) for kind in (REQUESTS, TOKENS))
    await rates._tend(now_s + 1.1)
    assert len([subject for subject, _ in counters.moves if subject.endswith(f".{MINUTE + 1}")]) == 2, "once"
    for number, total in counters.unanswered:
        counters.answer(number, total)
    counters.unanswered.clear()
    await asyncio.sleep(0)
    time.unix_s = (MINUTE + 1) * 60.0
    rates._minute_until_s = -1.0
    assert at_once(rates, **limits)
    assert counters.unanswered == []


async def test_without_a_lease_ahead_that_request_would_have_waited(rates: Rates, counters: Counters, time: Time) -> None:
    await admit(rates, 300, tokens_per_minute=100_000)
    counters.answering = False
    time.unix_s = (MINUTE + 1) * 60.0
    rates._minute_until_s = -1.0
    assert not at_once(rates, tokens_per_minute=100_000)


async def test_what_was_leased_ahead_goes_back_when_the_router_stops_or_the_limit_changes(
    rates: Rates, counters: Counters, time: Time
) -> None:
    await admit(rates, requests_per_minute=1000)
    time.unix_s = (MINUTE + 1) * 60.0 - 0.9
    await rates._tend(asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    ahead = rate_subject(TENANT, REQUESTS, MINUTE + 1)
    assert counters.totals[ahead] > 0
    await admit(rates, requests_per_minute=500)
    await rates.stop()
    assert counters.totals[ahead] == 0
