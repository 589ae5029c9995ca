"""Usage through whole processes (scripted engine): what clients got is what is billed, whoever is killed in between."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.contracts.usage_query import UsageReply, UsageRow
from shared.policy.usage_rollup import Amounts, plus
from tests.e2e.stack import DEMO, Stack, running, wait_for

BODY = {"model": "lora_sales", "messages": [{"role": "user", "content": "What about refund?"}]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"TENANTRY_WORKER_SCRIPTED_TOKENS_PER_S": "40", "TENANTRY_WORKER_LABEL": "qwen3-moe-demo"}
    with running(Stack(tmp_path_factory.mktemp("usage"), engine="scripted", max_loras=4, **settings)) as started:
        started.allow_label()
        for tenant in ("sales", "cs"):
            started.add_tenant(tenant)
            started.admin.upload(tenant, f"lora_{tenant}", DEMO / "adapters" / f"lora_{tenant}")
        yield started


def headers(stack: Stack, tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {stack.keys[tenant]}", "x-request-id": "always-the-same"}


async def post(stack: Stack, tenant: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client:
        return await client.post(path, json=body, headers=headers(stack, tenant))


def usage_of(stack: Stack, tenant: str) -> tuple[Amounts, dict[str, int]]:
    reply: UsageReply = stack.admin.usage("2026-01-01", tenant=tenant, group_by=("adapter",))
    amounts, outcomes = Amounts(), dict[str, int]()
    for row in reply.rows:
        amounts = plus(amounts, row.amounts)
        for name, count in row.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    return amounts, outcomes


def row_of(stack: Stack, tenant: str, alias: str) -> UsageRow:
    rows = stack.admin.usage("2026-01-01", tenant=tenant, group_by=("version",)).rows
    return next(row for row in rows if row.alias == alias)


async def test_what_answers_say_was_used_is_what_is_billed(stack: Stack) -> None:
    answers: list[httpx.Response] = []
    for number in range(12):
        body = {**BODY, "max_tokens": 5 + number, **({"n": 2} if number % 3 == 0 else {})}
        answers.append(await post(stack, "sales", body))
    refused = await post(stack, "sales", {**BODY, "model": "nothing"})
    assert refused.status_code == 404
    told = [answer.json()["usage"] for answer in answers]

    def counted() -> bool:
        amounts, outcomes = usage_of(stack, "sales")
        return outcomes.get("complete", 0) == 12 and amounts.attempts == 12

    await asyncio.to_thread(wait_for, counted, 20, "all requests are counted")
    amounts, outcomes = await asyncio.to_thread(usage_of, stack, "sales")
    assert outcomes == {"complete": 12, "error:adapter_not_found": 1}
    assert amounts.requests == 13
    assert amounts.completion_tokens == sum(usage["completion_tokens"] for usage in told)
    assert amounts.prompt_tokens == sum(usage["prompt_tokens"] for usage in told)
    row = await asyncio.to_thread(row_of, stack, "sales", "lora_sales")
    assert (row.version, row.tenant, row.digest) == (1, "sales", answers[0].headers["x-tenantry-digest"])
    assert row.base == answers[0].headers["x-tenantry-base"]


async def test_a_client_that_goes_away_pays_for_what_was_made(stack: Stack) -> None:
    before, _ = await asyncio.to_thread(usage_of, stack, "cs")
    body = {**BODY, "model": "lora_cs", "max_tokens": 400, "stream": True}
    pieces = 0
    async with (
        httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body, headers=headers(stack, "cs")) as answer,
    ):
        async for line in answer.aiter_lines():
            pieces += line.startswith("data: ")
            if pieces == 20:
                break

    def counted() -> bool:
        amounts, outcomes = usage_of(stack, "cs")
        return outcomes.get("client_gone", 0) == 1 and amounts.attempts == before.attempts + 1

    await asyncio.to_thread(wait_for, counted, 20, "the request that was left is counted")
    after, _ = await asyncio.to_thread(usage_of, stack, "cs")
    assert 18 <= after.completion_tokens - before.completion_tokens < 400
    assert after.partial == before.partial


async def test_a_killed_registry_reads_on_and_answers_the_same(stack: Stack) -> None:
    before = await asyncio.to_thread(usage_of, stack, "sales")
    stack.registry.kill()
    answer = await post(stack, "sales", {**BODY, "max_tokens": 5})
    assert answer.status_code == 200
    stack.registry.start()

    def counted() -> bool:
        try:
            _, outcomes = usage_of(stack, "sales")
        except Exception:
            return False
        return outcomes.get("complete", 0) == before[1]["complete"] + 1

    await asyncio.to_thread(wait_for, counted, 40, "the next registry has read everything")
    after = await asyncio.to_thread(usage_of, stack, "sales")
    assert after[0].completion_tokens == before[0].completion_tokens + answer.json()["usage"]["completion_tokens"]


async def test_requests_of_a_killed_worker_are_billed_from_their_last_checkpoint_and_marked_partial(stack: Stack) -> None:
    before, _ = await asyncio.to_thread(usage_of, stack, "sales")
    body = {**BODY, "max_tokens": 800, "stream": True}
    pieces = [0, 0, 0]

    async def read(at: int) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):  # cut openly
            async with (
                httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client,
                client.stream("POST", "/v1/chat/completions", json=body, headers=headers(stack, "sales")) as answer,
            ):
                async for line in answer.aiter_lines():
                    pieces[at] += line.startswith("data: {") and "error" not in line

    async with asyncio.TaskGroup() as group:
        for at in range(3):
            group.create_task(read(at))
        async with asyncio.timeout(30):
            while min(pieces) < 100:  # 2.5 s: two checkpoints at least
                await asyncio.sleep(0.02)
        stack.worker.kill()
    stack.worker.start()
    await asyncio.to_thread(stack.wait_ready)

    def closed() -> bool:
        return usage_of(stack, "sales")[0].partial == before.partial + 3

    await asyncio.to_thread(wait_for, closed, 60, "the lost engine's requests are closed")
    after, outcomes = await asyncio.to_thread(usage_of, stack, "sales")
    billed = after.completion_tokens - before.completion_tokens
    assert sum(pieces) - 3 <= billed <= sum(pieces) + 3 * 40
    assert after.attempts == before.attempts + 3
    assert outcomes["error:worker_lost"] == 3
    again = await post(stack, "sales", {**BODY, "max_tokens": 5})
    assert again.status_code == 200
