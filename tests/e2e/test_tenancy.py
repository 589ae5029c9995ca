"""Tenants' limits through the public API: refusals with their own status and body, queues that show, a flood that stays its tenant's own.

All services as processes; the scripted engine, so that what is waited for is known.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from services.cli.client import ClientError
from services.worker.scripted_engine import KV_BLOCK_BYTES
from tests.e2e.ask import BASE_MODEL
from tests.e2e.stack import DEMO, Stack, running, wait_for

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
LIMITS: dict[str, dict[str, Any]] = {
    "small": {"kv_quota_bytes": 10 * KV_BLOCK_BYTES},
    "single": {"max_concurrent": 1, "queue_limit": 1, "queue_deadline_s": 30.0},
    "hasty": {"max_concurrent": 1, "queue_deadline_s": 0.3},
    "closed": {"max_concurrent": 0},
    "noisy": {"queue_limit": 150},
    "quiet": {},
    "cold": {"host_cache_bytes": 1},
    "bare": {"artifact_bytes": 1},
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"TENANTRY_WORKER_SCRIPTED_TOKENS_PER_S": "50", "TENANTRY_WORKER_MAX_NUM_SEQS": "8"}
    with running(Stack(tmp_path_factory.mktemp("limited"), engine="scripted", **settings)) as stack:
        for tenant, limits in LIMITS.items():
            stack.add_tenant(tenant, quota_mb=100, limits=limits)
        yield stack


def client(stack: Stack, tenant: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {stack.keys[tenant]}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, trust_env=False, timeout=60, limits=httpx.Limits(max_connections=400))


def chat(tokens: int, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    return {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": stream, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(400)),
        (CHAT, chat(60, n=4)),
        (COMPLETIONS, {"model": BASE_MODEL, "prompt": ["one", "two", "three", "four"], "max_tokens": 60}),
        (COMPLETIONS, {"model": BASE_MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 60}),
    ],
)
async def test_more_kv_cache_than_the_quota_is_a_429_of_its_own_for_streams_too(
    limited: Stack, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with client(limited, "small") as http:
        answer = await http.post(path, json={**body, "stream": stream})
        assert (answer.status_code, answer.headers["content-type"]) == (429, "application/json")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("kv_quota_exceeded", "rate_limit_error")
        assert error["asked_bytes"] > error["limit_bytes"] == 10 * KV_BLOCK_BYTES
        assert error["held_bytes"] == 0
        fits = await http.post(CHAT, json=chat(60, stream=stream))
        assert (fits.status_code, fits.headers["x-tenantry-queue-ms"]) == (200, "0")


@pytest.mark.parametrize("inputs", [["one"] * 11, "word " * 900])
async def test_an_embedding_over_the_quota_is_a_429_of_its_own(limited: Stack, inputs: Any) -> None:
    async with client(limited, "small") as http:
        answer = await http.post(EMBEDDINGS, json={"model": BASE_MODEL, "input": inputs})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (429, "kv_quota_exceeded")
        assert error["asked_bytes"] > error["limit_bytes"] == 10 * KV_BLOCK_BYTES
        fits = await http.post(EMBEDDINGS, json={"model": BASE_MODEL, "input": ["one"] * 10})
        assert (fits.status_code, fits.headers["x-tenantry-queue-ms"], len(fits.json()["data"])) == (200, "0", 10)
    async with client(limited, "closed") as http:
        answer = await http.post(EMBEDDINGS, json={"model": BASE_MODEL, "input": "one"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "concurrency_exceeded")


@pytest.mark.parametrize(("tenant", "code"), [("cold", "host_cache_exceeded"), ("bare", "artifact_quota_exceeded")])
def test_an_adapter_that_a_worker_may_not_keep_or_nobody_may_store_is_a_409_with_the_figures(
    limited: Stack, tenant: str, code: str
) -> None:
    with pytest.raises(ClientError) as refused:
        limited.admin.upload(tenant, "tone", DEMO / "adapters" / "lora_sales", base=limited.base_identity())
    assert (refused.value.status, refused.value.peer_code) == (409, code)
    figures = refused.value.fields
    assert figures["asked_bytes"] > figures["limit_bytes"] == 1
    assert figures["held_bytes"] == 0


async def test_the_second_of_one_at_a_time_waits_and_says_so_and_the_third_finds_the_queue_full(limited: Stack) -> None:
    async with client(limited, "single") as http, asyncio.TaskGroup() as group:
        first = group.create_task(http.post(CHAT, json=chat(250)))
        await asyncio.to_thread(wait_for, lambda: _use(limited, "single").get("running") == 1, 10, "a running request")
        second = group.create_task(http.post(CHAT, json=chat(1, stream=True)))
        await asyncio.to_thread(wait_for, lambda: _use(limited, "single").get("waiting") == 1 or second.done(), 10, "a waiting request")
        third = await http.post(CHAT, json=chat(1, stream=True))
        assert (third.status_code, third.json()["error"]["code"]) == (429, "queue_full")
        assert int(third.headers["retry-after"]) >= 1
        assert (await first).headers["x-tenantry-queue-ms"] == "0"
        waited = await second
        assert waited.status_code == 200
        assert int(waited.headers["x-tenantry-queue-ms"]) > 0


async def test_a_wait_beyond_the_tenants_deadline_is_a_429_that_says_what_was_waited_for(limited: Stack) -> None:
    async with client(limited, "hasty") as http, asyncio.TaskGroup() as group:
        first = group.create_task(http.post(CHAT, json=chat(200)))
        await asyncio.to_thread(wait_for, lambda: _use(limited, "hasty").get("running") == 1, 10, "a running request")
        late = await http.post(CHAT, json=chat(1, stream=True))
        assert late.status_code == 429
        error = late.json()["error"]
        assert (error["code"], error["waited_for"], error["limit"]) == ("queue_timeout", "concurrent", 1)
        assert int(late.headers["retry-after"]) >= 1
        assert (await first).status_code == 200


async def test_a_tenant_that_may_run_nothing_is_told_so(limited: Stack) -> None:
    async with client(limited, "closed") as http:
        answer = await http.post(CHAT, json=chat(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "concurrency_exceeded")


async def test_a_flood_waits_and_is_refused_in_its_own_queue_while_a_quiet_tenant_is_served_at_once(limited: Stack) -> None:
    async with client(limited, "noisy") as noisy, client(limited, "quiet") as quiet, asyncio.TaskGroup() as group:
        flood = [group.create_task(noisy.post(CHAT, json=chat(20))) for _ in range(200)]
        await asyncio.to_thread(wait_for, lambda: _use(limited, "noisy").get("waiting", 0) > 100, 20, "a flood that waits")
        for _ in range(5):
            answer = await quiet.post(CHAT, json=chat(2))
            assert (answer.status_code, answer.headers["x-tenantry-queue-ms"]) == (200, "0")
        answers = [await one for one in flood]
    served = [one for one in answers if one.status_code == 200]
    refused = [one.json()["error"]["code"] for one in answers if one.status_code != 200]
    assert len(served) >= 100
    assert set(refused) <= {"queue_full", "queue_timeout"}
    assert max(int(one.headers["x-tenantry-queue-ms"]) for one in served) > 0
    await asyncio.to_thread(wait_for, lambda: not _use(limited, "noisy"), 10, "an empty report")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 10**40}, "max_tokens"), ({"n": 0}, "n"), ({"n": 10**9}, "n")],
)
async def test_absurd_values_are_a_400_that_names_the_field(limited: Stack, fields: dict[str, Any], param: str) -> None:
    async with client(limited, "quiet") as http:
        answer = await http.post(CHAT, json=chat(5) | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def _use(stack: Stack, tenant: str) -> dict[str, Any]:
    """What the worker's last report says of the tenant; empty: nothing."""
    uses = [use for report in stack.reports() for use in report["tenants"]]
    return next((use for use in uses if use["tenant_id"] == stack.tenant_ids[tenant]), {})
