"""Admission carried out: one decision per attempt before anything starts, waits that end, refusals with figures. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from random import Random
from typing import Any

import pytest

from benchmarks.tenancy import virtual_time
from services.worker.admission_calls import Call
from services.worker.governor import Attempt, Governor
from services.worker.request_plan import RequestPlan
from shared.contracts.base import EngineLimits
from shared.contracts.inference import Handle
from shared.contracts.tenancy import Share, TenantLimits
from shared.errors import (
    Cancelled,
    ConcurrencyExceeded,
    InternalError,
    KvQuotaExceeded,
    QueueFull,
    QueueTimeout,
    TenantryError,
    WorkerUnavailable,
)

BLOCK_BYTES = 1000
LIMITS = EngineLimits(
    slots=1,
    max_rank=8,
    bytes_per_rank=1,
    max_model_len=1024,
    max_num_seqs=8,
    kv_blocks=200,
    kv_block_tokens=16,
    kv_block_bytes=BLOCK_BYTES,
    max_batched_tokens=8192,
)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        virtual_time.run(test())

    run.__name__ = test.__name__
    return run


class Desk:
    """Attempts of tenants at one governor."""

    def __init__(self) -> None:
        self.governor = Governor()
        self.governor.admission.use(LIMITS)
        self._numbers = 0

    def tenant(self, tenant: str, *, kv_blocks: int | None = None, concurrent: int | None = None, **limits: Any) -> None:
        kv_bytes = None if kv_blocks is None else kv_blocks * BLOCK_BYTES
        quota = TenantLimits(kv_quota_bytes=kv_bytes, max_concurrent=concurrent, **limits)
        self.governor.admission.set_tenant(tenant, quota, Share(incarnation="i1", kv_bytes=kv_bytes, concurrent=concurrent))

    def attempt(self, tenant: str = "a", **plan: Any) -> Attempt:
        self._numbers += 1
        handle = Handle(tenant_id=tenant, tenant=tenant, pool_id="main", base="demo@" + "0" * 64)
        made = Attempt(f"r{self._numbers}", 1, "router", handle, "/v1/completions")
        made.plan = RequestPlan(**plan)
        self.governor.begin(made)
        return made

    async def admit(self, attempt: Attempt, prompt: int = 16, tokens: int | None = 16, samples: int = 1, **options: Any) -> Call:
        return await self.governor.admit(attempt, prompt, tokens, samples, asyncio.get_running_loop().time(), **options)

    async def refused(self, attempt: Attempt, **options: Any) -> TenantryError:
        with pytest.raises(TenantryError) as refusal:
            await self.admit(attempt, **options)
        self.governor.end(attempt)
        return refusal.value

    @property
    def held(self) -> int:
        return self.governor.admission.queue.ledger.held


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@virtual
async def test_what_never_fits_is_refused_at_once_in_bytes_and_the_attempt_carries_the_refusal() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=10)
    attempt = desk.attempt()
    error = await desk.refused(attempt, prompt=100, tokens=100)
    assert isinstance(error, KvQuotaExceeded)
    assert error.fields == {"asked_bytes": 13 * BLOCK_BYTES, "held_bytes": 0, "limit_bytes": 10 * BLOCK_BYTES}
    assert attempt.refusal is error
    assert not attempt.admitted.is_set()
    assert attempt.prompt_tokens == 0


@virtual
async def test_every_sample_counts_and_n_beyond_the_engines_seats_is_refused_by_name() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=10)
    error = await desk.refused(desk.attempt(), samples=6)
    assert isinstance(error, KvQuotaExceeded)
    assert error.fields["asked_bytes"] == 12 * BLOCK_BYTES
    desk.tenant("a")
    error = await desk.refused(desk.attempt(), samples=9)
    assert isinstance(error, ConcurrencyExceeded)
    assert (error.fields["asked"], error.fields["limit"], error.fields["field"]) == (9, 7, "n")


@virtual
async def test_what_does_not_fit_now_waits_until_room_comes_and_knows_how_long_it_waited() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=3)
    first, second = desk.attempt(), desk.attempt()
    call = await desk.admit(first)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(desk.admit(second))
        await asyncio.sleep(2.5)
        assert not waiting.done()
        assert [(use.running, use.waiting, use.kv_bytes) for use in desk.governor.admission.uses()] == [(1, 1, 2 * BLOCK_BYTES)]
        desk.governor.leave(call)
        await settle()
        assert waiting.done()
    assert second.place.queued_ms == pytest.approx(2500)
    assert first.place.queued_ms == 0
    desk.governor.end(first)
    desk.governor.end(second)
    assert desk.held == 0


@virtual
async def test_at_the_deadline_a_waiting_request_is_told_what_it_waited_for() -> None:
    desk = Desk()
    desk.tenant("a", concurrent=1, queue_deadline_s=4.0)
    running = desk.attempt()
    await desk.admit(running)
    error = await desk.refused(desk.attempt())
    assert isinstance(error, QueueTimeout)
    fields = error.fields
    assert (fields["waited_ms"], fields["waited_for"], fields["asked"], fields["held"], fields["limit"]) == (4000, "concurrent", 1, 1, 1)
    assert fields["retry_after_s"] >= 1.0
    assert next(desk.governor.admission.uses()).waiting == 0


@virtual
async def test_a_full_queue_refuses_at_once_and_says_when_to_come_again() -> None:
    desk = Desk()
    desk.tenant("a", concurrent=1, queue_limit=1)
    await desk.admit(desk.attempt())
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(desk.refused(desk.attempt()))
        await settle()
        before_s = asyncio.get_running_loop().time()
        error = await desk.refused(desk.attempt())
        assert asyncio.get_running_loop().time() == before_s
    assert isinstance(error, QueueFull)
    assert (error.fields["held"], error.fields["limit"]) == (1, 1)
    assert isinstance(waiting.result(), QueueTimeout)


@virtual
async def test_all_prompts_of_a_request_are_one_decision_and_none_starts_before_it() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=7)
    attempt = desk.attempt(prompts=4)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(desk.refused(attempt, prompt=16 + number)) for number in range(4)]
        await settle()
    errors = {call.result() for call in calls}
    assert len(errors) == 1, "one refusal for all"
    (error,) = errors
    assert error.fields["asked_bytes"] == (2 + 3 + 3 + 3) * BLOCK_BYTES
    assert (desk.held, attempt.prompt_tokens) == (0, 0)


@virtual
async def test_prompts_of_one_request_hold_their_own_blocks_each_until_it_ends() -> None:
    desk = Desk()
    attempt = desk.attempt(prompts=3)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(desk.admit(attempt)) for _ in range(3)]
        await settle()
    assert (desk.held, attempt.prompt_tokens) == (6, 48)
    desk.governor.leave(tasks[1].result())
    desk.governor.leave(tasks[1].result())
    assert desk.held == 4
    desk.governor.end(attempt)
    assert desk.held == 0


@virtual
async def test_more_prompts_than_seats_enter_as_seats_come_free_and_leave_one_to_others() -> None:
    desk = Desk()
    attempt = desk.attempt(prompts=10)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(desk.admit(attempt, tokens=1)) for _ in range(10)]
        await settle()
        inside = [task for task in tasks if task.done()]
        assert len(inside) == 7
        assert attempt.admitted.is_set()
        other = desk.attempt("b")
        await desk.admit(other)
        while waiting := [task for task in tasks if not task.done()]:
            desk.governor.leave(inside.pop().result())
            await settle()
            inside += [task for task in waiting if task.done()]
    desk.governor.end(attempt)
    desk.governor.end(other)
    assert (desk.held, desk.governor.admission.queue.room.seats) == (0, 0)


@virtual
async def test_prompts_that_the_application_never_starts_end_the_request_instead_of_hanging_it() -> None:
    desk = Desk()
    attempt = desk.attempt(prompts=2)
    assert isinstance(await desk.refused(attempt), InternalError)


@virtual
async def test_a_beam_search_reserves_all_beams_once_and_keeps_them_until_the_attempt_ends() -> None:
    desk = Desk()
    attempt = desk.attempt(beams=4, max_tokens=16)
    first = await desk.admit(attempt, tokens=1, beam=True)
    assert (desk.held, first.max_tokens) == (4 * 2, 1)
    account = desk.governor.admission.queue.line("a").account
    for _ in range(20):
        step = await desk.admit(attempt, prompt=20, tokens=1, beam=True)
        desk.governor.count(attempt, step, completion_tokens=1, cached_tokens=0, now_s=0.0)
        desk.governor.leave(step)
    assert (desk.held, attempt.prompt_tokens) == (8, 16)
    assert desk.governor.admission.queue.room.seats == 4
    desk.governor.end(attempt)
    assert (desk.held, desk.governor.admission.queue.room.seats) == (0, 0)
    assert account.counter == 16 + 2 * 20, "the prompt once, and every token that any beam made"


@virtual
async def test_without_max_tokens_the_tenants_default_is_reserved_and_generated_and_else_the_models_length() -> None:
    desk = Desk()
    desk.tenant("a", default_max_tokens=32)
    call = await desk.admit(desk.attempt(), tokens=1008)
    assert (call.max_tokens, desk.held) == (32, 3)
    asked = await desk.admit(desk.attempt(max_tokens=1008), tokens=1008)
    assert asked.max_tokens == 1008
    desk.tenant("b")
    assert (await desk.admit(desk.attempt("b"), prompt=24, tokens=None)).max_tokens == 1000


@virtual
async def test_an_aborted_attempt_leaves_the_queue_at_once_and_holds_nothing() -> None:
    desk = Desk()
    desk.tenant("a", concurrent=1)
    running, waiting = desk.attempt(), desk.attempt()
    await desk.admit(running)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.refused(waiting))
        await settle()
        waiting.place.stop_waiting(Cancelled("the client went away"))
        await settle()
        assert isinstance(asking.result(), Cancelled)
    assert waiting.refusal is None
    assert [(use.running, use.waiting) for use in desk.governor.admission.uses()] == [(1, 0)]


@virtual
async def test_a_cancelled_task_leaves_the_queue_too() -> None:
    desk = Desk()
    desk.tenant("a", concurrent=1)
    running, waiting = desk.attempt(), desk.attempt()
    await desk.admit(running)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.admit(waiting))
        await settle()
        asking.cancel()
    desk.governor.end(waiting)
    desk.governor.end(running)
    assert list(desk.governor.admission.uses()) == []


@virtual
async def test_where_no_tenant_has_shares_everybody_has_the_defaults_and_once_one_has_others_wait_for_theirs() -> None:
    desk = Desk()
    await desk.admit(desk.attempt("unknown"))
    desk.tenant("a")
    error = await desk.refused(desk.attempt("later"))
    assert isinstance(error, WorkerUnavailable)
    assert error.fields["retry_after_s"] == 1.0
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.admit(desk.attempt("soon")))
        await asyncio.sleep(0.5)
        assert not asking.done()
        desk.tenant("soon")
        await settle()
        assert asking.done()


@virtual
async def test_before_the_first_snapshot_of_shares_nobody_is_let_in() -> None:
    desk = Desk()
    desk.governor.admission.tenants.expect_shares()
    assert isinstance(await desk.refused(desk.attempt()), WorkerUnavailable)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.admit(desk.attempt()))
        await settle()
        desk.governor.admission.tenants.shares_synced()
        await settle()
        assert asking.done()


@virtual
async def test_limits_without_a_part_of_them_for_this_worker_are_not_a_licence() -> None:
    desk = Desk()
    desk.governor.admission.set_tenant("a", TenantLimits(max_concurrent=4), None)
    assert isinstance(await desk.refused(desk.attempt()), WorkerUnavailable)
    desk.governor.admission.set_tenant("a", TenantLimits(weight=3), None)
    await desk.admit(desk.attempt())


@virtual
async def test_a_raised_share_lets_in_what_waits_and_a_lowered_one_lets_what_runs_finish() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=2)
    first, second = desk.attempt(), desk.attempt()
    await desk.admit(first)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(desk.admit(second))
        await settle()
        assert not waiting.done()
        desk.tenant("a", kv_blocks=4)
        await settle()
        assert waiting.done()
    desk.tenant("a", kv_blocks=2)
    assert desk.held == 4
    assert next(desk.governor.admission.uses()).kv_bytes == 4 * BLOCK_BYTES
    desk.governor.end(first)
    desk.governor.end(second)
    assert desk.held == 0


@virtual
async def test_what_a_deleted_tenant_was_guaranteed_is_everybodys_again_and_what_it_runs_ends_by_itself() -> None:
    desk = Desk()
    desk.tenant("gone", kv_blocks=200)
    desk.tenant("b")
    running = desk.attempt("gone")
    await desk.admit(running)
    assert isinstance(await desk.refused(desk.attempt("b")), KvQuotaExceeded)
    desk.governor.admission.forget_tenant("gone")
    await desk.admit(desk.attempt("b"))
    assert isinstance(await desk.refused(desk.attempt("gone")), WorkerUnavailable)
    held = desk.held
    desk.governor.end(running)
    assert desk.held == held - 2


@virtual
async def test_reserved_cache_counts_from_the_moment_it_is_reserved_until_it_is_given_back_and_waiting_as_waiting() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=4)
    first, second = desk.attempt(), desk.attempt()
    now_s = asyncio.get_running_loop().time
    kept = await desk.admit(first, samples=2)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(desk.admit(second))
        await asyncio.sleep(1.5)
        assert second.place.queued_until_ms(now_s()) == pytest.approx(1500)
        assert desk.governor.admission.kv_byte_ms(first.place) == 4 * BLOCK_BYTES * 1500
        assert desk.governor.admission.kv_byte_ms(second.place) == 0
        desk.governor.leave(kept)
        await settle()
        assert waiting.done()
    await asyncio.sleep(0.25)
    desk.governor.end(first)
    desk.governor.end(second)
    await asyncio.sleep(10.0)
    assert desk.governor.admission.kv_byte_ms(first.place) == 4 * BLOCK_BYTES * 1500
    assert desk.governor.admission.kv_byte_ms(second.place) == 2 * BLOCK_BYTES * 250
    assert second.place.queued_until_ms(now_s()) == pytest.approx(1500)


@virtual
async def test_whatever_ends_them_what_attempts_held_adds_up_to_what_the_ledger_held() -> None:
    desk = Desk()
    desk.tenant("a", kv_blocks=40, concurrent=3)
    desk.tenant("b", kv_blocks=60)
    loop, ledger, attempts, random = asyncio.get_running_loop(), desk.governor.admission.queue.ledger, list[Attempt](), Random(7)

    async def run() -> None:
        await asyncio.sleep(random.random() * 4)
        prompts = random.choice((1, 1, 3))
        beams = random.choice((0, 0, 2)) if prompts == 1 else 0
        attempt = desk.attempt(random.choice("ab"), prompts=prompts, beams=beams, max_tokens=16)
        attempts.append(attempt)

        async def one() -> None:
            call = await desk.admit(attempt, prompt=random.randint(1, 60), samples=1 if beams else random.choice((1, 2)), beam=bool(beams))
            await asyncio.sleep(random.random())
            desk.governor.leave(call)

        ends = random.choice(("served", "served", "cut"))
        try:
            async with asyncio.timeout(None if ends == "served" else random.random()), asyncio.TaskGroup() as group:
                for _ in range(prompts):
                    group.create_task(one())
        except (TimeoutError, ExceptionGroup):
            pass  # cut off, or refused: counted all the same
        finally:
            desk.governor.end(attempt)

    expected, before_us, held = 0, 0, 0

    reserve, release = ledger.reserve, ledger.release

    def mark() -> None:
        nonlocal expected, before_us, held
        now_us = round(loop.time() * 1_000_000)
        expected += held * (now_us - before_us)
        before_us, held = now_us, ledger.held

    def reserved(key: Hashable, tenant_id: str, blocks: int) -> None:
        reserve(key, tenant_id, blocks)
        mark()

    def released(key: Hashable) -> int:
        freed = release(key)
        mark()
        return freed

    ledger.reserve, ledger.release = reserved, released
    async with asyncio.TaskGroup() as group:
        for _ in range(120):
            group.create_task(run())
    assert desk.held == 0
    assert expected > 0
    assert sum(attempt.place.held.block_us(round(loop.time() * 1_000_000)) for attempt in attempts) == expected
