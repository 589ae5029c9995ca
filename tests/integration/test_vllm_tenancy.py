"""Tenants on the real engine: caches apart, one decision before anything is sent, limits that the engine itself states."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker import request_policy
from services.worker.admission import Admission
from services.worker.attempt import Answering
from services.worker.frames import Outbox
from services.worker.governor import Attempt
from services.worker.identity import Identity
from shared.contracts.inference import FrameKind, Handle, InferRequest, decode_error, decode_head
from shared.contracts.tenancy import Share, TenantLimits
from tests.integration.in_process import CHAT, Desk

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

COMPLETIONS = "/v1/completions"
_seeds = itertools.count(1)


def tokens(count: int) -> list[int]:
    """A prompt that begins like no other."""
    seed = next(_seeds)
    return [20 + (seed * 31 + i * (7 + seed % 13)) % 180 for i in range(count)]


async def complete(desk: Desk, prompt: Any, tenant: str, adapter: str = "", **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
    return await desk.ask(COMPLETIONS, body, desk.handle(adapter, tenant))


def cached(answer: Any) -> int:
    """As the client is told, which is as it was metered."""
    details = answer.json["usage"]["prompt_tokens_details"] or {}
    told = details.get("cached_tokens") or 0
    assert told == answer.attempt.cached_tokens
    return told


@pytest.mark.parametrize("adapter", ["", "lora_sales"])
async def test_a_tenants_own_prompt_is_found_in_the_cache_and_another_tenants_never(desk: Desk, adapter: str) -> None:
    prompt = tokens(400)
    assert cached(await complete(desk, prompt, "sales", adapter)) == 0
    assert cached(await complete(desk, prompt, "sales", adapter)) > 300
    assert cached(await complete(desk, prompt, "rival", adapter)) == 0
    assert cached(await complete(desk, prompt, "rival", adapter)) > 300, "its own copy"
    assert cached(await complete(desk, prompt, "sales", adapter)) > 300, "and the first one is still there"


async def test_a_stream_does_not_say_either_that_another_tenant_asked_the_same(desk: Desk) -> None:
    prompt = tokens(400)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for tenant, least, most in (("sales", 0, 0), ("sales", 300, 400), ("rival", 0, 0)):
        usage = (await complete(desk, prompt, tenant, **options)).events[-1]["usage"]
        assert least <= ((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0) <= most


async def first_token_s(desk: Desk, prompt: list[int], tenant: str) -> float:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await complete(desk, prompt, tenant, max_tokens=1)
    return loop.time() - started_s


def above(values: list[float], others: list[float]) -> float:
    """How often one of the values is above one of the others: 0.5 if nothing tells them apart (Mann and Whitney's statistic)."""
    pairs = list(itertools.product(values, others))
    return sum((value > other) + 0.5 * (value == other) for value, other in pairs) / len(pairs)


async def test_the_time_to_the_first_token_does_not_tell_what_another_tenant_has_asked(desk: Desk) -> None:
    """Judged by ranks alone: prompts that another tenant has asked take as long as ones nobody has; own repeats are told apart."""
    asked_by_rival, unseen, own_repeats = [], [], []
    for _ in range(20):
        prompt = tokens(900)
        await complete(desk, prompt, "rival", max_tokens=1)
        asked_by_rival.append(await first_token_s(desk, prompt, "sales"))
        unseen.append(await first_token_s(desk, tokens(900), "sales"))
        own_repeats.append(await first_token_s(desk, prompt, "sales"))
    assert above(unseen, own_repeats) > 0.85, "otherwise this test could not see a cache"
    assert 0.15 < above(unseen, asked_by_rival) < 0.85


@pytest.fixture
def admission(desk: Desk) -> Iterator[Admission]:
    """A governor's books of the test's own, in which tenants have shares."""
    before, mine = desk.governor.admission, Admission()
    mine.use(desk.engine.limits)
    desk.governor.admission = mine
    yield mine
    desk.governor.admission = before


def share(desk: Desk, tenant: str, blocks: int | None = None, concurrent: int | None = None, **limits: Any) -> None:
    kv_bytes = None if blocks is None else blocks * desk.engine.limits.kv_block_bytes
    quota = TenantLimits(kv_quota_bytes=kv_bytes, max_concurrent=concurrent, **limits)
    desk.governor.admission.set_tenant(f"tn_{tenant}", quota, Share(incarnation="i1", kv_bytes=kv_bytes, concurrent=concurrent))


async def answered(desk: Desk, path: str, body: dict[str, Any], tenant: str) -> Answering:
    """As the worker answers, frames kept."""

    async def publish(subject: str, data: bytes) -> None:
        del subject, data

    handle: Handle = desk.handle("", tenant)
    request = InferRequest(
        request_id=f"t{next(_seeds)}", attempt=1, router_id="r", handle=handle, path=path, body=msgspec.json.encode(body),
        stream=bool(body.get("stream")),
    )  # fmt: skip
    outbox = Outbox(publish, Identity(worker_id="w", incarnation="i", pool_id="main"))
    attempt = Attempt(request.request_id, 1, "r", handle, path)
    stream = outbox.open(request.request_id, 1, "r")
    one = Answering(
        request, attempt, stream, outbox=outbox, app=desk.engine.app, policy=request_policy, engine_model=desk.engine.base_model_name
    )
    desk.governor.begin(attempt)
    # in a task, so that the attempt is not left in the test's context
    async with asyncio.TaskGroup() as group:
        group.create_task(one.run())
    desk.governor.end(attempt)
    return one


async def test_tenants_that_have_both_said_so_share_blocks_of_the_base_and_a_third_does_not(desk: Desk, admission: Admission) -> None:
    del admission
    for tenant, group in (("sales", "family"), ("sister", "family"), ("cousin", "others"), ("rival", None)):
        share(desk, tenant, cache_group=group)
    prompt = tokens(400)
    assert cached(await complete(desk, prompt, "sales")) == 0
    for tenant in ("cousin", "rival"):
        assert cached(await complete(desk, prompt, tenant)) == 0
    assert cached(await complete(desk, prompt, "sister")) > 300
    share(desk, "sister")
    alone = await complete(desk, prompt, "sister")
    assert cached(alone) == 0, "once one of them says no more, from its next request on"


ASKS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["one", "two", "three"], "max_tokens": 33}),
    (COMPLETIONS, {"prompt": "one", "n": 3, "max_tokens": 33, "temperature": 1.0}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 33, "temperature": 1.0}),
    (COMPLETIONS, {"prompt": "one", "use_beam_search": True, "n": 3, "max_tokens": 33, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["one", "two"], "use_beam_search": True, "n": 2, "max_tokens": 33, "temperature": 0}),
    ("/v1/responses", {"input": "one", "max_output_tokens": 200}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}),
]


# beams are not streamed: the application answers that with a 400 of its own
@pytest.mark.parametrize(
    ("path", "body", "stream"), [(*ask, s) for ask in ASKS for s in (False, True) if not (s and "use_beam_search" in ask[1])]
)
async def test_samples_prompts_and_beams_are_refused_as_a_whole_before_anything_is_sent(
    desk: Desk, admission: Admission, path: str, body: dict[str, Any], stream: bool
) -> None:
    share(desk, "sales", blocks=5)
    one = await answered(desk, path, {**body, "stream": stream}, "sales")
    (frame,) = one.stream.kept
    assert frame.kind is FrameKind.ERROR
    error = decode_error(frame.data)
    assert error.code == "kv_quota_exceeded"
    assert error.fields["asked_bytes"] > error.fields["limit_bytes"] == 5 * desk.engine.limits.kv_block_bytes
    assert one.attempt.prompt_tokens == 0
    assert admission.queue.ledger.held == 0


@pytest.mark.parametrize(("path", "body"), ASKS)
async def test_what_fits_is_answered_and_everything_comes_back(desk: Desk, admission: Admission, path: str, body: dict[str, Any]) -> None:
    share(desk, "sales", blocks=40)
    one = await answered(desk, path, {**body, "stream": False}, "sales")
    assert one.outcome == "complete", one.stream.kept
    head = decode_head(next(frame.data for frame in one.stream.kept if frame.kind is FrameKind.HEAD))
    assert (head.status, head.headers["x-tenantry-queue-ms"]) == (200, "0")
    assert (admission.queue.ledger.held, admission.queue.room.seats, admission.queue.room.prefill) == (0, 0, 0)


async def test_every_prompt_of_a_beam_search_is_metered(desk: Desk, admission: Admission) -> None:
    share(desk, "sales")
    single = await complete(desk, [tokens(20)], "sales", use_beam_search=True, n=2, max_tokens=3)
    double = await complete(desk, [tokens(20), tokens(20)], "sales", use_beam_search=True, n=2, max_tokens=3)
    assert (single.attempt.prompt_tokens, double.attempt.prompt_tokens) == (20, 40)
    assert admission.queue.ledger.held == 0


async def test_without_max_tokens_no_more_is_generated_than_the_tenants_default(desk: Desk, admission: Admission) -> None:
    share(desk, "sales", default_max_tokens=5)
    body = {"messages": [{"role": "user", "content": "count"}], "temperature": 0, "ignore_eos": True}
    answer = await desk.ask(CHAT, body, desk.handle("", "sales"))
    assert answer.json["usage"]["completion_tokens"] == 5
    assert answer.json["choices"][0]["finish_reason"] == "length"
    answer = await desk.ask(CHAT, {**body, "max_tokens": 9}, desk.handle("", "sales"))
    assert answer.json["usage"]["completion_tokens"] == 9
    assert admission.queue.ledger.held == 0


async def test_a_beam_search_that_does_not_say_how_long_is_as_long_as_its_tenants_default_and_reserves_that(
    desk: Desk, admission: Admission
) -> None:
    share(desk, "sales", blocks=6, default_max_tokens=5)
    body = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 2, "temperature": 0, "ignore_eos": True}
    one = await answered(desk, CHAT, body, "sales")
    assert one.outcome == "complete", one.stream.kept
    whole = msgspec.json.decode(b"".join(frame.data for frame in one.stream.kept if frame.kind is FrameKind.BODY))
    assert whole["usage"]["completion_tokens"] == 2 * 5
    share(desk, "sales", blocks=6)
    one = await answered(desk, CHAT, body, "sales")
    assert one.outcome == "error:kv_quota_exceeded", "without a default it is as long as the model allows"
    assert admission.queue.ledger.held == 0


async def test_one_at_a_time_means_one_at_a_time(desk: Desk, admission: Admission) -> None:
    share(desk, "sales", concurrent=1)
    share(desk, "rival")
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, admission.queue.line("tn_sales").seats)
            await asyncio.sleep(0.001)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        asking = [group.create_task(complete(desk, tokens(30), "sales", max_tokens=20)) for _ in range(5)]
        rival = await complete(desk, tokens(30), "rival")
        await asyncio.wait(asking)
        watching.cancel()
    assert (most, rival.attempt.place.queued_ms) == (1, 0)
    assert all(task.result().status == 200 for task in asking)
    assert sum(task.result().attempt.place.queued_ms > 0 for task in asking) == 4


async def test_the_engine_states_its_cache_and_its_step(desk: Desk) -> None:
    limits = desk.engine.limits
    assert limits.kv_blocks * limits.kv_block_bytes == pytest.approx(1 << 30, rel=0.01)
    assert (limits.kv_block_tokens, [group.most_tokens for group in limits.kv_groups]) == (32, [0])
    assert limits.max_batched_tokens >= 1024


async def test_the_engines_scheduler_cuts_prompts_only_while_tenants_share_it() -> None:
    from services.worker.vllm_scheduler import _SharedSteps

    class Base:
        def __init__(self, config: Any) -> None:
            self.scheduler_config, self.running, self.waiting = config, [], []

        def schedule(self, throttle: bool = False) -> tuple[int, list[Any]]:
            """What vLLM's own would go by."""
            del throttle
            return self.scheduler_config.long_prefill_token_threshold, list(self.waiting)

    class Waiting(list[Any]):
        def remove_requests(self, requests: list[Any]) -> None:
            self[:] = [one for one in self if all(one is not other for other in requests)]

        add_request = list.append

    def request(salt: str, computed: int = 0) -> SimpleNamespace:
        return SimpleNamespace(cache_salt=salt, sampling_params=None, num_prompt_tokens=500, num_computed_tokens=computed)

    config = SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=8192, long_prefill_token_threshold=0)
    scheduler: Any = type("Scheduler", (_SharedSteps, Base), {})(config)
    scheduler.running, scheduler.waiting = [], Waiting()
    assert scheduler.schedule() == (0, [])
    decoding, reading, samples = request("a", 501), request("a", 100), [request("a") for _ in range(3)]
    scheduler.running, scheduler.waiting = [decoding, reading], Waiting(samples)
    assert scheduler.schedule(throttle=False) == (0, samples), "alone"
    other = request("b")
    scheduler.waiting = Waiting([*samples, other])
    assert scheduler.schedule() == (192, [other]), "one prompt of each tenant is read"
    assert sorted(map(id, scheduler.waiting)) == sorted(map(id, [*samples, other]))
    scheduler.running = [decoding]
    assert scheduler.schedule() == (192, [other, samples[0]])
    scheduler.running, scheduler.waiting = [other], Waiting()
    assert scheduler.schedule() == (0, [])


@pytest.fixture(autouse=True)
async def nothing_is_left(desk: Desk) -> AsyncIterator[None]:
    yield
    assert desk.governor.in_flight() == 0
