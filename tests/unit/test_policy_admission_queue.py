"""What enters, waits and is refused; and that everything balances whatever comes, ends, is withdrawn or crashes in between."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.policy.admission_queue import AdmissionQueue, TenantLine
from shared.policy.asks import Ask, AskState, Limit, Short, TenantTerms
from shared.policy.engine_room import EngineRoom, EngineShape, shape_of
from shared.policy.fair_order import FairOrder
from shared.policy.kv_ledger import KvLedger, KvShare

SHAPE = EngineShape(seats=8, reserved_seats=1, step_tokens=1024, shared_prefill_tokens=128)


def made(shape: EngineShape = SHAPE, blocks: int = 1000, **terms: TenantTerms) -> AdmissionQueue:
    queue = AdmissionQueue(EngineRoom(shape), KvLedger(blocks), FairOrder())
    for tenant_id, one in terms.items():
        queue.set_terms(tenant_id, one)
    return queue


def ask(key: Any, tenant: str = "a", *, prompt: int = 64, new: int = 32, seats: int = 1, blocks: int = 6, **changes: Any) -> Ask:
    demand = min(prompt, SHAPE.shared_prefill_tokens)
    return Ask(key, tenant, kv_blocks=blocks, seats=seats, prefill=demand, prompt_tokens=prompt, max_new_tokens=new * seats, **changes)


def fill(queue: AdmissionQueue, tenant: str, count: int, **options: Any) -> list[Ask]:
    """Offers `count` requests, each one's prefill over before the next comes."""
    asks = [ask(f"{tenant}{number}", tenant, **options) for number in range(count)]
    for one in asks:
        assert queue.offer(one) is None
        queue.prefilled(one)
    return asks


def offered(queue: AdmissionQueue, one: Ask) -> bool:
    """Whether it is in the engine now."""
    assert queue.offer(one) is None
    queue.take()
    return one.state is AskState.PREFILLING


def entered(asks: list[Ask]) -> list[Any]:
    return [one.key for one in asks if one.state in (AskState.PREFILLING, AskState.DECODING)]


def test_a_flood_leaves_a_seat_for_a_tenant_with_nothing_running_and_only_for_such_a_one() -> None:
    queue = made()
    flood = fill(queue, "a", 20)
    assert len(entered(flood)) == 7
    first, second = ask("b1", "b"), ask("b2", "b")
    assert offered(queue, first)
    assert not offered(queue, second)
    queue.finish(flood[0])
    assert queue.take() == []
    queue.line("a").account.serve(1000)
    queue.finish(flood[1])
    assert queue.take() == [second]


def test_a_seat_that_comes_free_goes_to_the_least_served_tenant() -> None:
    queue = made(EngineShape(seats=4))
    running = fill(queue, "a", 4)
    waiting = [ask("a9", "a"), ask("b1", "b"), ask("c1", "c")]
    for one in waiting:
        assert not offered(queue, one)
    for tenant_id, service in (("a", 1000), ("b", 500)):
        queue.line(tenant_id).account.serve(service)
    order = []
    for one in running[:3]:
        queue.finish(one)
        order += queue.take()
    assert [one.key for one in order] == ["c1", "b1", "a9"]


def test_neither_idle_time_nor_time_at_its_own_limit_earns_a_tenant_anything() -> None:
    queue = made(EngineShape(seats=4), limited=TenantTerms(concurrent=1))
    own = fill(queue, "limited", 5)
    flood = fill(queue, "a", 5)
    for number in range(200):  # "a" is served again and again, "limited" waits for itself alone
        queue.finish(flood[number])
        queue.take()
        flood += fill(queue, "a", 1)
        queue.take()
    a, limited = queue.line("a").account, queue.line("limited").account
    assert a.counter > 10_000
    queue.set_terms("limited", TenantTerms())
    newcomer = ask("n", "newcomer")
    queue.offer(newcomer)
    assert min(limited.counter, queue.line("newcomer").account.counter) > a.counter - 1000
    assert own[0].state is AskState.DECODING


def test_within_a_tenant_the_class_decides_and_then_the_arrival() -> None:
    queue = made(EngineShape(seats=1))
    running = fill(queue, "a", 1)[0]
    for key, rank in (("late", 2), ("normal1", 1), ("normal2", 1), ("urgent", 0)):
        queue.offer(ask(key, rank=rank))
    seen = []
    for _ in range(4):
        queue.finish(running)
        (running,) = queue.take()
        seen.append(running.key)
    assert seen == ["urgent", "normal1", "normal2", "late"]


def test_a_tenant_at_its_own_limit_waits_alone() -> None:
    queue = made(a=TenantTerms(concurrent=1), b=TenantTerms(kv=KvShare(6)))
    first, second, third = ask("a1"), ask("a2"), ask("b1", "b")
    assert [offered(queue, one) for one in (first, second, third)] == [True, False, True]
    fourth = ask("b2", "b")
    assert not offered(queue, fourth)
    assert (queue.waits_for(second).limit, queue.waits_for(fourth).limit) == (Limit.CONCURRENT, Limit.KV)
    queue.finish(first)
    assert queue.take() == [second]
    queue.finish(third)
    assert queue.take() == [fourth]


def test_what_can_never_fit_is_refused_with_asked_held_and_allowed() -> None:
    queue = made(a=TenantTerms(kv=KvShare(10)), b=TenantTerms(concurrent=0, most_concurrent=0))
    short = queue.offer(ask("a1", blocks=11))
    assert short is not None
    assert (short.limit, short.asked, short.held, short.allowed, short.never) == (Limit.KV, 11, 0, 10, True)
    short = queue.offer(ask("b1", "b"))
    assert short is not None
    assert (short.limit, short.allowed) == (Limit.CONCURRENT, 0)
    short = queue.offer(ask("c1", "c", seats=9))
    assert short is not None
    assert (short.limit, short.asked, short.allowed) == (Limit.SEATS, 9, 7)


def test_a_request_of_many_samples_leaves_the_reserved_seats_to_others_even_from_a_tenant_with_nothing_running() -> None:
    queue = made()
    assert offered(queue, ask("a1", seats=7))
    assert offered(queue, ask("b1", "b"))
    assert not offered(queue, ask("c1", "c"))


def test_what_the_quota_allows_and_this_workers_part_does_not_waits_for_the_part_to_grow() -> None:
    queue = made(a=TenantTerms(kv=KvShare(4, False, 12)), b=TenantTerms(concurrent=0, most_concurrent=2))
    large, first = ask("a1", blocks=10), ask("b1", "b")
    assert not offered(queue, large)
    assert not offered(queue, first)
    queue.set_terms("a", TenantTerms(kv=KvShare(12, False, 12)))
    queue.set_terms("b", TenantTerms(concurrent=1, most_concurrent=2))
    assert {one.key for one in queue.take()} == {"a1", "b1"}
    short = queue.offer(ask("a2", blocks=13))
    assert short is not None
    assert (short.limit, short.allowed, short.never) == (Limit.KV, 12, True)


def test_a_full_queue_refuses_at_once_and_only_its_own_tenant() -> None:
    queue = made(EngineShape(seats=1), a=TenantTerms(queue_limit=2))
    fill(queue, "z", 1)
    assert [queue.offer(ask(key)) for key in ("a1", "a2")] == [None, None]
    short = queue.offer(ask("a3"))
    assert short is not None
    assert (short.limit, short.held, short.allowed) == (Limit.QUEUE, 2, 2)
    assert queue.offer(ask("b1", "b")) is None


def test_a_tenant_whose_requests_may_not_wait_is_let_in_past_a_flood_or_refused_at_once() -> None:
    queue = made(b=TenantTerms(queue_limit=0))
    fill(queue, "a", 20)
    assert offered(queue, ask("b1", "b"))
    short = queue.offer(ask("b2", "b"))
    assert short is not None
    assert (short.limit, short.allowed) == (Limit.QUEUE, 0)


def test_a_large_head_is_waited_for_instead_of_being_passed_by_small_ones() -> None:
    queue = made(EngineShape(seats=4))
    running = fill(queue, "a", 4)
    large = ask("large", "b", seats=3)
    queue.offer(large)
    small = [ask(f"c{number}", "c") for number in range(3)]
    for one in small:
        queue.offer(one)
    queue.line("c").account.serve(10)
    for one in running[:2]:
        queue.finish(one)
        assert [e for e in queue.take() if e is large] == []
    queue.finish(running[2])
    assert queue.take()[0] is large


def test_a_head_that_waits_for_cache_lets_small_requests_of_tenants_with_nothing_pass_within_the_reserve_for_such() -> None:
    queue = AdmissionQueue(EngineRoom(EngineShape(seats=64)), KvLedger(320, 10), FairOrder())
    running = fill(queue, "a", 10, blocks=30)
    large = ask("large", "a", blocks=200)
    assert not offered(queue, large)
    for number in range(3):  # the next one comes when the one before it has ended
        small = ask(f"b{number}", "b", blocks=4)
        assert offered(queue, small)
        assert not offered(queue, ask(f"b{number}+", "b", blocks=4))
        queue.finish(small)
        queue.finish(queue.take()[0])
    assert offered(queue, ask("c", "c", blocks=4))
    assert offered(queue, ask("d", "d", blocks=4))
    late = ask("e", "e", blocks=4)
    assert not offered(queue, late)
    for one in running:
        queue.finish(one)
    assert {one.key for one in queue.take()} == {"large", "e"}


def test_lent_room_goes_back_to_the_guaranteed_one_that_waits_before_any_new_borrower() -> None:
    queue = made(blocks=20, a=TenantTerms(kv=KvShare(10)), b=TenantTerms(kv=KvShare(10, burst=True)))
    borrowed = fill(queue, "b", 3, blocks=6)
    assert len(entered(borrowed)) == 3
    own, more = ask("a1", blocks=6), ask("b9", "b", blocks=2)
    queue.offer(own)
    assert queue.take() == []
    queue.offer(more)
    assert queue.take() == []
    queue.finish(borrowed[0])
    assert {one.key for one in queue.take()} == {"a1", "b9"}


def test_beside_another_tenant_prompts_keep_to_the_shared_budget_of_a_step() -> None:
    queue = made()
    alone = [ask(f"a{number}", prompt=4000) for number in range(5)]
    for one in alone:
        queue.offer(one)
        queue.take()
    assert len(entered(alone)) == 4, "half a step of 128-token parts"
    assert offered(queue, ask("b1", "b", prompt=10))
    for one in alone[:3]:
        queue.prefilled(one)
        assert queue.take() == []
    queue.prefilled(alone[3])
    assert queue.take() == [alone[4]]


def test_an_attempt_is_admitted_with_all_its_prompts_blocks_and_its_prompts_enter_as_there_is_room() -> None:
    queue = made(EngineShape(seats=2, reserved_seats=0), blocks=30, a=TenantTerms(concurrent=2))
    followers = tuple(ask(f"f{number}", leads=False) for number in range(3))
    first = ask("first", followers=followers)
    queue.offer(first)
    assert (queue.ledger.held, queue.take()) == (24, [followers[0]])
    late = ask("late", blocks=6)
    queue.offer(late)
    queue.leave(first)
    assert queue.take() == [followers[1]]
    assert queue.ledger.held == 18
    for one in followers[:2]:
        queue.leave(one)
    assert queue.take() == [followers[2], late]
    queue.finish(first)
    assert queue.ledger.held == 6
    queue.finish(late)
    assert (queue.ledger.held, queue.room.seats, queue.room.prefill, queue.line("a").running) == (0, 0, 0, 0)


def test_a_waiting_request_that_is_withdrawn_takes_nothing_with_it_and_blocks_nobody() -> None:
    queue = made(EngineShape(seats=1))
    running = fill(queue, "a", 1)[0]
    gone, stays = ask("gone", "b"), ask("stays", "b")
    queue.offer(gone)
    queue.offer(stays)
    queue.finish(gone)
    queue.finish(gone)
    queue.finish(running)
    assert queue.take() == [stays]
    assert queue.line("b").waiting_requests == 0


def test_the_shape_follows_from_seats_and_step() -> None:
    assert shape_of(32, 8192) == EngineShape(seats=32, reserved_seats=1, step_tokens=8192, shared_prefill_tokens=192)
    assert shape_of(32, 2048).shared_prefill_tokens == 32
    assert shape_of(1, 0).reserved_seats == 0
    assert shape_of(256, 8192).reserved_seats == 8
    assert shape_of(32, 8192, 1024).shared_prefill_tokens == 1024


class Queue(RuleBasedStateMachine):
    """Everything that may happen to requests, in any order; sums are kept beside the queue's own."""

    tenants = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.queue = made(blocks=60)
        self.terms = {tenant: TenantTerms() for tenant in self.tenants}
        self.alive: list[Ask] = []
        self.number = 0

    @rule(
        tenant=st.sampled_from(tenants),
        kv=st.none() | st.integers(0, 60),
        more_kv=st.integers(0, 30),
        assured=st.none() | st.integers(0, 20),
        burst=st.booleans(),
        concurrent=st.none() | st.integers(0, 4),
        more_concurrent=st.integers(0, 3),
        weight=st.integers(1, 4),
        queue_limit=st.sampled_from([0, 3]),
    )
    def terms_change(
        self,
        tenant: str,
        kv: int | None,
        more_kv: int,
        assured: int | None,
        burst: bool,
        concurrent: int | None,
        more_concurrent: int,
        weight: int,
        queue_limit: int,
    ) -> None:
        """Parts and the whole quotas of which they are parts; what is assured in sum fits the cache."""
        kv = kv if assured is not None else min(20, kv) if kv is not None else None
        self.terms[tenant] = TenantTerms(
            kv=KvShare(kv, burst, None if kv is None else kv + more_kv, assured),
            concurrent=concurrent,
            most_concurrent=None if concurrent is None else concurrent + more_concurrent,
            weight=weight,
            queue_limit=queue_limit,
        )
        self.queue.set_terms(tenant, self.terms[tenant])
        self.take()

    @rule(
        tenant=st.sampled_from(tenants),
        blocks=st.integers(1, 10),
        seats=st.integers(1, 3),
        prompt=st.integers(1, 600),
        rank=st.integers(0, 2),
        more=st.integers(0, 3),
    )
    def offer(self, tenant: str, blocks: int, seats: int, prompt: int, rank: int, more: int) -> None:
        self.number += 1
        options: dict[str, Any] = {"blocks": blocks, "seats": seats, "prompt": prompt, "rank": rank}
        followers = tuple(ask((self.number, n), tenant, leads=False, **options) for n in range(1, more + 1))
        one = ask((self.number, 0), tenant, followers=followers, **options)
        short = self.queue.offer(one)
        if short is None:
            self.alive.append(one)
            if one.state is AskState.PREFILLING:
                self.check_entry(one)
        elif short.never:
            self.check_never(one, short)
        self.take()

    def check_entry(self, one: Ask) -> None:
        """Whatever has entered, at once or later, is within its tenant's parts, and no guarantee of another's is touched."""
        terms, ledger, line = self.terms[one.tenant_id], self.queue.ledger, self.queue.line(one.tenant_id)
        if not one.leads:
            return
        held = ledger.held_by(one.tenant_id)
        if terms.kv.blocks is not None and not terms.kv.burst:
            assert held <= terms.kv.blocks
        assert terms.concurrent is None or line.running <= terms.concurrent
        if held > terms.kv.guaranteed and not terms.kv.burst:
            idle = sum(max(0, t.kv.guaranteed - ledger.held_by(name)) for name, t in self.terms.items() if name != one.tenant_id)
            assert ledger.held + idle <= ledger.blocks

    def check_never(self, one: Ask, short: Short) -> None:
        """What the whole quota allows waits, though the part here does not allow it now."""
        terms = self.terms[one.tenant_id]
        if short.limit is Limit.CONCURRENT:
            assert terms.most_concurrent == 0
        if short.limit is Limit.KV and terms.kv.most is not None:
            assert one.all_blocks > min(terms.kv.most, self.queue.ledger.blocks) or terms.kv.burst

    def take(self) -> None:
        """One by one, so that each is looked at as it enters: the next one's reservation would hide this one's."""
        entering: list[Ask] = []

        def enter(line: TenantLine, one: Ask) -> None:
            AdmissionQueue._enter(self.queue, line, one)
            assert one.state is AskState.PREFILLING
            self.check_entry(one)
            entering.append(one)

        self.queue._enter = enter  # type: ignore[method-assign]
        try:
            assert self.queue.take() == entering
            assert self.queue.take() == [], "it had not finished"
        finally:
            del self.queue._enter
        self.check_nothing_lies_idle()

    def check_nothing_lies_idle(self) -> None:
        """In an empty engine nobody waits but for limits of its own."""
        if self.queue.room.seats:
            return
        for line in self.queue.lines.values():
            head = line.head()
            if head is not None:
                limit = self.queue.waits_for(head).limit
                assert limit in (Limit.KV, Limit.CONCURRENT) or (limit is Limit.ROOM and self.queue.ledger.held)

    def pick(self, number: int) -> Ask | None:
        everyone = [one for first in self.alive for one in (first, *first.followers)]
        return everyone[number % len(everyone)] if everyone else None

    @rule(number=st.integers(0))
    def prefilled(self, number: int) -> None:
        one = self.pick(number)
        if one is not None:
            self.queue.prefilled(one)
            self.take()

    @rule(number=st.integers(0), cached=st.integers(0, 700), output=st.integers(0, 90))
    def engine_call_ends(self, number: int, cached: int, output: int) -> None:
        one = self.pick(number)
        if one is not None and one.state is not AskState.WAITING:
            self.queue.leave(one, cached, output)
            self.take()

    @rule(number=st.integers(0), twice=st.booleans())
    def request_ends(self, number: int, twice: bool) -> None:
        if self.alive:
            one = self.alive.pop(number % len(self.alive))
            for _ in range(1 + twice):
                self.queue.finish(one)
            self.take()

    @rule()
    def crash(self) -> None:
        for one in self.alive:
            self.queue.finish(one)
        self.alive.clear()
        assert self.queue.take() == []
        room, ledger = self.queue.room, self.queue.ledger
        assert (room.seats, room.prefill, room.bypass, ledger.held) == (0, 0, 0, 0)
        assert all(line.running == line.waiting_requests == line.seats == line.claim == 0 for line in self.queue.lines.values())

    @invariant()
    def everything_adds_up(self) -> None:
        asks = [one for first in self.alive for one in (first, *first.followers)]
        inside = [one for one in asks if one.state in (AskState.PREFILLING, AskState.DECODING)]
        room, ledger = self.queue.room, self.queue.ledger
        assert room.seats == sum(one.seats for one in inside) <= SHAPE.seats
        assert room.bypass == sum(one.seats for one in inside if one.bypassed) <= SHAPE.reserved_seats
        assert room.prefill == sum(one.prefill for one in inside if one.state is AskState.PREFILLING)
        for tenant in self.tenants:
            line = self.queue.line(tenant)
            mine = [one for one in self.alive if one.tenant_id == tenant]
            assert line.running == sum(one.counted for one in mine) >= 0
            assert line.waiting_requests == sum(one.state is AskState.WAITING for one in mine)
            assert ledger.held_by(tenant) >= 0
        assert 0 <= ledger.held <= ledger.blocks


Queue.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestQueue = Queue.TestCase
