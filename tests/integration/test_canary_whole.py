"""Trials on the whole of Tenantry as real processes, with the scripted engine: what it answers proves which version answered.

A version whose chat template says so fails or is slow in every answer.
"""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.client import Client, ClientError
from shared.contracts.admin import CanaryView
from tests.e2e.stack import DEMO, Stack, running
from tests.waiting import until_async

PROMPT = "what do you say"
NAME, TENANT = "tone", "sales"
AT_ONCE = 24


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(Stack(tmp_path_factory.mktemp("canary"), engine="scripted", max_loras=4, workers=2)) as started:
        started.allow_label()
        started.add_tenant(TENANT, upgrade_headroom_mb=1200)
        started.admin.upload(TENANT, NAME, DEMO / "adapters" / "lora_sales")
        yield started


class Answer:
    def __init__(self, status: int, model: str, text: str, headers: httpx.Headers) -> None:
        self.status = status
        self.model = model
        self.text = text
        self.version = headers.get("x-tenantry-adapter", "")


class Asker:
    """Asks as the tenant; knows which text is which version's."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self.stack = stack
        self.client = client
        self.texts: dict[str, str] = {}

    async def ask(self, model: str = NAME, *, stream: bool = False, session: str = "") -> Answer:
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "stream": stream}
        headers = {"authorization": f"Bearer {self.stack.keys[TENANT]}"} | ({"x-tenantry-session": session} if session else {})
        try:
            response = await self.client.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.RemoteProtocolError:  # a stream that breaks off
            return Answer(0, "", "", httpx.Headers())
        if response.status_code != 200:
            return Answer(response.status_code, "", response.text, response.headers)
        if not stream:
            whole = response.json()
            return Answer(200, whole["model"], whole["choices"][0]["message"]["content"], response.headers)
        events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
        chunks = [httpx.Response(200, text=event).json() for event in events]
        text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
        ended = response.text.rstrip().endswith("[DONE]")
        return Answer(200 if ended else 0, chunks[0]["model"], text, response.headers)

    async def learn(self, *versions: int) -> None:
        """The text of each version, asked for by name."""
        for version in versions:
            answer = await self.ask(f"{NAME}@{version}")
            assert answer.status == 200, answer.text
            self.texts[f"{NAME}@{version}"] = answer.text
        assert len(set(self.texts.values())) == len(self.texts), "the versions answer differently"

    def check(self, answers: list[Answer]) -> None:
        """None failed, and each is what its version says."""
        assert [answer.status for answer in answers] == [200] * len(answers)
        wrong = [answer for answer in answers if not (answer.text == self.texts[answer.version] and answer.model == answer.version)]
        assert wrong == []

    async def many(self, count: int, *, sessions: int = 0) -> list[Answer]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Answer:
            async with turns:
                return await self.ask(stream=number % 3 == 0, session=f"s{number % sessions}" if sessions else "")

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(count)]
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def load(self, answers: list[Answer]) -> AsyncIterator[None]:
        """Requests run all the while, streamed and not; none is cut off at the end."""
        over = asyncio.Event()

        async def keep_asking(number: int) -> None:
            while not over.is_set():
                answers.append(await self.ask(stream=number % 2 == 0))

        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE // 2):
                group.create_task(keep_asking(number))
            try:
                yield
            finally:
                over.set()


@pytest.fixture
async def asker(stack: Stack) -> AsyncIterator[Asker]:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client:
        yield Asker(stack, client)


def folder(tmp_path: Path, source: str, template: str = "") -> Path:
    """A demo adapter's files, or with a chat template of its own."""
    made = tmp_path / f"{source}{len(template)}"
    shutil.copytree(DEMO / "adapters" / source, made)
    if template:
        (made / "chat_template.jinja").write_text(template)
    return made


@asynccontextmanager
async def on_trial(stack: Stack, path: Path, **terms: Any) -> AsyncIterator[int]:
    """Its version; rolled back at the end if the test has not ended it."""
    view = await asyncio.to_thread(stack.admin.start_canary, TENANT, NAME, path, **terms)
    assert (view.state, view.serving, view.on_trial) == ("ready", False, True)
    try:
        yield view.version
    finally:
        for trial in stack.admin.canaries(TENANT):
            stack.admin.roll_back_canary(trial.name, TENANT)
        await gone(stack, view.version)


async def gone(stack: Stack, version: int) -> None:
    async def is_gone() -> bool:
        return stack.admin.show(NAME, TENANT, version=version).state == "unloaded"

    await until_async(is_gone, timeout_s=30, what=f"version {version} is unloaded")


def serving(stack: Stack) -> int:
    return stack.admin.show(NAME, TENANT).version


async def test_a_tenth_of_a_thousand_requests_go_on_trial_and_every_answer_is_its_versions(
    stack: Stack, asker: Asker, tmp_path: Path
) -> None:
    stable = serving(stack)
    async with on_trial(stack, folder(tmp_path, "lora_cs"), share=0.1) as version:
        await asker.learn(stable, version)
        answers = await asker.many(1000)
        asker.check(answers)
        got = sum(answer.version == f"{NAME}@{version}" for answer in answers)
        assert abs(got - 100) <= 4 * math.sqrt(1000 * 0.1 * 0.9)


async def test_sessions_stay_with_their_version_and_a_larger_share_moves_none_back(stack: Stack, asker: Asker, tmp_path: Path) -> None:
    stable = serving(stack)

    async def places() -> dict[int, set[str]]:
        answers = await asker.many(300, sessions=60)
        asker.check(answers)
        return {session: {answers[number].version for number in range(session, 300, 60)} for session in range(60)}

    async with on_trial(stack, folder(tmp_path, "lora_cs"), share=0.2, by="session") as version:
        await asker.learn(stable, version)
        before = await places()
        assert all(len(versions) == 1 for versions in before.values())
        changed = await asyncio.to_thread(stack.admin.change_canary, NAME, TENANT, share=0.5)
        assert changed.share_ppm == 500_000

        async def is_known() -> bool:
            return len({answer.version for answer in await asker.many(60, sessions=60)}) > 1 and len(moved(before, await places())) > 0

        def moved(one: dict[int, set[str]], other: dict[int, set[str]]) -> list[int]:
            return [session for session in one if one[session] != other[session]]

        await until_async(is_known, timeout_s=30, what="the router knows the larger share")
        after = await places()
        trial = {f"{NAME}@{version}"}
        assert all(after[session] == trial for session, versions in before.items() if versions == trial)


@pytest.mark.parametrize(("template", "reason"), [("[[fail]]", "requests failed"), ("[[slow]]", "answers began later than")])
async def test_a_bad_trial_is_stopped_by_itself_within_its_window_and_the_stable_version_never_suffers(
    stack: Stack, asker: Asker, tmp_path: Path, template: str, reason: str
) -> None:
    stable = serving(stack)
    await asker.learn(stable)
    answers: list[Answer] = []
    loop = asyncio.get_running_loop()
    async with on_trial(stack, folder(tmp_path, "lora_cs", template), share=0.3, window_s=60.0, min_requests=20) as version:
        began_s = loop.time()
        async with asker.load(answers):
            stopped = await stops(stack)
            took_s = loop.time() - began_s
        assert reason in stopped.stopped
        assert took_s < stopped.stop.window_s
        later = await asker.many(60)
        asker.check(later)
        assert {answer.version for answer in later} == {f"{NAME}@{stable}"}
        of_stable = [answer for answer in answers if answer.version == f"{NAME}@{stable}"]
        asker.check(of_stable)
        assert len(of_stable) > 20
        if template == "[[fail]]":
            assert any(answer.status == 500 for answer in answers)
            assert {answer.version for answer in answers if answer.status not in (200, 500)} <= {"", f"{NAME}@{version}"}


@pytest.mark.parametrize("ending", ["promote", "roll_back"])
async def test_a_trial_ends_under_load_without_an_error_or_a_mixed_answer(stack: Stack, asker: Asker, tmp_path: Path, ending: str) -> None:
    stable = serving(stack)
    answers: list[Answer] = []
    async with on_trial(stack, folder(tmp_path, "lora_finance" if ending == "promote" else "lora_cs"), share=0.5) as version:
        await asker.learn(stable, version)
        async with asker.load(answers):
            await until_async(lambda: _both(answers), timeout_s=30, what="both versions answer")
            await asyncio.to_thread(getattr(stack.admin, f"{ending}_canary"), NAME, TENANT, version=version)
            await gone(stack, stable if ending == "promote" else version)
            behind = len(answers)
            await until_async(lambda: _more(answers, behind + 3 * AT_ONCE), timeout_s=30, what="answers after the end")
        asker.check(answers)
        left = f"{NAME}@{version if ending == 'promote' else stable}"
        assert {answer.version for answer in answers[behind + AT_ONCE :]} == {left}
        assert serving(stack) == int(left.partition("@")[2])
        if ending == "promote":
            back = await asyncio.to_thread(stack.admin.start_canary, TENANT, NAME, version=stable)
            assert back.on_trial, "the version that served before can itself go on trial"
            stack.admin.promote_canary(NAME, TENANT)
            await gone(stack, version)


async def stops(stack: Stack) -> CanaryView:
    found: list[CanaryView] = []

    async def is_stopped() -> bool:
        try:
            found[:] = await asyncio.to_thread(stack.admin.canaries, TENANT)
        except ClientError:  # the registry is away
            return False
        return bool(found[0].stopped)

    await until_async(is_stopped, timeout_s=60, what="the trial is stopped")
    return found[0]


async def test_a_trial_whose_worker_is_killed_is_stopped_and_the_stable_version_serves_on(
    stack: Stack, asker: Asker, tmp_path: Path
) -> None:
    stable = serving(stack)
    answers: list[Answer] = []
    async with on_trial(stack, folder(tmp_path, "lora_cs"), share=0.5) as version:
        await asker.learn(stable, version)
        homes = {view.version: view.worker_id for view in stack.admin.adapters(TENANT)}
        assert homes[stable] != homes[version], "each on a worker of its own"
        worker = next(each for each in stack.workers if each.env["TENANTRY_WORKER_WORKER_ID"] == homes[version])
        async with asker.load(answers):
            await until_async(lambda: _both(answers), timeout_s=30, what="both versions answer")
            worker.kill()
            assert "requests failed" in (await stops(stack)).stopped
        asker.check([answer for answer in answers if answer.version == f"{NAME}@{stable}"])
        later = await asker.many(40)
        asker.check(later)
        assert {answer.version for answer in later} == {f"{NAME}@{stable}"}
        worker.start()
        await asyncio.to_thread(stack.wait_ready)

        async def is_back() -> bool:
            return stack.admin.show(NAME, TENANT, version=version).state == "ready"

        await until_async(is_back, timeout_s=60, what="the version on trial is loaded again")
        (trial,) = stack.admin.canaries(TENANT)
        assert trial.stopped, "it runs again when somebody says so"
        stack.admin.change_canary(NAME, TENANT, resume=True)
        await until_async(lambda: _answered_by(asker, version), timeout_s=30, what="the trial answers again")


async def _answered_by(asker: Asker, version: int) -> bool:
    return any(answer.version == f"{NAME}@{version}" for answer in await asker.many(10))


async def test_a_registry_that_dies_in_a_trial_and_comes_back_stops_it(stack: Stack, asker: Asker, tmp_path: Path) -> None:
    stable = serving(stack)
    await asker.learn(stable)
    answers: list[Answer] = []
    async with on_trial(stack, folder(tmp_path, "lora_cs", "[[fail]]"), share=0.2, min_requests=100):
        async with asker.load(answers):
            await until_async(lambda: _more(answers, 60), timeout_s=30, what="requests run")
            stack.registry.kill()
            stack.registry.start()
            assert "requests failed" in (await stops(stack)).stopped
        asker.check([answer for answer in answers if answer.version == f"{NAME}@{stable}"])


async def test_what_was_done_to_trials_is_in_the_audit(stack: Stack, asker: Asker, tmp_path: Path) -> None:
    async with on_trial(stack, folder(tmp_path, "lora_cs", "[[fail]]"), share=0.5) as version:
        answers: list[Answer] = []
        async with asker.load(answers):
            reason = (await stops(stack)).stopped
    key = stack.admin.add_key(TENANT, scopes=("adapters", "admin"))
    with Client(stack.url, key.secret) as team:
        view = team.start_canary(TENANT, NAME, version=version)
        assert view.on_trial, "a team tries its own versions by itself"
        team.roll_back_canary(NAME, TENANT)
        await gone(stack, version)
        own = [line.record for line in team.audit(TENANT, own=True, limit=1000).lines]
        with pytest.raises(ClientError) as refused:
            team.audit()
        assert refused.value.status == 401
    by_team = [(each.action, each.phase, each.address) for each in own if each.who == f"key {key.prefix}"]
    assert by_team == [("add_adapter", "done", "127.0.0.1"), ("roll_back_canary", "done", "127.0.0.1")]
    stopped = [each.note for each in own if each.action == "canary.stopped" and each.what["version"] == version]
    assert stopped.count(f"trial stopped: {reason}") == 1
    whole = [line.record for line in stack.admin.audit(TENANT, action="roll_back_canary", limit=1000).lines]
    assert {each.who for each in whole} >= {"operator", f"key {key.prefix}"}
    assert {each.address for each in whole} == {"127.0.0.1"}


async def _both(answers: list[Answer]) -> bool:
    return len({answer.version for answer in answers}) > 1


async def _more(answers: list[Answer], count: int) -> bool:
    return len(answers) >= count
