"""A trial on the real engine: every answer's version is the one that its golden answer proves."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from tests.e2e.ask import Answer, Asker, ask
from tests.e2e.stack import DEMO, Stack, random_name
from tests.e2e.test_hot_load_and_drain import released, upload

TENANT = "cs"
AT_ONCE = 64


@pytest.fixture
async def name(stack: Stack) -> AsyncIterator[str]:
    """Version 1 answers as lora_cs, version 2 as lora_sales on a tenth of the requests."""
    made = random_name()
    stack.admin.update_tenant(TENANT, upgrade_headroom_bytes=1200 * 1024 * 1024)
    await asyncio.to_thread(upload, stack, TENANT, made, "lora_cs")
    await asyncio.to_thread(stack.admin.start_canary, TENANT, made, DEMO / "adapters" / "lora_sales", share=0.1)
    yield made
    await asyncio.to_thread(stack.admin.unload, made, TENANT, wait=True)
    await released(stack, TENANT, made)


def golden_of(asker: Asker, name: str) -> tuple[str, dict[str, str]]:
    """A question to which both have a golden answer, and what each version answers."""
    sales, cs = ({pair["question"]: pair["answer"] for pair in asker.goldens[adapter]} for adapter in ("lora_sales", "lora_cs"))
    question = min(sales.keys() & cs.keys(), key=lambda both: len(sales[both]) + len(cs[both]))
    assert sales[question] != cs[question]
    return question, {f"{name}@1": cs[question], f"{name}@2": sales[question]}


async def test_a_tenth_of_a_thousand_answers_are_the_trials_each_proven_by_its_golden_answer(asker: Asker, name: str) -> None:
    question, goldens = golden_of(asker, name)
    turns = asyncio.Semaphore(AT_ONCE)

    async with asker.clients() as clients:

        async def one(number: int) -> Answer:
            async with turns:
                return await ask(clients[TENANT], name, question, stream=number % 2 == 0)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(1000)]
        answers = [task.result() for task in tasks]
    assert [answer.error for answer in answers] == [None] * 1000
    served = [answer.headers["x-tenantry-adapter"] for answer in answers]
    assert [answer.text for answer in answers] == [goldens[version] for version in served]
    assert [answer.model for answer in answers] == served
    got = served.count(f"{name}@2")
    assert abs(got - 100) <= 4 * math.sqrt(1000 * 0.1 * 0.9)


async def test_a_promotion_under_load_mixes_no_answer_and_fails_none(stack: Stack, asker: Asker, name: str) -> None:
    question, goldens = golden_of(asker, name)
    stack.admin.change_canary(name, TENANT, share=0.5, by="session")
    answers: list[Answer] = []
    promoted = asyncio.Event()
    async with asker.clients() as clients:

        async def keep_asking(number: int) -> None:
            session = {"x-tenantry-session": f"s{number}"}
            while not promoted.is_set():
                answers.append(await ask(clients[TENANT], name, question, stream=number % 2 == 0, extra_headers=session))

        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(keep_asking(number))
            while len({answer.model for answer in answers}) < 2:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(stack.admin.promote_canary, name, TENANT)
            await asyncio.to_thread(stack.admin.show, name, TENANT)
            promoted.set()
        last = await ask(clients[TENANT], name, question, stream=False)
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.text for answer in answers] == [goldens[answer.headers["x-tenantry-adapter"]] for answer in answers]
    assert (last.model, last.text) == (f"{name}@2", goldens[f"{name}@2"])
