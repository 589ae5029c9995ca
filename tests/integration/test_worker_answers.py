"""What a router gets from a worker: real NATS, the scripted engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from services.worker.scripted_app import tokens_of
from services.worker.scripted_engine import ScriptedSettings, folder_digest
from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats
from shared.contracts import inference
from shared.contracts.inference import FrameKind
from tests.worker_peers import FakeRegistry, FakeRouter, WorkerHere, eventually, worker_here


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
    async with worker_here(nats_server, tmp_path / "w1") as worker:
        yield worker


async def test_the_base_answers_a_stream_whole(worker: WorkerHere, router: FakeRouter) -> None:
    answer = await router.asked(worker.handle(), prompt="good morning", tokens=5)
    assert answer.kinds == [FrameKind.ACCEPTED, FrameKind.HEAD, *[FrameKind.BODY] * (len(answer.kinds) - 3), FrameKind.END]
    assert answer.text == "".join(tokens_of(worker.engine.description.digest, "good morning", 5))
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert answer.last is not None
    totals = inference.decode_totals(answer.last.data)
    assert (totals.prompt_tokens, totals.completion_tokens) == (2, 5)


async def test_an_adapter_answers_from_its_own_files_under_its_public_name(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, tmp_path: Path
) -> None:
    mount = await registry.mount("ad_one", files={"adapter_model.safetensors": b"one"})
    await registry.ready("ad_one")
    answer = await router.asked(worker.handle(mount), prompt="hi", tokens=4, stream=False)
    digest, _ = folder_digest(tmp_path / "w1" / "adapters" / mount.artifact_sha256)
    whole = msgspec.json.decode(answer.body)
    assert whole["choices"][0]["message"]["content"] == "".join(tokens_of(digest, "hi", 4))
    assert whole["model"] == "lora_ad_one@1"
    assert b"ad_one" not in answer.body.replace(b"lora_ad_one@1", b"")


async def test_two_hundred_mixed_requests_each_get_their_own_answer(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, tmp_path: Path
) -> None:
    mounts = [await registry.mount(f"ad_{n}") for n in range(3)]
    await registry.ready(*(mount.adapter_id for mount in mounts))
    digests = [worker.engine.description.digest]
    digests += [folder_digest(tmp_path / "w1" / "adapters" / mount.artifact_sha256)[0] for mount in mounts]
    handles = [worker.handle(), *(worker.handle(mount) for mount in mounts)]
    keys = [await router.ask(handles[n % 4], prompt=f"question {n}", tokens=6) for n in range(200)]
    for n, key in enumerate(keys):
        answer = await router.answer(key)
        assert answer.text == "".join(tokens_of(digests[n % 4], f"question {n}", 6))
    assert worker.governor.in_flight() == 0


@pytest.mark.parametrize(
    ("prompt", "stream", "code"),
    [
        ("[[fail]]", True, "engine_error"),
        ("[[fail]]", False, "engine_error"),
        ("[[empty]]", True, "empty_answer"),
        ("[[empty]]", False, "empty_answer"),
        ("[[cut]]", True, "engine_error"),
        ("[[other]]", True, "handle_mismatch"),
        ("[[other]]", False, "handle_mismatch"),
    ],
)
async def test_what_is_no_answer_ends_in_an_error(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, prompt: str, stream: bool, code: str
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    answer = await router.asked(worker.handle(mount), prompt=prompt, stream=stream)
    assert answer.error == code
    if code in ("handle_mismatch", "empty_answer"):
        assert answer.kinds == [FrameKind.ACCEPTED, FrameKind.ERROR]
    assert worker.governor.in_flight() == 0


async def test_an_error_of_the_application_is_passed_on_with_its_status(worker: WorkerHere, router: FakeRouter) -> None:
    answer = await router.asked(worker.handle(), prompt="[[bad]]", stream=False)
    assert inference.decode_head(answer.frames[1].data).status == 400
    assert answer.error == ""


async def test_a_field_that_only_the_platform_may_set_is_refused_before_the_engine(worker: WorkerHere, router: FakeRouter) -> None:
    answer = await router.asked(worker.handle(), fields={"cache_salt": "mine"})
    assert answer.error == "field_not_allowed"
    assert worker.governor.in_flight() == 0


async def test_an_adapter_that_is_not_mounted_here_has_no_responder(worker: WorkerHere, bus: Bus) -> None:
    heard: list[str] = []
    await bus.subscribe("test.reply", lambda message: heard.append(message.status))
    await bus.publish(inference.infer_subject("ad_gone", "w1"), b"x", reply="test.reply")
    await eventually(lambda: heard)
    assert heard == ["503"]


async def test_a_request_whose_handle_is_not_its_subjects_is_bounced(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    other = msgspec.structs.replace(worker.handle(mount), base="other@" + "0" * 64)
    assert (await router.asked(other)).error == "not_here"


async def test_the_same_base_under_another_label_is_the_same_base(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    """A pool keeps the label of its first worker; one that comes later from a folder of another name has the same weights."""
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    identity = "renamed@" + worker.engine.description.digest
    label = worker.engine.description.label
    assert (await router.asked(msgspec.structs.replace(worker.handle(mount), base=identity))).error == ""
    of_base = await router.asked(msgspec.structs.replace(worker.handle(), base=identity), prompt=label, stream=False, tokens=4)
    whole = msgspec.json.decode(of_base.body)
    assert whole["choices"][0]["message"]["content"] == "".join(tokens_of(worker.engine.description.digest, label, 4))
    assert b"renamed" not in of_base.body, "nothing in the answer's text is taken for the model's name"


async def test_an_attempt_that_comes_twice_runs_once(worker: WorkerHere, router: FakeRouter) -> None:
    key = await router.ask(worker.handle(), request_id="twice", tokens=3)
    await router.ask(worker.handle(), request_id="twice", tokens=3)
    answer = await router.answer(key)
    assert answer.doubles == 0
    base = worker.governor.totals[worker.worker.service.base_subject]
    assert base.requests == 1


async def test_over_the_limit_requests_are_bounced_as_full(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", max_running=2) as worker:
        keys = [await router.ask(worker.handle(), prompt="[[hang]]") for _ in range(3)]
        await eventually(lambda: router.answers[keys[2]].last)
        assert router.answers[keys[2]].error == "full"
        assert worker.governor.in_flight() == 2


async def test_a_cancelled_request_leaves_the_engine_within_a_second(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    key = await router.ask(worker.handle(), prompt="[[hang]]")
    await eventually(lambda: worker.governor.in_flight())
    await router.cancel(key)
    await eventually(lambda: worker.governor.in_flight() == 0, timeout_s=1.0)
    final = await eventually(lambda: [u for u in registry.usage if u.request_id == key[0] and u.final])
    assert final[-1].outcome == "cancelled:client_gone"


async def test_a_cancel_that_overtakes_its_request_is_kept(worker: WorkerHere, router: FakeRouter, bus: Bus) -> None:
    await router.cancel(("early", 1))
    await bus.flush()
    await asyncio.sleep(0)
    await eventually(lambda: worker.worker.service.has_cancelled("early", 1))
    await router.ask(worker.handle(), request_id="early", prompt="[[hang]]")
    marker = await router.asked(worker.handle(), tokens=2)
    assert marker.error == ""
    assert worker.governor.find("early", 1) is None


async def test_a_spent_budget_ends_in_deadline_exceeded(worker: WorkerHere, router: FakeRouter) -> None:
    answer = await router.asked(worker.handle(), prompt="[[hang]]", budget_s=0.2)
    assert answer.error == "deadline_exceeded"
    assert worker.governor.in_flight() == 0


async def test_a_silent_attempt_shows_progress(worker: WorkerHere, router: FakeRouter) -> None:
    key = await router.ask(worker.handle(), prompt="[[hang]]")
    await eventually(lambda: router.answers[key].progress >= 2)
    await router.cancel(key)


async def test_pieces_of_one_step_travel_in_one_message(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=50)) as worker:
        keys = [await router.ask(worker.handle(), prompt=f"q{n}", tokens=20) for n in range(32)]
        for key in keys:
            assert (await router.answer(key)).error == ""
    frames = sum(len(router.answers[key].frames) for key in keys)
    assert router.messages < frames / 4


async def test_usage_is_cumulative_and_final_once(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    key = await router.ask(worker.handle(), prompt="one two three", tokens=7)
    await router.answer(key)
    mine = await eventually(lambda: [u for u in registry.usage if u.request_id == key[0] and u.final])
    assert [(u.prompt_tokens, u.completion_tokens, u.outcome) for u in mine] == [(3, 7, "complete")]


async def test_a_usage_record_says_who_asked_what_served_it_and_how_long_it_took(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    key = await router.ask(worker.handle(mount), prompt="one two", tokens=5, key_id="key_7")
    await router.answer(key)
    (final,) = await eventually(lambda: [u for u in registry.usage if u.request_id == key[0] and u.final])
    assert (final.alias, final.version, final.base, final.key_id) == ("lora_ad_one", 1, worker.engine.description.identity, "key_7")
    assert 0 < final.first_token_ms <= final.total_ms
    assert final.queue_ms == 0
    block_ms = worker.engine.limits.kv_block_bytes * final.total_ms
    assert 0 < final.kv_byte_ms <= block_ms, "seven tokens are one block, reserved for a part of its time"


@pytest.mark.parametrize(("prompt", "outcome"), [("[[fail]]", "error:engine_error"), ("[[hang]]", "error:deadline_exceeded")])
async def test_what_ends_badly_is_counted_too(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, prompt: str, outcome: str
) -> None:
    key = await router.ask(worker.handle(), prompt=prompt, tokens=8, budget_s=0.3)
    await router.answer(key)
    (final,) = await eventually(lambda: [u for u in registry.usage if u.request_id == key[0] and u.final])
    assert (final.outcome, final.prompt_tokens) == (outcome, 1)
    assert final.total_ms > 0
    assert final.kv_byte_ms > 0


async def test_the_report_counts_what_was_served(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    await router.asked(worker.handle(mount), prompt="one two", tokens=5)
    await eventually(lambda: registry.reports and any(a.completion_tokens == 5 for a in registry.reports["w1"].adapters))
    report = registry.reports["w1"]
    assert report.state == "ready"
    assert [(a.adapter_id, a.residency, a.requests, a.prompt_tokens, a.in_flight) for a in report.adapters] == [
        ("ad_one", "device", 1, 2, 0)
    ]


async def test_a_ping_is_answered_with_the_incarnation(worker: WorkerHere, bus: Bus, registry: FakeRegistry) -> None:
    reply = await bus.request(inference.worker_ping_subject("w1"), b"", timeout_s=2)
    assert reply.decode() == registry.hellos[-1].incarnation
