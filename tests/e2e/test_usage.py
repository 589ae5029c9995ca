"""Usage on the real engine: what its answers say was used, for every way of asking, is what the registry sums up."""

import asyncio
import json
from typing import Any

import httpx

from shared.policy.usage_rollup import Amounts
from tests.e2e.stack import Stack, wait_for

CHAT = {"model": "lora_finance", "messages": [{"role": "user", "content": "What about refund?"}], "temperature": 0}
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, "max_tokens": 12}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 9, "n": 2, "temperature": 1.0}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"model": "lora_finance", "prompt": "What about", "max_tokens": 7}),
    ("/v1/completions", {"model": "lora_finance", "prompt": ["What", "about refund?"], "max_tokens": 5}),
    ("/v1/messages", {"model": "lora_finance", "messages": CHAT["messages"], "max_tokens": 11}),
]


def sums(stack: Stack) -> tuple[Amounts, dict[str, int]]:
    (row,) = stack.admin.usage("2026-01-01", tenant="finance").rows or [None]
    return (row.amounts, row.outcomes) if row is not None else (Amounts(), {})


async def told(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Prompt and output tokens, as the answer says."""
    headers = {"authorization": f"Bearer {stack.keys['finance']}"}
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client:
        answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        usage = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]["usage"]
    else:
        usage = answer.json()["usage"]
    if path == "/v1/messages":
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


async def test_what_the_engines_answers_say_was_used_is_what_is_billed(stack: Stack) -> None:
    before, ends = await asyncio.to_thread(sums, stack)
    prompt = output = 0
    for path, body in WAYS:
        more_prompt, more_output = await told(stack, path, body)
        prompt, output = prompt + more_prompt, output + more_output
    quiet = {**CHAT, "max_tokens": 8, "stream": True}
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=60) as client:
        headers = {"authorization": f"Bearer {stack.keys['finance']}"}
        assert '"usage":{' not in (await client.post("/v1/chat/completions", json=quiet, headers=headers)).text
        refused = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": -1}, headers=headers)
    assert refused.status_code == 400
    count = len(WAYS) + 1

    def counted() -> bool:
        amounts, outcomes = sums(stack)
        return outcomes.get("complete", 0) == ends.get("complete", 0) + count and amounts.attempts == before.attempts + count

    await asyncio.to_thread(wait_for, counted, 20, "all requests are counted")
    after, outcomes = await asyncio.to_thread(sums, stack)
    assert after.requests - before.requests == count + 1
    assert outcomes["error:invalid_request"] == ends.get("error:invalid_request", 0) + 1
    quiet_prompt, _ = await told(stack, *WAYS[0])  # the same prompt as the quiet stream's
    assert after.prompt_tokens - before.prompt_tokens == prompt + quiet_prompt
    assert output + 1 <= after.completion_tokens - before.completion_tokens <= output + 8
    assert after.gpu_us > before.gpu_us
    assert after.kv_byte_ms > before.kv_byte_ms
    assert after.first_tokens - before.first_tokens == count


async def test_adapters_residency_is_counted_while_they_are_mounted(stack: Stack) -> None:
    def held() -> int:
        amounts, _ = sums(stack)
        return amounts.adapter_byte_ms

    await asyncio.to_thread(wait_for, held, 90, "a checkpoint of residency")


async def test_engines_account_for_their_time(stack: Stack) -> None:
    rows = (await asyncio.to_thread(stack.admin.engines_time, "2026-01-01")).rows
    assert {row.worker_id for row in rows} >= {"w0"}
    for row in rows:
        assert row.wall_us == row.busy_us + row.idle_us + sum(row.overhead_us.values()) + row.unaccounted_us
