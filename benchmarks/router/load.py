"""The load of the router benchmark: one process, raw sockets, keep-alive.

Modes: `saturate` (closed loop, whole answers), `paced` (open loop at a fixed rate, time to the first token of a stream),
`stream` (many streams at once, every piece counted). It connects and warms up, says `ready`, waits for a line on stdin, and
ends with its figures as one JSON line: whoever started it reads CPU clocks in between.

Latencies come from time.perf_counter: uvloop's own clock moves in steps of 1 ms.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections import deque
from time import perf_counter
from typing import Any, cast

import uvloop


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.buffer = b""
        self.done: asyncio.Future[None] | None = None
        self.first_body_s = 0.0
        self.events = 0
        self.status = 0
        self.head_seen = False
        self.left_bytes = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError(f"the connection ended in an answer: {exc}"))

    def send(self, request: bytes) -> asyncio.Future[None]:
        self.done = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.first_body_s = 0.0
        self.head_seen = False
        self.left_bytes = -1
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.head_seen:
            self.buffer += data
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            self.status = int(head[9:12])
            self.head_seen = True
            at = head.find(b"content-length:")
            if at >= 0:
                self.left_bytes = int(head[at + 15 :].split(b"\r\n", 1)[0])
            data = self.buffer[end + 4 :]
            self.buffer = b""
            if not data:
                return
        if not self.first_body_s:
            self.first_body_s = perf_counter()
        if self.left_bytes >= 0:
            self.left_bytes -= len(data)
            if self.left_bytes <= 0:
                self._finish()
            return
        self.events += data.count(b"data: ")
        self.buffer = (self.buffer + data)[-7:]
        if self.buffer.endswith(b"\r\n0\r\n\r\n"):
            self._finish()

    def _finish(self) -> None:
        done, self.done = self.done, None
        if done is None or done.done():
            return
        if self.status != 200:
            done.set_exception(RuntimeError(f"status {self.status}"))
        else:
            done.set_result(None)


def request_bytes(args: argparse.Namespace, *, stream: bool, tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": args.model,
        "messages": [{"role": "user", "content": "What about refund? " * 8}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    if stream:
        body["stream"] = True
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {args.key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def opened(args: argparse.Namespace, count: int) -> list[Connection]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, args.host, args.port))[1] for _ in range(count)]


def wait_for_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


async def saturate(args: argparse.Namespace) -> dict[str, float]:
    connections = await opened(args, args.connections)
    request = request_bytes(args, stream=False, tokens=1)

    async def drive(connection: Connection, stop_s: float, latencies: list[float]) -> None:
        while (now_s := perf_counter()) < stop_s:
            await connection.send(request)
            latencies.append(perf_counter() - now_s)

    async def drive_all(seconds: float) -> list[float]:
        latencies: list[float] = []
        stop_s = perf_counter() + seconds
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(drive(connection, stop_s, latencies))
        return latencies

    await drive_all(args.warmup)
    wait_for_start()
    started_s = perf_counter()
    latencies = await drive_all(args.seconds)
    return {
        "requests": len(latencies),
        "requests_per_s": len(latencies) / (perf_counter() - started_s),
        "p50_ms": quantile(latencies, 50),
        "p99_ms": quantile(latencies, 99),
    }


async def paced(args: argparse.Namespace) -> dict[str, float]:
    """One that finds no free connection is counted in `missed`, not in the figures."""
    free = deque(await opened(args, args.connections))  # in turn, so that none idles past a server's keep-alive limit
    request = request_bytes(args, stream=True, tokens=args.tokens)
    loop = asyncio.get_running_loop()

    async def one(connection: Connection, first: list[float]) -> None:
        sent_s = perf_counter()
        await connection.send(request)
        first.append(connection.first_body_s - sent_s)
        free.append(connection)

    async def run(seconds: float) -> tuple[list[float], int]:
        first: list[float] = []
        missed = 0
        start_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(int(args.rate * seconds)):
                await asyncio.sleep(max(0.0, start_s + number / args.rate - loop.time()))
                if free:
                    group.create_task(one(free.popleft(), first))
                else:
                    missed += 1
        return first, missed

    await run(args.warmup)
    wait_for_start()
    first, missed = await run(args.seconds)
    return {"requests": len(first), "missed": missed, "ttft_p50_ms": quantile(first, 50), "ttft_p99_ms": quantile(first, 99)}


async def stream(args: argparse.Namespace) -> dict[str, float]:
    connections = await opened(args, args.connections)

    async def run(tokens: int) -> int:
        request = request_bytes(args, stream=True, tokens=tokens)
        for connection in connections:
            connection.events = 0
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(answered(connection, request))
        return sum(connection.events for connection in connections)

    await run(8)
    wait_for_start()
    started_s = perf_counter()
    events = await run(args.tokens)
    return {"tokens": len(connections) * args.tokens, "events": events, "seconds": perf_counter() - started_s}


async def answered(connection: Connection, request: bytes) -> None:
    await connection.send(request)


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] * 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["saturate", "paced", "stream"])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="qwen3-moe-demo")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    result = uvloop.run({"saturate": saturate, "paced": paced, "stream": stream}[args.mode](args))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
