"""Calls an engine's application as the worker does: body through the request policy, attempt in the context, names made public."""

import asyncio
import json
from pathlib import Path
from typing import Any

from services.worker import request_policy
from services.worker.engine import Engine
from services.worker.governor import Attempt, Governor, current_attempt
from shared.contracts.inference import Handle

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
GOLDEN: dict[str, list[dict[str, str]]] = json.loads((DEMO / "golden.json").read_text())
CHAT = "/v1/chat/completions"


class Answer:
    """`raw` is as the engine's application sent it, `pieces` as a client would get them."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.status = 0
        self.raw: list[bytes] = []
        self.pieces: list[bytes] = []
        self.raised: Exception | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events, without [DONE]."""
        lines = [line[5:].strip() for line in self.body.decode().splitlines() if line.startswith("data:")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        """A chat answer's text, streamed or not."""
        if self.body.startswith(b"{"):
            return self.json["choices"][0]["message"]["content"]
        return "".join(choice["delta"].get("content") or "" for event in self.events for choice in event["choices"])


class Desk:
    def __init__(self, engine: Engine, governor: Governor) -> None:
        self.engine = engine
        self.governor = governor
        self._asked = 0

    def handle(self, adapter: str = "", tenant: str = "sales") -> Handle:
        """Of a demo adapter by its name, or the base."""
        return Handle(
            tenant_id=f"tn_{tenant}",
            tenant=tenant,
            pool_id="main",
            base=self.engine.description.identity,
            adapter_id=internal_name(adapter) if adapter else "",
            alias=adapter,
            version=1 if adapter else 0,
            digest="sha256:" + "0" * 64 if adapter else "",
        )

    async def ask(
        self,
        path: str,
        body: dict[str, Any],
        handle: Handle,
        *,
        engine_model: str = "",
        gone: asyncio.Event | None = None,
        into: list[Answer] | None = None,
    ) -> Answer:
        """`engine_model` forces another model than the handle's; `gone` is the client's going away; `into` gets the answer early."""
        self._asked += 1
        attempt = Attempt(f"r{self._asked}", 0, "router", handle, path)
        answer = Answer(attempt)
        if into is not None:
            into.append(answer)
        model = handle.adapter_id or self.engine.base_model_name
        prepared = request_policy.prepare(path, json.dumps(body).encode(), handle, engine_model or model)
        attempt.plan = prepared.plan
        pending: list[bytes] = [prepared.body]

        async def receive() -> dict[str, Any]:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
            elif message.get("body"):
                answer.raw.append(message["body"])
                answer.pieces.append(request_policy.publicise(message["body"], model, handle.public_model))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", f"{attempt.request_id}-0".encode())],
            "client": ("bus", 0),
            "server": ("worker", 0),
            "state": {},
        }
        self.governor.begin(attempt)
        token = current_attempt.set(attempt)
        try:
            await self.engine.app(scope, receive, send)
        except Exception as error:
            answer.raised = error
        finally:
            current_attempt.reset(token)
            self.governor.end(attempt)
        return answer

    async def chat(self, question: str, adapter: str = "", tenant: str = "sales", **fields: Any) -> Answer:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 600, **fields}
        return await self.ask(CHAT, body, self.handle(adapter, tenant))


def internal_name(adapter: str) -> str:
    return f"ad_internal{adapter.replace('_', '')}name"
