"""`python -m benchmarks.serving.http_load HOST PORT KEY`: batches of streamed completions over HTTP, in a process of its own.

A line of its input is a batch: {"models": [...], "prompts": [[token ids], ...], "output_tokens": N}, all sent at once or, with
"arrivals": [seconds, ...], each at its own time; a line of its output are the streams of it. Raw sockets, kept alive.
"""

import asyncio
import json
import sys
import time
from typing import Any

import msgspec

from benchmarks.serving.figures import Stream

_ANSWER_LIMIT_S = 120.0
_TOKEN = b"w"  # every token of the generated tokenizer is one word that begins with it


class Connection:
    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = (host, port)
        self._key = key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def completion(self, model: str, prompt: list[int], output_tokens: int, sent_s: float) -> Stream:
        """:raises AssertionError: not 200, or another number of tokens than asked."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._key}\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise AssertionError(f"{answer[:200]!r} {await self._reader.read(1000)!r}")
        arrivals, usage = await self._events(self._reader)
        assert usage == output_tokens, f"{usage} tokens came, {output_tokens} were asked for"
        return Stream(sent_s=sent_s, arrivals=arrivals)

    async def _events(self, reader: asyncio.StreamReader) -> tuple[list[tuple[float, int]], int]:
        """When how many tokens came, and the number of tokens that the answer says it has."""
        arrivals: list[tuple[float, int]] = []
        usage, pending = 0, b""
        while size := int(await reader.readline(), 16):
            pending += await reader.readexactly(size)
            await reader.readexactly(2)
            now_s = time.perf_counter()
            *whole, pending = pending.split(b"\n\n")
            tokens = 0
            for event in whole:
                if event.startswith(b"data: {"):
                    found: dict[str, Any] = msgspec.json.decode(event[6:])
                    tokens += sum(choice["text"].count(_TOKEN.decode()) for choice in found["choices"])
                    usage = (found.get("usage") or {}).get("completion_tokens", usage)
            if tokens:
                arrivals.append((now_s, tokens))
        await reader.readline()
        return arrivals, usage


class Load:
    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = (host, port, key)
        self._free: list[Connection] = []

    async def batch(self, order: dict[str, Any]) -> list[Stream]:
        """A request's time counts from when it was due, whether it could be sent then or not."""
        models, prompts = order["models"], order["prompts"]
        arrivals = order.get("arrivals") or [0.0] * len(prompts)
        start_s = time.perf_counter()
        async with asyncio.timeout(_ANSWER_LIMIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(models[number % len(models)], prompt, order["output_tokens"], start_s + arrival_s))
                for number, (prompt, arrival_s) in enumerate(zip(prompts, arrivals, strict=True))
            ]
        return [task.result() for task in tasks]

    async def _one(self, model: str, prompt: list[int], output_tokens: int, due_s: float) -> Stream:
        await asyncio.sleep(due_s - time.perf_counter())
        connection = self._free.pop() if self._free else Connection(*self._address)
        stream = await connection.completion(model, prompt, output_tokens, due_s)
        self._free.append(connection)
        return stream


async def run(host: str, port: int, key: str) -> None:
    load = Load(host, port, key)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        sys.stdout.buffer.write(msgspec.json.encode(await load.batch(msgspec.json.decode(line))) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
