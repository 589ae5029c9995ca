"""`python -m benchmarks.serving.http_load HOST PORT KEY`: batches of streamed completions over HTTP, in a process of its own.

A line of its input is a batch: {"models": [...], "prompts": [[token ids], ...], "output_tokens": N}; a line of its output are the
streams of it. Raw sockets, one keep-alive connection for each request of the largest batch.
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

    async def completion(self, model: str, prompt: list[int], output_tokens: int) -> Stream:
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
        sent_s = time.perf_counter()
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


async def run(host: str, port: int, key: str) -> None:
    connections: list[Connection] = []
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        batch: dict[str, Any] = msgspec.json.decode(line)
        while len(connections) < len(batch["prompts"]):
            connections.append(Connection(host, port, key))
        models = batch["models"]
        async with asyncio.timeout(_ANSWER_LIMIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(connections[number].completion(models[number % len(models)], prompt, batch["output_tokens"]))
                for number, prompt in enumerate(batch["prompts"])
            ]
        sys.stdout.buffer.write(msgspec.json.encode([task.result() for task in tasks]) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
