"""The client between vLLM's application and its engine, over an engine that answers from a script."""

import asyncio
import copy
import enum
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker.governor import Attempt, Governor, current_attempt
from services.worker.request_plan import RequestPlan
from services.worker.tenant_mark import TENANT_MARK, owner_of
from services.worker.vllm_client import GovernedClient, group_salt, tenant_salt
from shared.contracts.inference import Handle
from shared.contracts.tenancy import TenantLimits
from shared.errors import Cancelled, EngineError, HandleMismatch, InternalError, Overloaded, WorkerLost

BASE = "demo@" + "a" * 64
SECRET = b"secret"


class Kind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class Sampling:
    def __init__(self, kind: Kind, n: int = 1) -> None:
        self.output_kind, self.n, self.max_tokens = kind, n, 8
        self.extra_args: dict[str, Any] | None = None

    def clone(self) -> "Sampling":
        return copy.copy(self)


class FakeEngine:
    """Makes `steps` tokens for each sample, one per step; `aborted` says whether it was closed before its end."""

    def __init__(self, steps: int = 3) -> None:
        self.steps = steps
        self.fails_after = steps
        self.failure: Exception | None = None
        self.calls: list[SimpleNamespace] = []
        self.aborted = False
        self.abort_calls: list[tuple[str, ...]] = []
        self.model_config = "the engine's own"

    async def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        self.calls.append(SimpleNamespace(prompt=prompt, params=params, request_id=request_id, options=options))
        finished = False
        try:
            for step in range(1, self.steps + 1):
                await asyncio.sleep(0)
                if self.failure is not None and step > self.fails_after:
                    raise self.failure
                for index in range(params.n):
                    ids = [7] if params.output_kind is Kind.DELTA else [7] * step
                    finished = step == self.steps and index == params.n - 1
                    sample = SimpleNamespace(index=index, token_ids=ids, text="x" * len(ids))
                    yield SimpleNamespace(outputs=[sample], finished=finished, num_cached_tokens=2)
        finally:
            self.aborted = not finished

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        self.abort_calls.append(request_ids)

    async def encode(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        self.calls.append(SimpleNamespace(prompt=prompt, params=params, request_id=request_id, options=options))
        yield SimpleNamespace(finished=True)


class Desk:
    def __init__(self, adapter_id: str = "", steps: int = 3) -> None:
        handle = Handle(tenant_id="tn_1", tenant="sales", pool_id="main", base=BASE, adapter_id=adapter_id, alias="x", version=1)
        self.engine = FakeEngine(steps)
        self.governor = Governor()
        self.attempt = Attempt("r1", 0, "router", handle, "/v1/completions")
        self.governor.begin(self.attempt)
        self.loras = {name: lora(name, number) for number, name in enumerate(("ad_1", "ad_2"), start=1)}
        self.client = GovernedClient(self.engine, self.governor, self.loras, SECRET)
        current_attempt.set(self.attempt)

    async def run(self, kind: Kind, request_id: str = "cmpl-1", n: int = 1, tokens: int = 4, **options: Any) -> list[Any]:
        prompt = {"type": "token", "prompt_token_ids": [1] * tokens}
        return [output async for output in self.client.generate(prompt, Sampling(kind, n), request_id, **options)]


def lora(name: str, number: int) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=f"/adapters/{name}")


@pytest.mark.parametrize("kind", [Kind.DELTA, Kind.CUMULATIVE])
async def test_a_stream_passes_step_by_step_and_every_token_is_counted_once(kind: Kind) -> None:
    desk = Desk()
    outputs = await desk.run(kind, n=2)
    assert len(outputs) == 6
    totals = desk.attempt.totals()
    assert (totals.prompt_tokens, totals.completion_tokens, totals.cached_tokens) == (4, 6, 2)
    assert desk.attempt.admitted.is_set()


async def test_a_single_answer_comes_once_with_all_samples_in_order_and_was_counted_on_the_way() -> None:
    desk = Desk()
    (output,) = await desk.run(Kind.FINAL_ONLY, n=3)
    assert [(sample.index, len(sample.token_ids)) for sample in output.outputs] == [(0, 3), (1, 3), (2, 3)]
    assert desk.attempt.completion_tokens == 9


async def test_an_answer_given_up_half_way_is_aborted_and_counted_so_far() -> None:
    desk = Desk(steps=1000)
    seen = 0
    stream = desk.client.generate({"type": "token", "prompt_token_ids": [1]}, Sampling(Kind.DELTA), "cmpl-1")
    async for _ in stream:
        seen += 1
        if seen == 5:
            break
    await stream.aclose()
    assert desk.engine.aborted
    assert desk.attempt.completion_tokens == 5


async def test_a_cancelled_single_answer_is_aborted_and_counted_so_far() -> None:
    desk = Desk(steps=100_000)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.run(Kind.FINAL_ONLY))
        async with asyncio.timeout(5):
            while desk.attempt.completion_tokens < 3:
                await asyncio.sleep(0)
        asking.cancel()
    assert desk.engine.aborted
    assert 3 <= desk.attempt.completion_tokens < 100_000


async def test_salt_priority_and_routing_are_the_platforms_whatever_was_asked_for() -> None:
    desk = Desk()
    prompt = {"type": "token", "prompt_token_ids": [1], "cache_salt": "client's"}
    options = {"priority": -9, "data_parallel_rank": 1, "session_id": "s", "trace_headers": {}, "reasoning_ended": None}
    assert [o async for o in desk.client.generate(prompt, Sampling(Kind.DELTA), "cmpl-1", **options)]
    (call,) = desk.engine.calls
    assert call.prompt["cache_salt"] == tenant_salt(SECRET, "tn_1") != tenant_salt(SECRET, "tn_2")
    assert tenant_salt(SECRET, "tn_1") != tenant_salt(b"other", "tn_1")
    assert call.options == {"priority": 0, "reasoning_ended": None}
    assert prompt["cache_salt"] == "client's"


async def test_tenants_whose_limits_name_one_group_have_its_salt_and_a_mark_of_their_own() -> None:
    salts: dict[str, str] = {}
    owners: dict[str, str | None] = {}
    for tenant_id, group in (("tn_1", "family"), ("tn_2", "family"), ("tn_3", "other"), ("tn_4", None)):
        desk = Desk()
        desk.attempt.handle = msgspec.structs.replace(desk.attempt.handle, tenant_id=tenant_id)
        desk.attempt.place.tenant_id = tenant_id
        desk.governor.admission.set_tenant(tenant_id, TenantLimits(cache_group=group), None)
        await desk.run(Kind.DELTA)
        (call,) = desk.engine.calls
        salts[tenant_id] = call.prompt["cache_salt"]
        owners[tenant_id] = owner_of(SimpleNamespace(cache_salt=salts[tenant_id], sampling_params=call.params))
    assert salts["tn_1"] == salts["tn_2"] == group_salt(SECRET, "family")
    assert len(set(salts.values())) == 3
    assert salts["tn_4"] == tenant_salt(SECRET, "tn_4")
    assert len(set(owners.values())) == 4, "the scheduler tells them apart all the same"
    assert group_salt(SECRET, "tn_4") != tenant_salt(SECRET, "tn_4")


async def test_a_mark_is_put_beside_what_else_the_parameters_carry_and_into_a_copy() -> None:
    desk = Desk()
    desk.governor.admission.set_tenant("tn_1", TenantLimits(cache_group="family"), None)
    params = Sampling(Kind.DELTA)
    params.extra_args = {"other": 1}
    prompt = {"type": "token", "prompt_token_ids": [1]}
    assert [o async for o in desk.client.generate(prompt, params, "cmpl-1")]
    assert desk.engine.calls[0].params.extra_args == {"other": 1, TENANT_MARK: tenant_salt(SECRET, "tn_1")}
    assert params.extra_args == {"other": 1}


async def test_the_handles_own_adapter_reaches_the_engine() -> None:
    desk = Desk("ad_1")
    await desk.run(Kind.DELTA, lora_request=desk.loras["ad_1"])
    assert desk.engine.calls[0].options["lora_request"] is desk.loras["ad_1"]


@pytest.mark.parametrize(
    ("resolved", "asked"),
    [
        ("ad_1", lora("ad_2", 2)),
        ("ad_1", None),
        ("", lora("ad_1", 1)),
        ("ad_1", lora("ad_1", 2)),
        ("ad_1", SimpleNamespace(lora_name="ad_1", lora_int_id=1, lora_path="/elsewhere")),
        ("ad_9", lora("ad_9", 9)),
    ],
)
async def test_any_other_lora_request_is_refused_before_the_engine_sees_it(resolved: str, asked: Any) -> None:
    desk = Desk(resolved)
    with pytest.raises(HandleMismatch):
        await desk.run(Kind.DELTA, lora_request=asked)
    assert isinstance(desk.attempt.refusal, HandleMismatch)
    assert desk.engine.calls == []


async def test_nothing_runs_outside_an_attempt() -> None:
    desk = Desk()

    async def outside() -> None:
        with pytest.raises(InternalError):
            await desk.run(Kind.DELTA)
        with pytest.raises(InternalError):
            desk.client.encode({"prompt_token_ids": [1]}, None, "embd-1")

    import contextvars

    await asyncio.get_running_loop().create_task(outside(), context=contextvars.Context())
    assert desk.engine.calls == []


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"type": "embeds"}, None])
async def test_a_prompt_whose_tokens_cannot_be_counted_is_not_started(prompt: Any) -> None:
    desk = Desk()
    with pytest.raises(InternalError):
        desk.client.generate(prompt, Sampling(Kind.DELTA), "cmpl-1")
    assert desk.engine.calls == []


async def test_a_refused_admission_never_reaches_the_engine() -> None:
    class Full(Governor):
        async def admit(self, attempt: Attempt, prompt_tokens: int, max_tokens: int | None, samples: int, now_s: float, **_: Any) -> Any:
            raise Overloaded("full", asked=prompt_tokens + samples * (max_tokens or 0))

    desk = Desk()
    client = GovernedClient(desk.engine, Full(), {}, SECRET)
    with pytest.raises(Overloaded) as refused:
        [_ async for _ in client.generate({"prompt_token_ids": [1, 2]}, Sampling(Kind.DELTA, n=3), "cmpl-1")]
    assert refused.value.fields["asked"] == 2 + 3 * 8
    assert desk.engine.calls == []


async def test_a_beam_searchs_prompt_counts_once_and_each_prompt_of_many_once() -> None:
    desk = Desk(steps=1)
    for step, beam in (("0a", 0), ("0b", 0), ("0b", 1)):
        await desk.run(Kind.CUMULATIVE, request_id=f"cmpl-1-{step}-beam-{beam}", tokens=4)
    assert desk.attempt.prompt_tokens == 4
    await desk.run(Kind.FINAL_ONLY, request_id="cmpl-1-0", tokens=3)
    await desk.run(Kind.FINAL_ONLY, request_id="cmpl-1-1", tokens=5)
    assert desk.attempt.prompt_tokens == 12
    assert desk.attempt.completion_tokens == 5


async def test_pooling_is_governed_too() -> None:
    desk = Desk("ad_1")
    outputs = [o async for o in desk.client.encode({"prompt_token_ids": [1, 2]}, None, "embd-1", lora_request=desk.loras["ad_1"])]
    assert len(outputs) == 1
    assert desk.attempt.prompt_tokens == 2
    with pytest.raises(HandleMismatch):
        desk.client.encode({"prompt_token_ids": [1, 2]}, None, "embd-2", lora_request=desk.loras["ad_2"])


async def test_pooling_of_several_inputs_is_one_decision_and_takes_the_cache_of_prompts_alone() -> None:
    desk = Desk()
    desk.attempt.plan = RequestPlan(prompts=2)
    ledger = desk.governor.admission.queue.ledger

    async def one(number: int) -> int:
        prompt = {"prompt_token_ids": [1] * 17}
        held = [ledger.held async for _ in desk.client.encode(prompt, None, f"embd-1-{number}")]
        return held[0]

    async with asyncio.TaskGroup() as group:
        first = group.create_task(one(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert desk.engine.calls == []
        second = group.create_task(one(1))
    assert max(first.result(), second.result()) == 4
    assert (ledger.held, desk.attempt.prompt_tokens) == (0, 34)


async def test_what_an_application_leaves_behind_is_aborted_when_its_call_ends_and_nothing_more_starts() -> None:
    desk = Desk(steps=100_000)
    left: list[asyncio.Task[Any]] = []

    async def application(*_: Any) -> None:
        left.append(asyncio.get_running_loop().create_task(desk.run(Kind.FINAL_ONLY)))
        await asyncio.Event().wait()

    async def nothing(*_: Any) -> Any: ...

    async with asyncio.TaskGroup() as group:
        calling = group.create_task(desk.client.closing(application)({}, nothing, nothing))
        async with asyncio.timeout(5):
            while desk.attempt.completion_tokens < 3:
                await asyncio.sleep(0)
        calling.cancel()
    assert desk.engine.abort_calls == [("cmpl-1",)]
    with pytest.raises(Cancelled):
        await desk.run(Kind.FINAL_ONLY, request_id="cmpl-1-2")
    assert len(desk.engine.calls) == 1
    left[0].cancel()
    await asyncio.wait(left)


async def test_a_call_that_left_nothing_behind_aborts_nothing() -> None:
    desk = Desk()

    async def application(*_: Any) -> None:
        await desk.run(Kind.DELTA)

    await desk.client.closing(application)({}, None, None)  # type: ignore[arg-type]
    assert desk.engine.abort_calls == []
    assert desk.attempt.closed


def test_the_rest_of_the_engine_is_reached_but_not_its_ungoverned_ways_in() -> None:
    client = GovernedClient(FakeEngine(), Governor(), {}, SECRET)
    assert client.model_config == "the engine's own"
    with pytest.raises(AttributeError):
        _ = client.add_request


class EngineDeadError(Exception):
    """As vLLM names it."""


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize(
    ("failure", "fails_after", "refusal"),
    [
        (RuntimeError("a step failed"), 1, EngineError),
        (RuntimeError("a step failed"), 0, EngineError),
        (ValueError("in mid-answer it is no word on the input"), 1, EngineError),
        (EngineDeadError(), 0, WorkerLost),
        (EngineDeadError(), 2, WorkerLost),
        (ValueError("the prompt is too long"), 0, None),
    ],
)
async def test_an_engines_failure_ends_the_attempt_as_one_and_bad_input_does_not(
    kind: Kind, failure: Exception, fails_after: int, refusal: type[Exception] | None
) -> None:
    desk = Desk()
    desk.engine.failure, desk.engine.fails_after = failure, fails_after
    with pytest.raises(type(failure)):
        await desk.run(kind)
    assert type(desk.attempt.refusal) is (refusal or type(None))
    assert desk.attempt.completion_tokens == fails_after
