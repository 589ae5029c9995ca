"""Steps charged to attempts: all of a step's time, to whom it belongs, and what shows when a record is lost."""

import pytest

from services.worker.step_ledger import StepLedger
from services.worker.step_records import Row, StepBatch, StepRecord
from shared.contracts.base import EngineLimits
from shared.contracts.usage import EngineTime

LIMITS = EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=100, kv_block_tokens=16, kv_block_bytes=16 * 1024)
MS = 1_000_000


class Attempt:
    def __init__(self) -> None:
        self.gpu_us = 0
        self.steps_open = 0


def ledger() -> StepLedger:
    made = StepLedger()
    made.use(LIMITS)
    made.take(StepBatch(0, 0, [], [("start", 0, 1 * MS)], []))
    return made


def step(number: int, *rows: Row, took_ms: int = 8) -> StepRecord:
    """Steps of 10 ms each, of which the last part computes."""
    return StepRecord(number, [(number * 10 * MS + (10 - took_ms) * MS, (number + 1) * 10 * MS)], list(rows))


def prepared(number: int, took_ms: int = 2) -> tuple[str, int, int]:
    return ("prepare", number * 10 * MS, number * 10 * MS + took_ms * MS)


def time_of(one: StepLedger) -> EngineTime:
    time = one.engine_time("w1", "i1", "main", 1)
    assert time is not None
    return time


def test_before_anything_was_told_there_is_no_account_and_no_attempt_waits_for_steps() -> None:
    one, attempt = StepLedger(), Attempt()
    one.open("q", attempt, 1)
    assert attempt.steps_open == 0
    assert one.engine_time("w1", "i1", "main", 1) is None


def test_all_samples_of_a_prompt_and_all_prompts_of_an_attempt_are_charged_to_it() -> None:
    one, attempt = ledger(), Attempt()
    one.open("cmpl-q-0", attempt, 2)
    one.open("cmpl-q-1", attempt, 1)
    rows = (
        Row("0_cmpl-q-0-0a1b2c3d", 10, 0, 10),
        Row("1_cmpl-q-0-0a1b2c3d", 10, 0, 10),
        Row("cmpl-q-1-99999999", 10, 0, 10),
    )
    one.take(StepBatch(20 * MS, 0, [step(1, *rows)], [], []))
    assert (attempt.gpu_us, one.unbilled_us) == (8000, 0)
    assert time_of(one).billed_us == time_of(one).busy_us == 8000


def test_two_attempts_share_a_step_by_what_they_made_it_do() -> None:
    one, reader, writer = ledger(), Attempt(), Attempt()
    one.open("a", reader, 1)
    one.open("b", writer, 1)
    one.take(StepBatch(20 * MS, 0, [step(1, Row("a-00000000", 64, 0, 64), Row("b-00000000", 0, 1, 20))], [], []))
    assert reader.gpu_us + writer.gpu_us == 8000
    model = one.cost_model
    assert reader.gpu_us / writer.gpu_us == pytest.approx(64 * model.prefill_token_us / model.decode_row_us, rel=0.01)


def test_an_attempt_is_open_until_the_engine_has_ended_all_its_requests_even_after_it_was_closed() -> None:
    one, attempt = ledger(), Attempt()
    one.open("q", attempt, 2)
    one.take(StepBatch(20 * MS, 0, [step(1, Row("0_q-00000000", 5, 0, 5), Row("1_q-00000000", 5, 0, 5))], [], ["0_q-00000000"]))
    one.close("q", 20 * MS)
    assert attempt.steps_open == 1
    one.take(StepBatch(30 * MS, 0, [step(2, Row("1_q-00000000", 0, 1, 6))], [], ["1_q-00000000"]))
    assert (attempt.steps_open, attempt.gpu_us) == (0, 16_000)


def test_one_that_never_reached_the_engine_is_not_waited_for() -> None:
    one, attempt = ledger(), Attempt()
    one.open("q", attempt, 1)
    one.close("q", 20 * MS)
    one.take(StepBatch(519 * MS, 0, [], [], []))
    assert attempt.steps_open == 1
    one.take(StepBatch(521 * MS, 0, [], [], []))
    assert attempt.steps_open == 0


def test_the_platforms_own_probes_are_overhead_and_what_nobody_asked_for_is_not_billed() -> None:
    one = ledger()
    one.take(StepBatch(30 * MS, 0, [step(1, Row("probe-7-00000000", 1, 0, 1)), step(2, Row("stray-00000000", 1, 0, 1))], [], []))
    time = time_of(one)
    assert (time.overhead_us["probe"], time.busy_us, time.billed_us, one.unbilled_us) == (8000, 8000, 0, 8000)


def test_the_account_adds_up_to_the_wall_and_a_lost_record_turns_it_red() -> None:
    def run(lost: int | None) -> tuple[StepLedger, Attempt]:
        one, attempt = ledger(), Attempt()
        one.open("q", attempt, 1)
        for number in range(1, 61):
            told = [step(number, Row("q-00000000", 0, 1, number))] if number != lost else []
            one.take(StepBatch((number + 1) * 10 * MS, 0, told, [prepared(number)], []))
        one.take(StepBatch(700 * MS, 610 * MS, [], [], ["q-00000000"]))
        return one, attempt

    whole, attempt = run(None)
    time = time_of(whole)
    assert time.wall_us == time.busy_us + time.idle_us + sum(time.overhead_us.values()) + time.unaccounted_us == 700_000
    assert (time.busy_us, time.idle_us, time.steps) == (480_000, 90_000, 60)
    assert attempt.gpu_us == time.busy_us
    assert share_unaccounted(time) == pytest.approx(9 / 700)  # between the start and the first step nothing was told
    red, _ = run(30)
    assert share_unaccounted(time_of(red)) == pytest.approx(17 / 700)
    assert red.lost_steps == 1


def share_unaccounted(time: EngineTime) -> float:
    return time.unaccounted_us / time.wall_us


def test_steps_that_overlap_the_next_ones_preparation_are_charged_once() -> None:
    """As told by an engine that schedules asynchronously: the account closes in mid-step."""
    one, attempt = ledger(), Attempt()
    one.open("q", attempt, 1)
    busy = [StepRecord(number, [(number * 10 * MS, (number + 1) * 10 * MS)], [Row("q-00000000", 0, 1, 1)]) for number in range(1, 5)]
    for number, record in enumerate(busy, 1):
        spans = [("schedule", number * 10 * MS + 2 * MS, number * 10 * MS + 5 * MS)]
        one.take(StepBatch(number * 10 * MS + 5 * MS, 0, [record], spans, []))
    one.take(StepBatch(50 * MS, 0, [], [], ["q-00000000"]))
    time = time_of(one)
    assert (attempt.gpu_us, time.busy_us, time.overhead_us) == (40_000, 40_000, {"start": 1000})


def test_costs_are_fitted_to_the_steps_as_they_come() -> None:
    one, attempt = ledger(), Attempt()
    one.open("q", attempt, 1)
    for number in range(1, 200):
        rows = number % 7 + 1
        record = step(number, *(Row("q-00000000", 0, 1, 1) for _ in range(rows)), took_ms=rows)
        one.take(StepBatch((number + 1) * 10 * MS, 0, [record], [], []))
    assert one.cost_model.fitted_steps >= 64
    assert one.cost_model.decode_row_us == pytest.approx(1000.0, rel=0.01)
