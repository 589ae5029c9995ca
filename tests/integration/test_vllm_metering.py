"""What requests cost, on the real engine: all of its steps' time is charged, whoever asked and however it ended."""

import asyncio
from typing import Any

import msgspec
import pytest

from services.worker.step_ledger import StepLedger
from services.worker.step_records import StepBatch
from services.worker.vllm_engine import VllmEngine
from shared.contracts.usage import EngineTime
from tests.integration.in_process import CHAT, Answer, Desk
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

LONG: dict[str, Any] = {"temperature": 0.7, "seed": 1, "max_tokens": 40, "ignore_eos": True}


async def settled(desk: Desk) -> EngineTime:
    """The account once everything asked so far has been told: the engine is idle and says so."""
    steps = desk.governor.steps
    before = time_of(steps)
    await until(lambda: time_of(steps).idle_us > before.idle_us + 150_000)
    return time_of(steps)


def time_of(steps: StepLedger) -> EngineTime:
    time = steps.engine_time("w1", "i1", "main", 1)
    assert time is not None
    return time


async def test_every_kind_of_request_is_charged_and_what_they_are_charged_is_what_the_engine_computed(desk: Desk) -> None:
    before = await settled(desk)
    prompts = {"prompt": ["one", "two two", "three three three"], "max_tokens": 12, "ignore_eos": True}
    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(desk.chat("hello there", "lora_sales", **LONG, n=2)),
            group.create_task(desk.chat("hello there", "lora_cs", tenant="cs", **LONG, stream=True)),
            group.create_task(desk.chat("hello you", "lora_cs", tenant="cs", **LONG, stream=True, stream_options={"include_usage": True})),
            group.create_task(desk.chat("no adapter at all", tenant="base", **LONG)),
            group.create_task(desk.ask("/v1/completions", prompts, desk.handle("lora_sales"))),
            group.create_task(
                desk.ask("/v1/completions", {"prompt": "go", "use_beam_search": True, "n": 2, "max_tokens": 8}, desk.handle("lora_sales"))
            ),
        ]
    after = await settled(desk)
    answers = [task.result() for task in asked]
    assert [answer.status for answer in answers] == [200] * len(answers)
    for answer in answers:
        assert answer.attempt.gpu_us > 0
        assert answer.attempt.steps_open == 0
    billed_us = sum(answer.attempt.gpu_us for answer in answers)
    assert billed_us == after.billed_us - before.billed_us == after.busy_us - before.busy_us
    assert desk.governor.steps.unbilled_us == 0
    assert answers[0].attempt.gpu_us > answers[3].attempt.gpu_us, "two samples with an adapter cost more than one without"


async def test_a_client_that_goes_away_has_paid_for_what_was_computed_till_then(desk: Desk) -> None:
    before = await settled(desk)
    gone, early = asyncio.Event(), list[Answer]()
    body = {"messages": [{"role": "user", "content": "count to a thousand"}], "stream": True, "max_tokens": 900, "ignore_eos": True}
    asking = asyncio.ensure_future(desk.ask(CHAT, body, desk.handle("lora_sales"), gone=gone, into=early))  # noqa: TID251
    await until(lambda: bool(early) and len(early[0].raw) > 5)
    gone.set()
    answer = await asking
    await until(lambda: answer.attempt.steps_open == 0)
    after = await settled(desk)
    assert answer.attempt.completion_tokens < 900
    assert 0 < answer.attempt.gpu_us == after.busy_us - before.busy_us


async def test_the_engines_time_is_accounted_for_and_a_lost_step_record_shows(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    before = await settled(desk)
    await desk.chat("tell me something", "lora_sales", **LONG)
    after = await settled(desk)
    wall_us = after.wall_us - before.wall_us
    named_us = sum(after.overhead_us.values()) - sum(before.overhead_us.values())
    measured_us = after.busy_us - before.busy_us + after.idle_us - before.idle_us + named_us
    assert 0 <= wall_us - measured_us <= wall_us * 0.02

    engine = desk.engine
    assert isinstance(engine, VllmEngine)
    take, lost_us = desk.governor.steps.take, list[int]()

    def lose_one(batch: StepBatch) -> None:
        kept = list(batch.steps)
        if not lost_us and len(kept) > 2 and kept[1].busy:
            lost_us.append(sum(end_ns - start_ns for start_ns, end_ns in kept.pop(1).busy) // 1000)
        take(msgspec.structs.replace(batch, steps=kept))

    engine.tell_steps_to(lose_one)
    try:
        await desk.chat("tell me something else", "lora_sales", **LONG)
        red = await settled(desk)
    finally:
        engine.tell_steps_to(take)
    assert red.unaccounted_us - after.unaccounted_us >= lost_us[0]
    assert desk.governor.steps.lost_steps == 1


async def test_idle_is_what_the_engine_measured_and_mounting_has_its_own_name(desk: Desk) -> None:
    before = await settled(desk)
    await asyncio.sleep(0.5)
    after = await settled(desk)
    assert after.idle_us - before.idle_us >= 500_000
    assert after.busy_us == before.busy_us
    assert {"mounting", "probe", "schedule", "prepare", "output", "input", "ipc", "lora_activation", "kv_zeroing"} <= set(after.overhead_us)


async def test_costs_are_fitted_to_this_engine(desk: Desk) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(desk.chat(f"question {number} " * (number * 20), "lora_sales" if number % 2 else "", **LONG))
    model = (await settled(desk)).cost_model
    assert model is not None
    assert model.fitted_steps > 0
    assert model.decode_row_us > model.prefill_token_us > 0
