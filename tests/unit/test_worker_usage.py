"""Usage records: cumulative checkpoints, one final, a bound. The store is a list."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from services.worker import usage as usage_module
from services.worker.governor import Attempt, Governor
from services.worker.identity import Identity
from services.worker.step_records import Row, StepBatch, StepRecord
from services.worker.usage import UsageMeter
from shared.bus import BusUnavailable
from shared.contracts.base import EngineLimits
from shared.contracts.inference import Handle
from shared.contracts.usage import AttemptUsage, EngineTime, decode
from tests.waiting import until

HANDLE = Handle(tenant_id="t1", tenant="sales", pool_id="main", base="demo@" + "0" * 64, adapter_id="ad_x", digest="sha256:1")
LIMITS = EngineLimits(slots=1, max_rank=8, bytes_per_rank=1)


class Stored:
    def __init__(self) -> None:
        self.records: list[AttemptUsage] = []
        self.engines: list[EngineTime] = []
        self.ids: list[str] = []
        self.cut = False

    async def __call__(self, data: bytes, message_id: str) -> None:
        if self.cut:
            raise BusUnavailable("cut")
        for record in decode(data):
            if isinstance(record, EngineTime):
                self.engines.append(record)
            else:
                assert isinstance(record, AttemptUsage)
                self.records.append(record)
        self.ids.append(message_id)


@asynccontextmanager
async def meter(limit: int = 100) -> AsyncGenerator[tuple[UsageMeter, Governor, Stored]]:
    governor, stored = Governor(), Stored()
    usage = UsageMeter(governor, stored, me=Identity(worker_id="w1", incarnation="i1", pool_id="main"), limit=limit)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(usage.run(interval_s=0.02))
        yield usage, governor, stored
        running.cancel()


def attempt(request_id: str) -> Attempt:
    return Attempt(request_id, 1, "r1", HANDLE, "/v1/chat/completions")


async def test_checkpoints_of_a_running_attempt_are_cumulative_and_the_final_one_is_the_last() -> None:
    async with meter() as (usage, governor, stored):
        one = attempt("q")
        governor.begin(one)
        one.completion_tokens = 5
        await until(lambda: len(stored.records) >= 2)
        one.completion_tokens = 9
        governor.end(one)
        usage.finish(one, "complete")
        await until(lambda: stored.records[-1].final)
        count = len(stored.records)
        assert await usage.flush(1.0)
        assert len(stored.records) == count
    checkpoints = [record.checkpoint for record in stored.records]
    assert checkpoints == sorted(set(checkpoints))
    assert stored.records[0].outcome == "running"
    assert (stored.records[-1].completion_tokens, stored.records[-1].outcome) == (9, "complete")
    assert len(set(stored.ids)) == len(stored.ids)


async def test_what_is_noted_together_travels_in_one_message() -> None:
    async with meter(limit=1000) as (usage, _, stored):
        for number in range(600):
            usage.finish(attempt(f"q{number}"), "complete")
        assert await usage.flush(5.0)
    assert [record.request_id for record in stored.records] == [f"q{number}" for number in range(600)]
    assert len(stored.ids) == 3


async def test_what_could_not_be_stored_is_stored_later_and_only_its_newest_state() -> None:
    async with meter() as (usage, governor, stored):
        stored.cut = True
        one = attempt("q")
        governor.begin(one)
        await asyncio.sleep(0.05)
        governor.end(one)
        usage.finish(one, "complete")
        assert not await usage.flush(0.05)
        stored.cut = False
        assert await usage.flush(5.0)
    assert [record.final for record in stored.records] == [True]


async def test_when_full_running_checkpoints_give_way_to_final_ones_and_losses_are_counted() -> None:
    governor, stored = Governor(), Stored()
    usage = UsageMeter(governor, stored, me=Identity(worker_id="w1", incarnation="i1", pool_id="main"), limit=3)
    for n in range(5):
        usage.finish(attempt(f"q{n}"), "complete")
    assert usage.lost == 2
    async with asyncio.TaskGroup() as group:
        running = group.create_task(usage.run())
        await usage.flush(5.0)
        running.cancel()
    assert [record.request_id for record in stored.records] == ["q2", "q3", "q4"]


async def test_the_final_record_waits_for_the_last_step_and_engines_account_for_their_time() -> None:
    async with meter() as (usage, governor, stored):
        governor.steps.use(LIMITS)
        governor.steps.take(StepBatch(1_000_000, 0, [], [("start", 0, 1_000_000)], []))
        one = attempt("q")
        governor.begin(one)
        governor.steps.open("cmpl-q", one, 1)
        governor.steps.close("cmpl-q", 5_000_000)
        governor.end(one)
        usage.finish(one, "complete")
        await asyncio.sleep(0.2)
        assert not stored.records
        row = Row("cmpl-q-00000000", 0, 1, 9)
        governor.steps.take(StepBatch(9_000_000, 0, [StepRecord(1, [(1_000_000, 8_000_000)], [row])], [], ["cmpl-q-00000000"]))
        assert await usage.flush(5.0)
    (final,) = stored.records
    assert (final.final, final.gpu_us) == (True, 7000)
    assert [time.checkpoint for time in stored.engines] == sorted({time.checkpoint for time in stored.engines})
    last = stored.engines[-1]
    assert (last.wall_us, last.busy_us, last.billed_us, last.worker_id, last.pool_id) == (9000, 7000, 7000, "w1", "main")
    assert last.cost_model is not None


async def test_an_engine_that_tells_nothing_more_does_not_keep_a_record_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "_SETTLE_LIMIT_S", 0.05)
    async with meter() as (usage, governor, stored):
        governor.steps.use(LIMITS)
        one = attempt("q")
        governor.steps.open("cmpl-q", one, 1)
        usage.finish(one, "error:worker_lost")
        assert await usage.flush(5.0)
    assert [record.outcome for record in stored.records] == ["error:worker_lost"]
