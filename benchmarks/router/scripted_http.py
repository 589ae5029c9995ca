"""The scripted engine's application served over HTTP by uvicorn: what the peers and `direct` call instead of the bus.

`intrinsic` serves nothing: it drives the same application in process with a send that does nothing, and prints the CPU it
costs per paced token by itself, which is no gateway's doing.
"""

import argparse
import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

import msgspec
import uvicorn
import uvloop
from ulid import ULID

from benchmarks.router.canned import MODEL
from services.worker.engine import AsgiApp, Receive, Scope, Send
from services.worker.governor import Attempt, Governor, current_attempt
from services.worker.scripted_engine import ScriptedEngine, ScriptedSettings
from shared.contracts.inference import Handle

_PLAIN = {
    "/health": b"{}",
    "/v1/models": msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}),
}


class Governed:
    """Gives the application what a worker gives it: an attempt that the governor counts."""

    def __init__(self, app: AsgiApp, governor: Governor, base: str) -> None:
        self._app = app
        self._governor = governor
        self._handle = Handle(tenant_id="t_bench", tenant="bench", pool_id="main", base=base)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path in _PLAIN:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": _PLAIN[path]})
            return
        attempt = Attempt(str(ULID()), 1, "bench", self._handle, path)
        current_attempt.set(attempt)
        self._governor.begin(attempt)
        try:
            await self._app(scope, receive, send)
        finally:
            self._governor.end(attempt)


async def started(tokens_per_s: float) -> Governed:
    governor = Governor()
    engine = ScriptedEngine(ScriptedSettings(label=MODEL, tokens_per_s=tokens_per_s, concurrency=256), governor)
    await engine.start()
    return Governed(engine.app, governor, engine.description.identity)


async def serve(port: int, tokens_per_s: float) -> None:
    app: Any = await started(tokens_per_s)
    config = uvicorn.Config(app, port=port, lifespan="off", access_log=False, log_level="warning")
    await uvicorn.Server(config).serve()


async def intrinsic(streams: int, tokens: int, tokens_per_s: float) -> float:
    """Microseconds of CPU per token."""
    app = await started(tokens_per_s)

    async def run(count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(_one(app, count))

    await run(8)
    before_s = time.process_time()
    await run(tokens)
    return (time.process_time() - before_s) / (streams * tokens) * 1e6


async def _one(app: Governed, tokens: int) -> None:
    body = msgspec.json.encode({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True})
    asked = False

    async def receive() -> MutableMapping[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(_: MutableMapping[str, Any]) -> None:
        return

    await app({"type": "http", "path": "/v1/chat/completions"}, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["serve", "intrinsic"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-s", type=float, default=0.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    if args.what == "serve":
        uvloop.run(serve(args.port, args.tokens_per_s))
    else:
        print(uvloop.run(intrinsic(args.streams, args.tokens, args.tokens_per_s)))


if __name__ == "__main__":
    main()
