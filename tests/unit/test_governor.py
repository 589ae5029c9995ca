"""In-flight counts, the handle check and the figures that usage is made of."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.governor import Attempt, Governor
from shared.contracts.inference import Handle
from shared.errors import HandleMismatch

BASE = "demo@" + "a" * 64


def handle(adapter_id: str = "ad_1") -> Handle:
    return Handle(
        tenant_id="tn_1", tenant="sales", pool_id="main", base=BASE, adapter_id=adapter_id, alias="x", version=1, digest="sha256:1"
    )


def attempt(request_id: str = "r1", number: int = 0, adapter_id: str = "ad_1") -> Attempt:
    return Attempt(request_id, number, "router", handle(adapter_id), "/v1/chat/completions")


def test_an_attempt_counts_from_begin_to_end_under_its_adapter_alone() -> None:
    governor = Governor()
    one, base = attempt("r1"), attempt("r2", adapter_id="")
    governor.begin(one)
    governor.begin(base)
    assert (governor.in_flight(), governor.in_flight("ad_1"), governor.in_flight(base.handle.subject_id)) == (2, 1, 1)
    assert governor.find("r1", 0) is one
    governor.end(one)
    assert (governor.in_flight(), governor.in_flight("ad_1")) == (1, 0)
    assert governor.find("r1", 0) is None


def test_ending_twice_counts_once() -> None:
    governor = Governor()
    one = attempt()
    governor.begin(one)
    one.prompt_tokens = 5
    governor.end(one)
    governor.end(one)
    assert governor.totals["ad_1"].prompt_tokens == 5
    assert governor.totals["ad_1"].requests == 1


def test_two_attempts_of_one_request_count_apart() -> None:
    governor = Governor()
    first, second = attempt("r1", 0), attempt("r1", 1)
    governor.begin(first)
    governor.begin(second)
    governor.end(first)
    assert governor.attempts("ad_1") == [second]


def test_a_tenant_with_less_than_an_equal_part_is_taken_however_many_others_there_are() -> None:
    def begun(tenant: str, count: int) -> None:
        for number in range(count):
            one = Attempt(f"{tenant}{number}", 0, "router", msgspec.structs.replace(handle(), tenant_id=tenant), "/v1/chat/completions")
            governor.begin(one)

    governor = Governor()
    begun("a", 7)
    assert governor.has_room("a", 10)
    begun("b", 3)
    assert [governor.has_room(tenant, 10) for tenant in "abc"] == [False, True, True]
    begun("c", 3)
    assert [governor.has_room(tenant, 10) for tenant in "abc"] == [False, False, False]
    assert governor.has_room("d", 10)
    begun("e", 7)
    assert not governor.has_room("d", 10), "twice the limit is the end"


async def test_idle_is_reached_when_the_last_attempt_of_the_subject_ends() -> None:
    governor = Governor()
    first, second, other = attempt("r1"), attempt("r2"), attempt("r3", adapter_id="ad_2")
    for each in (first, second, other):
        governor.begin(each)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(governor.wait_idle("ad_1"))
        governor.end(first)
        await asyncio.sleep(0)
        assert not waiting.done()
        governor.end(second)
        async with asyncio.timeout(1):
            await waiting
    assert governor.in_flight("ad_2") == 1


async def test_a_subject_with_nothing_in_flight_is_idle_at_once() -> None:
    async with asyncio.timeout(1):
        await Governor().wait_idle("ad_9")


@pytest.mark.parametrize(("resolved", "reached"), [("ad_1", "ad_2"), ("ad_1", ""), ("", "ad_1")])
def test_another_adapter_than_the_handles_is_refused_and_the_answer_withheld(resolved: str, reached: str) -> None:
    governor, one = Governor(), attempt(adapter_id=resolved)
    with pytest.raises(HandleMismatch):
        governor.check_handle(one, reached)
    assert isinstance(one.refusal, HandleMismatch)
    assert not one.admitted.is_set()
    assert reached not in str(one.refusal.fields.values()) or reached == ""


@pytest.mark.parametrize("adapter_id", ["ad_1", ""])
def test_the_handles_own_adapter_passes(adapter_id: str) -> None:
    one = attempt(adapter_id=adapter_id)
    Governor().check_handle(one, adapter_id)
    assert one.refusal is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 5)), max_size=8))
async def test_totals_are_the_sum_of_what_was_admitted_and_counted(steps: list[tuple[int, int, int]]) -> None:
    governor, one = Governor(), attempt()
    governor.begin(one)
    for number, (prompt, made, cached) in enumerate(steps):
        call = await governor.admit(one, prompt, 100, 1, now_s=10.0 + number)
        governor.count(one, call, completion_tokens=made, cached_tokens=cached, now_s=11.0 + number)
        governor.leave(call)
    governor.end(one)
    totals = one.totals()
    assert (totals.prompt_tokens, totals.completion_tokens, totals.cached_tokens) == tuple(map(sum, zip(*steps, strict=True))) or not steps
    assert totals.engine_ms == (len(steps) * 1000.0 if steps else 0.0)
    assert governor.totals["ad_1"].completion_tokens == totals.completion_tokens
    assert one.admitted.is_set() is bool(steps)
