"""Ten thousand mixed requests: what the usage stream says is what the engine itself counted. Real NATS, the scripted engine's steps."""

import asyncio
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from services.worker.scripted_engine import ScriptedSettings
from services.worker.scripted_steps import Sequence, StepModel
from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats
from shared.contracts.inference import FrameKind, Handle
from shared.contracts.usage import AttemptUsage
from tests.worker_peers import FakeRegistry, FakeRouter, eventually, worker_here

REQUESTS = 10_000
OPEN = 400
COMPLETIONS, MESSAGES, EMBEDDINGS = "/v1/completions", "/v1/messages", "/v1/embeddings"
STEPS = StepModel(base_ms=0.5, sequence_us=2.0, prefill_token_us=0.5)


def kinds(random: Random) -> dict[str, Any]:
    """Options of FakeRouter.ask; `cancel` and `engine` are this test's."""
    tokens, words = random.randint(1, 8), " ".join(["word"] * random.randint(1, 30))
    prompts = [words] * random.randint(2, 3)
    plain = {"prompt": words, "tokens": tokens}
    return random.choice(
        [
            plain,
            plain | {"stream": False},
            plain | {"fields": {"stream_options": {"include_usage": True}}},
            plain | {"fields": {"n": 2}},
            plain | {"fields": {"n": 2}, "stream": False},
            {"path": COMPLETIONS, "tokens": tokens, "fields": {"prompt": prompts, "n": 2, "messages": None}, "stream": False},
            {"path": MESSAGES, "tokens": tokens, "prompt": words},
            {"path": EMBEDDINGS, "body": b'{"model":"x","input":["one two","three"]}', "stream": False},
            plain | {"cancel": True, "tokens": 200},
            {"prompt": "[[hang]]", "tokens": tokens, "budget_s": 0.05},
            {"prompt": f"[[fail]] {words}", "tokens": tokens},
            plain | {"fields": {"n": 128}},  # more than the engine has seats
            plain | {"fields": {"priority": 1}},  # refused before it reaches the engine
        ]
    )


async def test_usage_of_ten_thousand_mixed_requests_equals_what_the_engine_counted(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    registry, router, random = FakeRegistry(bus), FakeRouter(bus), Random(11)
    registry.use_scratch(tmp_path / "registry")
    await registry.start()
    await router.start()
    asked: dict[str, dict[str, Any]] = {}
    sequences: dict[str, list[Sequence]] = defaultdict(list)
    engine = ScriptedSettings(steps=STEPS, concurrency=128)
    async with worker_here(nats_server, tmp_path / "w1", engine=engine, max_running=4096) as worker:
        stepper = worker.engine.stepper
        assert stepper is not None
        submit = stepper.submit

        def count(sequence: Sequence) -> None:
            sequences[sequence.name].append(sequence)
            submit(sequence)

        stepper.submit = count
        mounts = [await registry.mount("ad_one"), await registry.mount("ad_two")]
        await registry.ready("ad_one", "ad_two")
        room = asyncio.Semaphore(OPEN)
        handles = [worker.handle(), *(worker.handle(mount) for mount in mounts)]

        async def ask(handle: Handle, options: dict[str, Any]) -> None:
            async with room:
                is_cancelled = options.pop("cancel", False)
                key = await router.ask(handle, **options)
                asked[key[0]] = {"cancel": is_cancelled, **options}
                if is_cancelled:
                    await eventually(lambda: router.answers[key].frames, 60.0)
                    await router.cancel(key)
                    return
                await router.answer(key, 60.0)

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(ask(handles[number % 3], kinds(random)))
        finals = await eventually(lambda: finals_of(registry) if len(finals_of(registry)) >= REQUESTS else None, 60.0)
        engine_time = worker.governor.steps.engine_time("w1", "i", "main", 1)
    assert len(finals) == len(asked) == REQUESTS, "one final record for each, whatever its end"
    assert len({usage.request_id for usage in finals}) == REQUESTS
    for usage in finals:
        check(usage, asked[usage.request_id], sequences[usage.request_id])
        if usage.outcome == "complete" and usage.path != EMBEDDINGS:
            frames = router.answers[(usage.request_id, 1)].frames.values()
            body = b"".join(frame.data for frame in frames if frame.kind is FrameKind.BODY)
            said = body.replace(b'"delta":', b"").replace(b"_delta", b"")  # of the protocol, not of the answer
            assert sum(said.count(word) for word in WORDS) == usage.completion_tokens, "as many tokens as the client got"
    outcomes = {usage.outcome for usage in finals}
    assert outcomes == {
        "complete",
        "cancelled:client_gone",
        "error:deadline_exceeded",
        "error:engine_error",
        "error:concurrency_exceeded",
        "error:field_not_allowed",
    }
    assert sum(usage.gpu_us for usage in finals) == stepper.busy_ns // 1000
    assert engine_time is not None
    assert engine_time.billed_us == engine_time.busy_us == stepper.busy_ns // 1000
    assert abs(engine_time.unaccounted_us) <= 1


WORDS = (b"amber", b"basil", b"cedar", b"delta", b"ember", b"fjord", b"grove", b"haven")


def finals_of(registry: FakeRegistry) -> list[AttemptUsage]:
    return [usage for usage in registry.usage if usage.final]


def check(usage: AttemptUsage, options: dict[str, Any], made: list[Sequence]) -> None:
    """Against the engine's own sequences of the request."""
    samples = options.get("fields", {}).get("n", 1)
    generated = sum(one.made for one in made) if usage.path != EMBEDDINGS else 0
    assert usage.prompt_tokens == sum(one.prompt_tokens for one in made) // samples
    if usage.outcome == "complete":
        assert usage.completion_tokens == generated
        assert usage.gpu_us > 0
        assert all(one.prompt_left == 0 for one in made)
    else:  # the last tokens that it was handed may not have been counted when it was cut off
        assert usage.completion_tokens <= sum(one.taken for one in made) <= usage.completion_tokens + len(made)
    assert (usage.gpu_us > 0) == any(one.prompt_left < one.prompt_tokens for one in made)
    assert usage.kv_byte_ms > 0 or not made
    assert usage.total_ms > 0
