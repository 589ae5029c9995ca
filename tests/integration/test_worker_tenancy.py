"""A tenant's limits at a whole worker: shares from the bucket, refusals as they reach a router, queues, reports. Real NATS."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.scripted_engine import KV_BLOCK_BYTES, ScriptedSettings
from services.worker.scripted_steps import StepModel
from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats
from shared.contracts import inference
from shared.contracts.adapters import AdapterDrained, DrainOrder
from shared.contracts.inference import FrameKind, Handle
from shared.contracts.tenancy import TenantLimits
from tests.worker_peers import Answer, FakeRegistry, FakeRouter, WorkerHere, eventually, worker_here

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def registry(bus: Bus, tmp_path: Path) -> FakeRegistry:
    registry = FakeRegistry(bus)
    registry.use_scratch(tmp_path / "registry")
    await registry.start()
    return registry


@pytest.fixture
async def router(bus: Bus) -> FakeRouter:
    router = FakeRouter(bus)
    await router.start()
    return router


@pytest.fixture
async def worker(nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path) -> AsyncIterator[WorkerHere]:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=100)) as worker:
        yield worker


def quota(blocks: int) -> TenantLimits:
    return TenantLimits(kv_quota_bytes=blocks * KV_BLOCK_BYTES)


def of(worker: WorkerHere, tenant: str) -> Handle:
    return msgspec.structs.replace(worker.handle(), tenant_id=tenant, tenant=tenant)


def told(answer: Answer) -> dict[str, Any]:
    assert answer.last is not None
    return inference.decode_error(answer.last.data).fields


def queue_ms(answer: Answer) -> int:
    head = next(frame for frame in answer.frames.values() if frame.kind is FrameKind.HEAD)
    return int(inference.decode_head(head.data).headers["x-tenantry-queue-ms"])


def held(worker: WorkerHere) -> int:
    return worker.governor.admission.queue.ledger.held


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_over_the_share_is_refused_before_anything_is_sent(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, stream: bool
) -> None:
    await registry.shared(await registry.share("t1", quota(4), kv_bytes=4 * KV_BLOCK_BYTES))
    answer = await router.asked(of(worker, "t1"), tokens=200, stream=stream)
    assert answer.kinds == [FrameKind.ACCEPTED, FrameKind.ERROR]
    assert answer.error == "kv_quota_exceeded"
    assert told(answer) == {"asked_bytes": 13 * KV_BLOCK_BYTES, "held_bytes": 0, "limit_bytes": 4 * KV_BLOCK_BYTES}
    fits = await router.asked(of(worker, "t1"), tokens=20, stream=stream)
    assert (fits.error, queue_ms(fits)) == ("", 0)
    assert held(worker) == 0


@pytest.mark.parametrize("fields", [{"n": 5}, {"prompt": ["one"] * 5}, {"prompt": ["one", "two"], "n": 3}])
async def test_all_prompts_and_samples_count_in_one_decision_and_come_back_whole_when_they_fit(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, fields: dict[str, Any]
) -> None:
    body = {"model": "x", "prompt": "one", "max_tokens": 15, "stream": True, **fields}
    options: dict[str, Any] = {"path": COMPLETIONS, "body": msgspec.json.encode(body)}
    await registry.shared(await registry.share("t1", quota(4), kv_bytes=4 * KV_BLOCK_BYTES))
    answer = await router.asked(of(worker, "t1"), **options)
    assert answer.kinds == [FrameKind.ACCEPTED, FrameKind.ERROR]
    assert told(answer)["asked_bytes"] >= 5 * KV_BLOCK_BYTES
    await registry.shared(await registry.share("t1", quota(6), kv_bytes=6 * KV_BLOCK_BYTES))
    answer = await router.asked(of(worker, "t1"), **options)
    assert answer.error == ""
    count = told_choices(answer)
    assert sorted(count) == list(range(len(count)))
    assert set(count.values()) == {15}
    assert held(worker) == 0


def told_choices(answer: Answer) -> dict[int, int]:
    """Tokens by choice."""
    found: dict[int, int] = {}
    for event in answer.body.decode().split("\n\n"):
        if event.startswith("data: {"):
            for choice in msgspec.json.decode(event[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], 0) + (choice["finish_reason"] is None)
    return found


async def test_what_does_not_fit_now_waits_alive_and_says_how_long_while_other_tenants_pass(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=20)) as worker:
        await registry.share("t2", TenantLimits())
        await registry.shared(await registry.share("t1", TenantLimits(max_concurrent=1), concurrent=1))
        first = await router.ask(of(worker, "t1"), tokens=40)
        second = await router.ask(of(worker, "t1"), tokens=1)
        await eventually(lambda: registry.reports["w1"].waiting == 1 or None)
        other = await router.asked(of(worker, "t2"), tokens=1)
        assert (other.error, router.answers[second].kinds) == ("", [FrameKind.ACCEPTED])
        uses = {use.tenant_id: use for use in registry.reports["w1"].tenants}
        assert (uses["t1"].running, uses["t1"].waiting) == (1, 1)
        assert uses["t1"].kv_bytes == 3 * KV_BLOCK_BYTES
        waited = await router.answer(second)
        assert (waited.error, queue_ms(await router.answer(first))) == ("", 0)
        assert queue_ms(waited) > 0
        assert waited.progress >= 1
        await eventually(lambda: not registry.reports["w1"].tenants)


async def test_a_deadline_in_the_queue_and_a_full_queue_are_refusals_of_their_own(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    limits = TenantLimits(max_concurrent=1, queue_limit=1, queue_deadline_s=0.2)
    await registry.shared(await registry.share("t1", limits, concurrent=1))
    running = await router.ask(of(worker, "t1"), tokens=100)
    await eventually(lambda: router.answers[running].body)
    waiting, crowded = await router.ask(of(worker, "t1")), await router.ask(of(worker, "t1"))
    full, late = await router.answer(crowded), await router.answer(waiting)
    assert (full.error, late.error) == ("queue_full", "queue_timeout")
    assert (told(full)["held"], told(full)["limit"]) == (1, 1)
    assert told(late)["waited_for"] == "concurrent"
    assert min(told(full)["retry_after_s"], told(late)["retry_after_s"]) >= 1
    assert late.kinds == full.kinds == [FrameKind.ACCEPTED, FrameKind.ERROR]
    assert (await router.answer(running)).error == ""


async def test_a_waiting_request_leaves_the_queue_when_cancelled_and_its_budget_runs_while_it_waits(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    await registry.shared(await registry.share("t1", TenantLimits(max_concurrent=1), concurrent=1))
    running = await router.ask(of(worker, "t1"), prompt="[[hang]]")
    waiting, budgeted = await router.ask(of(worker, "t1")), await router.ask(of(worker, "t1"), budget_s=0.3)
    assert (await router.answer(budgeted)).error == "deadline_exceeded"
    await router.cancel(waiting)
    await eventually(lambda: worker.worker.service.running == 1)
    line = worker.governor.admission.queue.line("t1")
    assert (line.running, line.waiting_requests) == (1, 0)
    await router.cancel(running)
    await eventually(lambda: not list(worker.governor.admission.uses()))


async def test_a_drain_ends_what_waits_of_its_adapter_and_the_slot_comes_free(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    await registry.shared(await registry.share("t1", TenantLimits(max_concurrent=1), concurrent=1))
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    hanging = await router.ask(of(worker, "t1"), prompt="[[hang]]")
    await eventually(lambda: worker.governor.in_flight() == 1)
    waiting = await router.ask(worker.handle(mount))
    await eventually(lambda: worker.governor.in_flight("ad_one") == 1)
    await registry.drain(mount, DrainOrder(deadline_s=0.1))
    await eventually(lambda: registry.acked(AdapterDrained, "ad_one"))
    assert (await router.answer(waiting)).error == "adapter_draining"
    assert worker.governor.admission.queue.line("t1").waiting_requests == 0
    await router.cancel(hanging)


async def test_a_tenant_whose_shares_are_not_known_is_told_to_come_again_once_others_have_theirs(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    assert (await router.asked(of(worker, "t1"), tokens=1)).error == "", "no registry has written any shares"
    await registry.shared(await registry.share("t2"))
    refused = await router.asked(of(worker, "t1"), tokens=1)
    assert refused.error == "worker_unavailable"
    assert told(refused)["retry_after_s"] == 1.0
    late = await router.ask(of(worker, "t1"), tokens=1)
    await registry.share("t1")
    assert (await router.answer(late)).error == ""


async def test_what_the_quota_allows_and_the_part_does_not_waits_until_the_part_grows(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    limits = TenantLimits(max_concurrent=1, kv_quota_bytes=8 * KV_BLOCK_BYTES)
    await registry.shared(await registry.share("t1", limits, concurrent=0, kv_bytes=0))
    key = await router.ask(of(worker, "t1"), tokens=100)
    await eventually(lambda: any(use.waiting for use in registry.reports["w1"].tenants))
    assert router.answers[key].kinds == [FrameKind.ACCEPTED]
    await registry.share("t1", limits, concurrent=1, kv_bytes=8 * KV_BLOCK_BYTES)
    assert (await router.answer(key)).error == ""


async def test_a_part_of_another_incarnation_is_nobodys(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    await registry.shared(await registry.share("t1", TenantLimits(max_concurrent=4), concurrent=4, incarnation="earlier"))
    assert (await router.asked(of(worker, "t1"), tokens=1)).error == "worker_unavailable"


async def test_a_share_that_is_cut_evicts_nothing_and_the_report_shows_both(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    await registry.shared(await registry.share("t1", quota(10), kv_bytes=10 * KV_BLOCK_BYTES))
    running = await router.ask(of(worker, "t1"), tokens=120)
    await eventually(lambda: router.answers[running].body)
    await registry.shared(await registry.share("t1", quota(2), kv_bytes=2 * KV_BLOCK_BYTES))
    (use,) = registry.reports["w1"].tenants
    assert use.kv_bytes == 8 * KV_BLOCK_BYTES
    answer = await router.answer(running)
    assert (answer.error, len(answer.text.split())) == ("", 120)


async def test_a_lowered_quota_lets_nothing_new_in_until_less_is_held(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    await registry.shared(await registry.share("t1", quota(10), kv_bytes=10 * KV_BLOCK_BYTES))
    running = await router.ask(of(worker, "t1"), prompt="[[hang]]", tokens=120)
    await eventually(lambda: held(worker) == 8)
    await registry.shared(await registry.share("t1", quota(4), kv_bytes=4 * KV_BLOCK_BYTES))
    waiting = await router.ask(of(worker, "t1"), tokens=20)
    await eventually(lambda: worker.governor.admission.queue.line("t1").waiting_requests == 1)
    assert held(worker) == 8
    await router.cancel(running)
    assert (await router.answer(waiting)).error == ""


async def test_burst_borrows_an_idle_guarantee_and_what_waits_of_the_borrower_comes_after_its_owner(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(kv_blocks=20, tokens_per_s=100)) as worker:

        def part(blocks: int) -> dict[str, int]:
            return {"kv_bytes": blocks * KV_BLOCK_BYTES, "assured_kv_bytes": blocks * KV_BLOCK_BYTES}

        lender = TenantLimits(kv_quota_bytes=16 * KV_BLOCK_BYTES)
        borrower = TenantLimits(kv_quota_bytes=4 * KV_BLOCK_BYTES, burst=True)
        await registry.share("lender", lender, **part(16))
        await registry.shared(await registry.share("borrower", borrower, **part(4)))
        borrowed = [await router.ask(of(worker, "borrower"), prompt="[[hang]]", tokens=60) for _ in range(4)]
        await eventually(lambda: held(worker) == 16)
        own = await router.ask(of(worker, "lender"), tokens=100)
        await eventually(lambda: worker.governor.admission.queue.line("lender").waiting_requests == 1)
        more = await router.ask(of(worker, "borrower"), tokens=20)
        await eventually(lambda: worker.governor.admission.queue.line("borrower").waiting_requests == 1)
        assert held(worker) == 16, "nothing that runs is cut, nothing more is lent while the owner waits"
        await router.cancel(borrowed[0])
        assert (await router.answer(own)).error == ""
        for key in borrowed[1:]:
            await router.cancel(key)
        assert (await router.answer(more)).error == ""


@pytest.mark.parametrize("quotas", [True, False])
async def test_a_tenant_that_fills_the_cache_keeps_another_out_of_neither_its_guarantee_nor_what_is_kept_for_newcomers(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path, quotas: bool
) -> None:
    """With quotas: parts of both have moved here, and come to more than the cache."""
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(kv_blocks=64, tokens_per_s=100)) as worker:
        if quotas:
            part = {"kv_bytes": 64 * KV_BLOCK_BYTES, "assured_kv_bytes": 32 * KV_BLOCK_BYTES}
            await registry.share("noisy", quota(64), **part)
            await registry.shared(await registry.share("quiet", quota(64), **part))
        else:
            await registry.share("noisy")
            await registry.shared(await registry.share("quiet"))
        flood = [await router.ask(of(worker, "noisy"), prompt="[[hang]]", tokens=100) for _ in range(30)]
        line = worker.governor.admission.queue.line("noisy")
        await eventually(lambda: line.running and line.waiting_requests + line.running == 30)
        tokens = 200 if quotas else 8
        for _ in range(5):
            answer = await router.asked(of(worker, "quiet"), tokens=tokens)
            assert (answer.error, queue_ms(answer)) == ("", 0)
        assert line.waiting_requests > 20
        for key in flood:
            await router.cancel(key)
        await eventually(lambda: worker.governor.in_flight() == 0)


async def test_a_request_that_is_delivered_again_reserves_and_counts_once(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    await registry.shared(await registry.share("t1", quota(10), kv_bytes=10 * KV_BLOCK_BYTES))
    key = await router.ask(of(worker, "t1"), prompt="[[hang]]", tokens=40, request_id="same")
    await eventually(lambda: held(worker) == 3)
    for _ in range(3):
        assert await router.ask(of(worker, "t1"), prompt="[[hang]]", tokens=40, request_id="same") == key
    other = await router.asked(of(worker, "t1"), tokens=1)
    assert other.error == ""
    line = worker.governor.admission.queue.line("t1")
    assert (held(worker), line.running, line.waiting_requests) == (3, 1, 0)
    await router.cancel(key)
    await eventually(lambda: held(worker) == 0)
    await router.ask(of(worker, "t1"), prompt="[[hang]]", tokens=40, request_id="same")
    assert (await router.asked(of(worker, "t1"), tokens=1)).error == ""
    assert (held(worker), line.running) == (0, 0), "nor after its end"


async def test_a_flood_of_two_hundred_waits_in_its_own_queue_while_another_tenant_is_served(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    engine = ScriptedSettings(concurrency=8, steps=StepModel(base_ms=4.0, sequence_us=100.0, shared_prefill_tokens=192))
    async with worker_here(nats_server, tmp_path / "w1", engine=engine) as worker:
        await registry.share("b")
        await registry.shared(await registry.share("a", TenantLimits(queue_deadline_s=60.0)))
        flood = [await router.ask(of(worker, "a"), prompt="<1600>", tokens=30) for _ in range(200)]
        await eventually(lambda: worker.governor.admission.queue.line("a").waiting_requests > 150)
        for _ in range(5):
            answer = await router.asked(of(worker, "b"), prompt="<16>", tokens=3)
            assert (answer.error, queue_ms(answer)) == ("", 0)
        assert worker.governor.admission.queue.line("a").waiting_requests > 100
        async with asyncio.TaskGroup() as group:
            for key in flood:
                group.create_task(router.cancel(key))
        await eventually(lambda: worker.governor.in_flight() == 0)
        assert list(worker.governor.admission.uses()) == []


async def test_a_workers_restart_starts_with_empty_books(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    """The requests of an incarnation that died hold nothing of the next one's."""
    for round_number in range(2):
        async with worker_here(nats_server, tmp_path / "w1", grace_s=0.1) as worker:
            await registry.shared(await registry.share("t1", quota(3), kv_bytes=3 * KV_BLOCK_BYTES))
            key = await router.ask(of(worker, "t1"), prompt="[[hang]]", tokens=40)
            await eventually(lambda at=worker: held(at) == 3)
            assert (await router.asked(of(worker, "t1"), tokens=1000)).error == "kv_quota_exceeded", round_number
        assert (await router.answer(key)).error == "worker_lost"
        assert held(worker) == 0
