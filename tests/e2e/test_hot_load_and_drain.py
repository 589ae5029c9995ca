"""Adapters come and go in daylight: nothing that runs is cut, nothing is ever empty, what is released is really released."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from services.cli.client import ClientError
from tests.e2e.ask import Answer, Asker, ask
from tests.e2e.stack import DEMO, Stack

STREAMS = 100  # more than the engine runs at once, so that most still run whatever its speed
RUNNING = 20


TRIES = 3


class TooLate(Exception):
    """The streams ended before what should have met them: nothing was tested."""


def tried_again(test: Callable[[Stack, Asker], Awaitable[None]]) -> Callable[[Stack, Asker], Awaitable[None]]:
    """A test that needs something to happen while streams run, however busy the machine: too late, and it is set up once more."""

    @functools.wraps(test)
    async def tried(stack: Stack, asker: Asker) -> None:
        for left in reversed(range(TRIES)):
            try:
                await test(stack, asker)
                return
            except* TooLate:
                if not left:
                    raise

    return tried


def upload(stack: Stack, tenant: str, name: str, source: str) -> None:
    stack.admin.upload(tenant, name, DEMO / "adapters" / source)


async def started_streams(client: openai.AsyncOpenAI, model: str, question: str, group: asyncio.TaskGroup) -> list[asyncio.Task[Answer]]:
    """STREAMS requests, the first of which has shown its first piece: the engine runs as many as it can, the others wait in it."""
    arrived = asyncio.Event()

    async def run() -> Answer:
        answer = Answer()
        messages: Any = [{"role": "user", "content": question}]
        try:
            opened = await client.chat.completions.with_raw_response.create(
                model=model, messages=messages, temperature=0, max_tokens=600, stream=True
            )
            answer.headers = dict(opened.headers)
            async for chunk in opened.parse():
                arrived.set()
                answer.model = chunk.model
                for choice in chunk.choices:
                    answer.text += choice.delta.content or ""
                    answer.finished = choice.finish_reason or answer.finished
        except openai.APIError as error:
            answer.error = error
        return answer

    tasks = [group.create_task(run()) for _ in range(STREAMS)]
    await asyncio.wait_for(arrived.wait(), 60)
    return tasks


async def all_accepted(stack: Stack, name: str) -> None:
    """The worker has taken every one of STREAMS requests for a fresh adapter: what comes later finds them all inside."""
    adapter_id = next(view.adapter_id for view in stack.admin.adapters() if view.name == name)
    give_up_at = asyncio.get_running_loop().time() + 30
    while True:
        reports = await asyncio.to_thread(stack.reports)
        if sum(use["requests"] for report in reports for use in report["adapters"] if use["adapter_id"] == adapter_id) >= STREAMS:
            return
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.05)


@tried_again
async def test_a_hot_load_interrupts_none_of_the_running_streams(stack: Stack, asker: Asker) -> None:
    question, golden = asker.long_question("lora_sales")
    async with asker.clients() as clients, asyncio.TaskGroup() as group:
        tasks = await started_streams(clients["sales"], "lora_sales", question, group)
        assert sum(not task.done() for task in tasks) >= RUNNING
        await asyncio.to_thread(upload, stack, "cs", "hot", "lora_cs")
        pair = asker.goldens["lora_cs"][0]
        still_running = sum(not task.done() for task in tasks)
        hot = await ask(clients["cs"], "hot", pair["question"], stream=False)
        answers = [await task for task in tasks]
    try:
        assert [answer.error for answer in answers] == [None] * STREAMS
        assert {answer.text for answer in answers} == {golden}
        assert hot.text == pair["answer"]
        assert hot.model.startswith("hot@")
        if not still_running:
            raise TooLate("the load must have ended while streams ran")
    finally:
        stack.admin.unload("hot", "cs", wait=True)


@tried_again
async def test_a_drain_lets_running_streams_end_and_refuses_new_ones_at_once(stack: Stack, asker: Asker) -> None:
    await asyncio.to_thread(upload, stack, "cs", "leaving", "lora_cs")
    question, golden = asker.long_question("lora_cs")
    async with asker.clients() as clients, asyncio.TaskGroup() as group:
        tasks = await started_streams(clients["cs"], "leaving", question, group)
        await all_accepted(stack, "leaving")
        running = sum(not task.done() for task in tasks)
        await asyncio.to_thread(stack.admin.unload, "leaving", "cs")
        if running < RUNNING:
            raise TooLate("the streams are too short to drain while they run")
        refused = await ask(clients["cs"], "leaving", question, stream=True)
        assert isinstance(refused.error, openai.NotFoundError)
        assert refused.error.code == "adapter_not_found"
        still_running = [task for task in tasks if not task.done()]
        if not still_running:
            raise TooLate("the refusal must come while the old streams run")
        answers = [await task for task in tasks]
    assert [answer.error for answer in answers] == [None] * STREAMS
    assert {answer.text for answer in answers} == {golden}
    assert {answer.finished for answer in answers} == {"stop"}
    await released(stack, "cs", "leaving")
    drained = [event for event in stack.admin.events("cs", "leaving") if event.state == "unloaded"]
    assert drained[-1].detail["slot_bytes_returned"] > 0
    assert 0 < drained[-1].detail["completed"] <= STREAMS
    assert drained[-1].detail["aborted"] == 0


async def released(stack: Stack, tenant: str, name: str) -> None:
    """Unloaded in the registry, and gone from the engine's own list as the worker reports it."""
    give_up_at = asyncio.get_running_loop().time() + 30
    while True:
        found = [view for view in stack.admin.adapters(tenant, all_versions=True) if view.name == name]
        resident = {use["adapter_id"] for report in stack.reports() for use in report["adapters"] if use["residency"] == "device"}
        if found and all(view.state == "unloaded" and view.adapter_id not in resident for view in found):
            return
        assert asyncio.get_running_loop().time() < give_up_at, f"{name} is not released: {found}"
        await asyncio.sleep(0.1)


@tried_again
async def test_a_drain_whose_deadline_passes_ends_what_still_runs_with_an_explicit_error(stack: Stack, asker: Asker) -> None:
    await asyncio.to_thread(upload, stack, "cs", "hurried", "lora_cs")
    question, golden = asker.long_question("lora_cs")
    async with asker.clients() as clients, asyncio.TaskGroup() as group:
        tasks = await started_streams(clients["cs"], "hurried", question, group)
        await all_accepted(stack, "hurried")
        await asyncio.to_thread(stack.admin.unload, "hurried", "cs", deadline_s=0.05)
        answers = [await task for task in tasks]
    assert all(answer.error is not None or answer.text == golden for answer in answers)
    cut = [answer for answer in answers if answer.error is not None]
    if not cut:
        raise TooLate("the deadline must have passed for some")
    assert all(not answer.finished for answer in cut)
    assert all("drain" in str(answer.error) for answer in cut)
    await released(stack, "cs", "hurried")


async def test_a_drain_counts_every_sample_and_every_client_that_went_away(stack: Stack, asker: Asker) -> None:
    await asyncio.to_thread(upload, stack, "cs", "many", "lora_cs")
    question, golden = asker.long_question("lora_cs")
    messages: Any = [{"role": "user", "content": question}]
    async with asker.clients() as clients, asyncio.TaskGroup() as group:
        two = group.create_task(
            clients["cs"].chat.completions.create(
                model="many", messages=messages, temperature=1, extra_body={"top_k": 1}, n=2, max_tokens=600
            )
        )
        leaver = await clients["cs"].chat.completions.create(model="many", messages=messages, temperature=0, max_tokens=600, stream=True)
        await anext(aiter(leaver))
        await leaver.close()
        await in_flight_is(stack, "many", 1)
        await asyncio.to_thread(stack.admin.unload, "many", "cs")
        done = await two
    assert [choice.message.content for choice in done.choices] == [golden, golden]
    await released(stack, "cs", "many")


async def in_flight_is(stack: Stack, name: str, count: int) -> None:
    """What the worker counts for this adapter, from its reports (one a second)."""
    adapter_id = next(view.adapter_id for view in stack.admin.adapters() if view.name == name)
    give_up_at = asyncio.get_running_loop().time() + 10
    while True:
        uses = [use for report in stack.reports() for use in report["adapters"] if use["adapter_id"] == adapter_id]
        if [use["in_flight"] for use in uses] == [count]:
            return
        assert asyncio.get_running_loop().time() < give_up_at, uses
        await asyncio.sleep(0.1)


async def test_requests_in_the_instant_of_a_drain_are_answered_or_refused_and_never_empty(stack: Stack, asker: Asker) -> None:
    pair = asker.goldens["lora_cs"][0]
    answers: list[Answer] = []
    async with asker.clients() as clients:
        for round_number in range(4):
            await asyncio.to_thread(upload, stack, "cs", "flicker", "lora_cs")
            stop = asyncio.Event()

            async def hammer(stop: asyncio.Event = stop) -> None:
                while not stop.is_set():
                    answers.append(await ask(clients["cs"], "flicker", pair["question"], stream=len(answers) % 2 == 0))

            async with asyncio.TaskGroup() as group:
                for _ in range(8):
                    group.create_task(hammer())
                await asyncio.sleep(0.05 * (round_number + 1))
                await asyncio.to_thread(stack.admin.unload, "flicker", "cs")
                await released(stack, "cs", "flicker")
                stop.set()
    good = [answer for answer in answers if answer.error is None]
    refused = [answer for answer in answers if answer.error is not None]
    assert good
    assert refused
    assert {answer.text for answer in good} == {pair["answer"]}
    codes = {getattr(answer.error, "code", None) for answer in refused}
    assert codes <= {"adapter_not_found", "adapter_not_ready"}, [answer.error for answer in refused if answer.error][:3]


async def test_a_new_version_serves_new_requests_while_running_streams_end_on_the_old_digest(stack: Stack, asker: Asker) -> None:
    stack.admin.update_tenant("cs", upgrade_headroom_bytes=1200 * 1024 * 1024)
    await asyncio.to_thread(upload, stack, "cs", "tone", "lora_cs")
    question, old_golden = asker.long_question("lora_cs")
    new_pair = asker.goldens["lora_sales"][0]
    answers: list[Answer] = []
    async with asker.clients() as clients, asyncio.TaskGroup() as group:
        tasks = await started_streams(clients["cs"], "tone", question, group)
        await all_accepted(stack, "tone")
        switched = asyncio.Event()

        async def keep_asking() -> None:
            while not switched.is_set():
                answers.append(await ask(clients["cs"], "tone", new_pair["question"], stream=False))

        asking = group.create_task(keep_asking())
        await asyncio.to_thread(upload, stack, "cs", "tone", "lora_sales")
        later = await ask(clients["cs"], "tone", new_pair["question"], stream=False)
        switched.set()
        await asking
        old = [await task for task in tasks]
    try:
        assert [answer.error for answer in (*old, *answers)] == [None] * (STREAMS + len(answers))
        assert {answer.text for answer in old} == {old_golden}
        assert {answer.model for answer in old} == {"tone@1"}
        assert (later.text, later.model) == (new_pair["answer"], "tone@2")
        assert {answer.digest for answer in old} != {later.digest}
        models = [answer.model for answer in answers]
        assert models == sorted(models), "once the new version serves, the old one never does again"
    finally:
        stack.admin.unload("tone", "cs", wait=True)


async def test_the_mount_that_was_drained_leaves_nothing_reserved(stack: Stack) -> None:
    before = {tenant.name: tenant.vram_held_bytes for tenant in stack.admin.tenants()}
    await asyncio.to_thread(upload, stack, "finance", "brief", "lora_finance")
    during = {tenant.name: tenant.vram_held_bytes for tenant in stack.admin.tenants()}
    await asyncio.to_thread(stack.admin.unload, "brief", "finance", wait=True)
    after = {tenant.name: tenant.vram_held_bytes for tenant in stack.admin.tenants()}
    assert during["finance"] > before["finance"]
    assert after == before


@pytest.mark.parametrize("mode", ["immediate", "force", ""])
async def test_any_other_unload_mode_is_refused_with_the_reason(stack: Stack, mode: str) -> None:
    with pytest.raises(ClientError, match="draining") as refused:
        stack.admin.unload("lora_cs", mode=mode)
    assert refused.value.peer_code in {"unsupported", "invalid_request"}
    assert any(view.name == "lora_cs" and view.serving for view in stack.admin.adapters("cs"))
