"""Asking the stack as its users do: the `openai` client, one key per tenant, streaming and not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.e2e.stack import Stack, goldens

TENANT_OF = {"lora_sales": "sales", "lora_cs": "cs", "lora_finance": "finance", "base": "sales"}
BASE_MODEL = "qwen3-moe-demo"


@dataclass
class Answer:
    """One answer as the client saw it. `finished`: a finish reason came, so the client takes it as whole."""

    text: str = ""
    model: str = ""
    finished: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def digest(self) -> str:
        return self.headers.get("x-tenantry-digest", "")


class Asker:
    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.goldens = goldens()
        self.mixed = [(name, pair) for name, pairs in self.goldens.items() for pair in pairs]

    def client(self, tenant: str) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=400), timeout=120)
        return openai.AsyncOpenAI(base_url=f"{self.stack.url}/v1", api_key=self.stack.keys[tenant], max_retries=0, http_client=http)

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[dict[str, openai.AsyncOpenAI]]:
        made = {tenant: self.client(tenant) for tenant in self.stack.keys}
        try:
            yield made
        finally:
            for client in made.values():
                await client.close()

    def long_question(self, name: str) -> tuple[str, str]:
        """The question whose golden answer is the longest of this adapter."""
        pair = max(self.goldens[name], key=lambda pair: len(pair["answer"]))
        return pair["question"], pair["answer"]


def model_of(name: str) -> str:
    return BASE_MODEL if name == "base" else name


async def ask(client: openai.AsyncOpenAI, model: str, question: str, *, stream: bool, max_tokens: int = 400, **more: Any) -> Answer:
    """Never raises an API error: it stands in the answer."""
    messages: Sequence[Any] = [{"role": "user", "content": question}]
    answer = Answer()
    try:
        if not stream:
            raw = await client.chat.completions.with_raw_response.create(
                model=model, messages=messages, temperature=0, max_tokens=max_tokens, **more
            )
            parsed = raw.parse()
            answer.headers = dict(raw.headers)
            answer.model = parsed.model
            answer.text = parsed.choices[0].message.content or ""
            answer.finished = parsed.choices[0].finish_reason
            return answer
        opened = await client.chat.completions.with_raw_response.create(
            model=model, messages=messages, temperature=0, max_tokens=max_tokens, stream=True, **more
        )
        answer.headers = dict(opened.headers)
        async for chunk in opened.parse():
            answer.model = chunk.model
            for choice in chunk.choices:
                answer.text += choice.delta.content or ""
                answer.finished = choice.finish_reason or answer.finished
    except (openai.APIError, httpx.HTTPError) as error:
        answer.error = error
    return answer


async def ask_all(jobs: Sequence[Any]) -> list[Answer]:
    """Runs the coroutines side by side, answers in order."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
    return [task.result() for task in tasks]
