"""What the engine's process tells of its steps: the hook around a scheduler, the timer around a model runner, the socket between."""

from types import SimpleNamespace
from typing import Any

import torch

from services.worker.step_channel import StepQueues, StepReceiver, StepSender
from services.worker.step_ledger import StepLedger
from services.worker.step_records import Row, StepBatch, StepRecord
from services.worker.vllm_step_hook import StepHook
from services.worker.vllm_step_timer import StepTimer
from tests.waiting import until


def request(prompt: int, computed: int, adapter: int = 0) -> Any:
    lora = SimpleNamespace(lora_int_id=adapter) if adapter else None
    return SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed, lora_request=lora)


def scheduled(hook: StepHook, tokens: dict[str, int], requests: dict[str, Any]) -> None:
    hook.switch("schedule")
    hook.scheduled(SimpleNamespace(num_scheduled_tokens=tokens), requests)


def output(*busy: tuple[int, int], host: list[tuple[int, int]] | None = None) -> Any:
    return SimpleNamespace(tenantry_times=(host or list(busy), [], list(busy)))


def test_rows_say_what_is_prompt_what_is_decoded_and_how_far_attention_reads() -> None:
    hook = StepHook()
    requests = {"new": request(100, 64), "last chunk": request(100, 100), "decoding": request(100, 131, adapter=3)}
    scheduled(hook, {"new": 64, "last chunk": 36, "decoding": 1}, requests)
    hook.received(output((1, 2)))
    (step,) = hook.queues.take().steps
    assert step.rows == [Row("new", 64, 0, 64), Row("last chunk", 36, 0, 100), Row("decoding", 0, 1, 131, 3)]
    assert (step.number, step.busy) == (1, [(1, 2)])


def test_with_a_step_out_nothing_after_its_handing_over_is_told_as_complete() -> None:
    hook = StepHook()
    scheduled(hook, {"a": 1}, {"a": request(1, 1)})
    out_ns = hook.queues.take().until_ns
    scheduled(hook, {"a": 1}, {"a": request(1, 2)})  # the next one, before the first has come back
    assert hook.queues.take().until_ns == out_ns
    hook.received(output((out_ns, out_ns + 1)))
    assert out_ns < hook.queues.take().until_ns
    hook.received(output((out_ns + 1, out_ns + 2)))
    assert [step.number for step in hook.queues.take().steps] == [2]


def test_a_request_is_told_as_ended_after_the_last_step_that_it_is_in() -> None:
    hook = StepHook()
    scheduled(hook, {"a": 1}, {"a": request(1, 1)})
    scheduled(hook, {"a": 1}, {"a": request(1, 2)})
    hook.received(output((1, 2)))
    hook.ended("a")  # by what the first step made; the second is being computed
    hook.ended("b")
    assert hook.queues.take().ended == []
    hook.received(output((2, 3)))
    assert hook.queues.take().ended == ["a", "b"]
    hook.ended("c")
    assert hook.queues.take().ended == ["c"]


def test_idle_is_told_while_it_lasts_and_the_parts_of_a_step_with_what_lies_between() -> None:
    hook = StepHook()
    hook.switch("idle")
    batch = hook.queues.take()
    assert batch.idle_since_ns > 0
    assert batch.until_ns >= batch.idle_since_ns
    hook.switch("input")
    scheduled(hook, {"a": 1}, {"a": request(1, 1)})
    start_ns = hook.queues.take().until_ns
    hook.received(output((start_ns + 10, start_ns + 20), host=[(start_ns + 5, start_ns + 20), (start_ns + 30, start_ns + 40)]))
    batch = hook.queues.take()
    ipc = [(start - start_ns, end - start_ns) for name, start, end in batch.spans if name == "ipc"]
    assert ipc[0][1] == 5
    assert ipc[1] == (20, 30)
    assert ipc[2][0] == 40
    assert batch.idle_since_ns == 0


def test_a_step_whose_times_did_not_come_back_is_no_overhead() -> None:
    hook = StepHook()
    scheduled(hook, {"a": 1}, {"a": request(1, 1)})
    hook.queues.take()
    hook.received(SimpleNamespace())
    batch = hook.queues.take()
    assert batch.spans == []
    assert [step.busy for step in batch.steps] == [[]]


class Runner:
    """A model runner as vLLM's first kind: prepares and computes in execute_model, samples in sample_tokens."""

    def execute_model(self, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return "empty"
        self._zero_block_ids([1])
        self._set_active_loras()
        self._model_forward()
        return None if scheduler_output.samples else SimpleNamespace()

    def sample_tokens(self, grammar: Any) -> Any:
        del grammar
        return SimpleNamespace()

    def _zero_block_ids(self, blocks: list[int]) -> None: ...

    def _set_active_loras(self) -> None: ...

    def _model_forward(self) -> None: ...


def step(tokens: int, *, samples: bool = True) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, samples=samples)


def test_a_steps_output_carries_its_times_and_computing_begins_with_the_forward_pass() -> None:
    runner = Runner()
    StepTimer(runner, torch.device("cpu"))
    assert runner.execute_model(step(3)) is None
    host, spans, busy = runner.sample_tokens(None).tenantry_times
    assert [name for name, _, _ in spans] == ["prepare", "kv_zeroing", "lora_activation"]
    (execute, sample), (_, enter_ns, forward_ns) = host, spans[0]
    assert execute[0] == enter_ns
    assert busy == [(forward_ns, execute[1]), sample]
    assert all(enter_ns <= start <= end <= forward_ns for _, start, end in spans)
    _, _, pooled = runner.execute_model(step(3, samples=False)).tenantry_times
    assert len(pooled) == 1
    assert runner.execute_model(step(0)) == "empty"


async def test_batches_arrive_in_order_also_those_that_could_not_be_sent_at_first() -> None:
    got: list[StepBatch] = []
    queues = StepQueues()
    receiver = StepReceiver(got.append)
    sender = StepSender(queues, receiver.path)
    for number in range(1, 3000):
        queues.steps.append(StepRecord(number, [(number, number + 1)], [Row("chatcmpl-01JD-1-0a1b2c3d", 0, 1, 5)] * 4))
    sender.send()  # more than the socket's queue takes
    receiver.start()
    try:
        await until(lambda: sender.send() or sum(len(batch.steps) for batch in got) == 2999)
    finally:
        receiver.close()
        sender.close()
    assert [one.number for batch in got for one in batch.steps] == list(range(1, 3000))
    ledger = StepLedger()
    for batch in got:
        ledger.take(batch)
    assert ledger.lost_steps == 0


async def test_when_nobody_reads_for_long_the_oldest_are_lost_and_the_ledger_counts_them() -> None:
    got: list[StepBatch] = []
    queues = StepQueues()
    receiver = StepReceiver(got.append)
    sender = StepSender(queues, receiver.path)
    for number in range(1, 3001):
        queues.steps.append(StepRecord(number, [(number, number + 1)], []))
        sender.send()
    receiver.start()
    try:
        await until(lambda: sender.send() or any(step.number == 3000 for batch in got for step in batch.steps))
    finally:
        receiver.close()
        sender.close()
    ledger = StepLedger()
    for batch in got:
        ledger.take(batch)
    assert ledger.lost_steps == 3000 - sum(len(batch.steps) for batch in got) > 0
