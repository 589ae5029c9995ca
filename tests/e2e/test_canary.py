"""A trial on the real engine: every answer's version is the one that its golden answer proves."""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.ask import Answer, Asker, ask, ask_all
from tests.e2e.stack import DEMO, Stack, random_name
from tests.e2e.test_hot_load_and_drain import released, upload
from tests.waiting import until, until_async

TENANT = "cs"
AT_ONCE = 64


REFUSES = "{% if messages[0]['content'] != 'hello' %}{{ raise_exception('not this one') }}{% endif %}hello"
DAWDLES = "{% for i in range(2000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ messages[0]['content'] }}"


@pytest.fixture
async def name(stack: Stack) -> AsyncIterator[str]:
    """Version 1 answers as lora_cs and serves."""
    made = random_name()
    stack.admin.update_tenant(TENANT, upgrade_headroom_bytes=1200 * 1024 * 1024)
    await asyncio.to_thread(upload, stack, TENANT, made, "lora_cs")
    yield made
    await asyncio.to_thread(stack.admin.unload, made, TENANT, wait=True)
    await released(stack, TENANT, made)


async def start(stack: Stack, name: str, path: Path = DEMO / "adapters" / "lora_sales", **terms: Any) -> None:
    """Version 2 goes on trial; without a path it answers as lora_sales."""
    view = await asyncio.to_thread(stack.admin.start_canary, TENANT, name, path, **terms)
    assert (view.state, view.version, view.on_trial) == ("ready", 2, True)


def with_template(folder: Path, template: str) -> Path:
    shutil.copytree(DEMO / "adapters" / "lora_sales", folder / "made")
    (folder / "made" / "chat_template.jinja").write_text(template)
    return folder / "made"


@asynccontextmanager
async def load(client: openai.AsyncOpenAI, name: str, question: str, answers: list[Answer]) -> AsyncIterator[None]:
    """Sessions that ask all the while, each streamed or not; none is cut off at the end."""
    over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        session = {"x-tenantry-session": f"s{number}"}
        while not over.is_set():
            answers.append(await ask(client, name, question, stream=number % 2 == 0, extra_headers=session))

    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(keep_asking(number))
        try:
            yield
        finally:
            over.set()


def check(answers: list[Answer], goldens: dict[str, str]) -> None:
    """None failed, and each is the golden answer of the version that it names."""
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert [answer.text for answer in answers] == [goldens[answer.headers["x-tenantry-adapter"]] for answer in answers]
    assert [answer.model for answer in answers] == [answer.headers["x-tenantry-adapter"] for answer in answers]


def golden_of(asker: Asker, name: str) -> tuple[str, dict[str, str]]:
    """A question to which both have a golden answer, and what each version answers."""
    sales, cs = ({pair["question"]: pair["answer"] for pair in asker.goldens[adapter]} for adapter in ("lora_sales", "lora_cs"))
    question = min(sales.keys() & cs.keys(), key=lambda both: len(sales[both]) + len(cs[both]))
    assert sales[question] != cs[question]
    return question, {f"{name}@1": cs[question], f"{name}@2": sales[question]}


async def test_a_tenth_of_a_thousand_answers_are_the_trials_each_proven_by_its_golden_answer(stack: Stack, asker: Asker, name: str) -> None:
    question, goldens = golden_of(asker, name)
    await start(stack, name, share=0.1)
    turns = asyncio.Semaphore(AT_ONCE)
    async with asker.clients() as clients:

        async def one(number: int) -> Answer:
            async with turns:
                return await ask(clients[TENANT], name, question, stream=number % 2 == 0)

        answers = await ask_all([one(number) for number in range(1000)])
    check(answers, goldens)
    got = sum(answer.model == f"{name}@2" for answer in answers)
    assert abs(got - 100) <= 4 * math.sqrt(1000 * 0.1 * 0.9)


async def test_a_session_stays_with_the_version_that_its_first_golden_answer_proves(stack: Stack, asker: Asker, name: str) -> None:
    question, goldens = golden_of(asker, name)
    await start(stack, name, share=0.3, by="session")
    async with asker.clients() as clients:
        by_header = [
            ask(clients[TENANT], name, question, stream=False, extra_headers={"x-tenantry-session": f"s{number % 40}"})
            for number in range(120)
        ]
        by_user = [ask(clients[TENANT], name, question, stream=True, user=f"s{number}") for number in range(40)]
        answers = await ask_all([*by_header, *by_user])
    check(answers, goldens)
    versions = [{answers[number].model for number in range(session, 160, 40)} for session in range(40)]
    assert all(len(each) == 1 for each in versions), "the header and the body's user name the same session"
    assert len(set().union(*versions)) == 2


@pytest.mark.parametrize("ending", ["promote", "roll_back"])
async def test_a_trial_ends_under_load_without_an_error_or_a_mixed_answer(stack: Stack, asker: Asker, name: str, ending: str) -> None:
    question, goldens = golden_of(asker, name)
    await start(stack, name, share=0.5, by="session")
    answers: list[Answer] = []
    async with asker.clients() as clients:
        async with load(clients[TENANT], name, question, answers):
            await until(lambda: len({answer.model for answer in answers}) == 2, 60, "both versions answer")
            await asyncio.to_thread(getattr(stack.admin, f"{ending}_canary"), name, TENANT)
            behind = len(answers)
            await until(lambda: len(answers) > behind + 32, 60, "answers come after the end")
        last = await ask(clients[TENANT], name, question, stream=False)
    check([*answers, last], goldens)
    assert last.model == f"{name}@{2 if ending == 'promote' else 1}"


@pytest.mark.parametrize(("template", "reason"), [(REFUSES, "refused by the engine"), (DAWDLES, "answers began later than")])
async def test_a_bad_trial_is_stopped_within_its_window_and_the_stable_version_never_suffers(
    stack: Stack, asker: Asker, name: str, tmp_path: Path, template: str, reason: str
) -> None:
    question, goldens = golden_of(asker, name)
    await start(stack, name, with_template(tmp_path, template), share=0.4, window_s=120.0, min_requests=20)
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def is_stopped() -> bool:
        return bool((await asyncio.to_thread(stack.admin.canary, name, TENANT)).stopped)

    async with asker.clients() as clients:
        async with load(clients[TENANT], name, question, answers):
            await until_async(is_stopped, 110, "the trial is stopped")
            trial = stack.admin.canary(name, TENANT)
            assert loop.time() - began_s < trial.stop.window_s
        later = await ask_all([ask(clients[TENANT], name, question, stream=False) for _ in range(20)])
    assert reason in trial.stopped
    check(later, goldens)
    assert {answer.model for answer in later} == {f"{name}@1"}
    check([answer for answer in answers if answer.model == f"{name}@1"], goldens)
    assert trial.stable.errors == trial.stable.refused == 0
