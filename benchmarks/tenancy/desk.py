"""Tenants' requests to one engine, in process: past router and bus, through the governor."""

import asyncio
import itertools
from collections.abc import MutableMapping
from typing import Any

import msgspec

from services.worker import request_policy
from services.worker.engine import Engine
from services.worker.governor import Attempt, Governor, current_attempt
from shared.contracts.inference import Handle


class Asked:
    """One request, with the loop's times."""

    def __init__(self, attempt: Attempt, started_s: float) -> None:
        self.attempt = attempt
        self.started_s = started_s
        self.token_s: list[float] = []
        self.failed = ""

    @property
    def ttft_ms(self) -> float:
        return (self.token_s[0] - self.started_s) * 1000.0

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1000.0 for before, after in itertools.pairwise(self.token_s)]


class Desk:
    """`tokens` counts what every tenant has got so far: prompts as they are read, output as it comes."""

    def __init__(self, engine: Engine, governor: Governor) -> None:
        self.engine = engine
        self.governor = governor
        self.tokens: dict[str, int] = {}
        self.open: dict[str, Asked] = {}  # by request id
        self._numbers = itertools.count()

    async def ask(
        self,
        tenant: str,
        prompt: str | list[int],
        max_tokens: int,
        *,
        samples: int = 1,
        keep: list[Asked] | None = None,
        adapter_id: str = "",
    ) -> Asked:
        """A streamed completion of exactly `max_tokens` a sample; `keep` gets it when it begins."""
        loop = asyncio.get_running_loop()
        handle = Handle(tenant_id=tenant, tenant=tenant, pool_id="main", base=self.engine.description.identity, adapter_id=adapter_id)
        attempt = Attempt(f"r{next(self._numbers)}", 1, "bench", handle, "/v1/completions")
        asked = Asked(attempt, loop.time())
        if keep is not None:
            keep.append(asked)
        body = {"prompt": prompt, "n": samples, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body |= {"temperature": 0 if samples == 1 else 0.7}  # greedy answers of one prompt would be the same
        prepared = request_policy.prepare(attempt.path, msgspec.json.encode(body), handle, adapter_id or self.engine.base_model_name)
        attempt.plan = prepared.plan
        bodies = [prepared.body]

        async def receive() -> MutableMapping[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            piece: bytes = message.get("body", b"")
            if message["type"] != "http.response.body" or not piece.startswith(b"data: {"):
                return
            if len(asked.token_s) < max_tokens * samples:
                if not asked.token_s:
                    self.tokens[tenant] = self.tokens.get(tenant, 0) + attempt.prompt_tokens
                asked.token_s.append(loop.time())
                self.tokens[tenant] = self.tokens.get(tenant, 0) + 1

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": attempt.path,
            "raw_path": attempt.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", attempt.request_id.encode())],
            "client": ("bench", 0),
            "server": ("worker", 0),
            "state": {},
        }
        current_attempt.set(attempt)
        self.governor.begin(attempt)
        self.open[attempt.request_id] = asked
        try:
            await self.engine.app(scope, receive, send)
        finally:
            self.governor.end(attempt)
            del self.open[attempt.request_id]
        if attempt.refusal is not None:
            asked.failed = attempt.refusal.code
        return asked

    async def keep_asking(self, tenant: str, outstanding: int, prompt: Any, max_tokens: int, spread: int = 0, samples: int = 1) -> None:
        """`outstanding` requests at all times, until cancelled. `prompt()` makes one; answers' lengths are spread evenly around
        `max_tokens`, up to `spread` away, so that requests that began together do not end together.
        """
        numbers = itertools.count()

        async def one() -> None:
            while True:
                away = (next(numbers) * 37) % (2 * spread + 1) - spread
                await self.ask(tenant, prompt(), max_tokens + away, samples=samples)

        async with asyncio.TaskGroup() as group:
            for _ in range(outstanding):
                group.create_task(one())
