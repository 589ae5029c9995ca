"""A backend that answers at once with a fixed answer, over HTTP (for the peers) or over the bus (for the router).

It costs as little as it can, so that under saturation the gateway between is the bottleneck. The bus side plays registry and
worker: it writes a tenant, a key and a pool, keeps the heartbeat going and answers the base's subject.
"""

import argparse
import asyncio
import hashlib
import json
from typing import Any, cast

import httptools
import uvloop

from shared.bus import Bus, BusSettings, Message, connect, ensure_stream, open_bucket
from shared.contracts import adapters, state
from shared.contracts.base import EngineLimits
from shared.contracts.inference import (
    Frame,
    FrameBatch,
    FrameKind,
    Head,
    Totals,
    answer_subject,
    base_subject_id,
    control_subject,
    decode_request,
    encode,
    infer_subject,
    worker_ping_subject,
)
from shared.contracts.usage import USAGE_STREAM, USAGE_SUBJECTS

MODEL = "qwen3-moe-demo"
BASE = MODEL + "@" + "0" * 64
KEY = "tk_bench"
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "A refund gives back money."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 40, "completion_tokens": 7, "total_tokens": 47},
    }
).encode()
_HTTP = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + str(len(ANSWER)).encode() + b"\r\n\r\n" + ANSWER


class CannedHttp(asyncio.Protocol):
    """Any request is answered with ANSWER."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser: Any = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.transport.write(_HTTP)


async def serve_http(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(CannedHttp, "127.0.0.1", port, backlog=512)
    await server.serve_forever()


async def serve_bus(url: str) -> None:
    bus = await connect(BusSettings(url=url, name="canned"))
    await write_routes(bus)
    head = encode(Head(status=200))
    totals = encode(Totals(prompt_tokens=40, completion_tokens=7))

    async def answer(message: Message) -> None:
        request = decode_request(message.data)
        key = (request.request_id, request.attempt)
        frames = [
            Frame(*key, 0, FrameKind.ACCEPTED),
            Frame(*key, 1, FrameKind.HEAD, head),
            Frame(*key, 2, FrameKind.BODY, ANSWER),
            Frame(*key, 3, FrameKind.END, totals),
        ]
        await bus.publish(answer_subject(request.router_id), encode(FrameBatch("w0", "canned", frames)))

    async def pong(message: Message) -> None:
        await bus.publish(message.reply, b"canned")

    await bus.subscribe(infer_subject(base_subject_id(BASE), "w0"), answer)
    await bus.subscribe(control_subject("w0"), lambda _: None)
    await bus.subscribe(worker_ping_subject("w0"), pong)
    bucket = await open_bucket(bus, state.STATE_BUCKET)
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        await bucket.put(state.HEARTBEAT_KEY, str(number).encode())
        await asyncio.sleep(0.25)


async def write_routes(bus: Bus) -> None:
    bucket = await open_bucket(bus, state.STATE_BUCKET, create=True)
    await ensure_stream(bus, USAGE_STREAM, USAGE_SUBJECTS)
    tenant = state.Tenant(tenant_id="t_bench", name="bench")
    key = state.ApiKey(key_id="k", label="bench", tenants=("bench",))
    limits = EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, endpoints=("/v1/chat/completions",))
    worker = adapters.PoolWorker(worker_id="w0", incarnation="canned", limits=limits)
    pool = adapters.PoolEntry(pool_id="main", base=BASE, workers={"w0": worker})
    await bucket.put(state.TENANT_PREFIX + "bench", state.encode(tenant))
    await bucket.put(state.KEY_PREFIX + hashlib.sha256(KEY.encode()).hexdigest(), state.encode(key))
    await bucket.put(state.POOL_PREFIX + "main", adapters.encode(pool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("face", choices=["http", "bus"])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--nats", default="")
    args = parser.parse_args()
    uvloop.run(serve_http(args.port) if args.face == "http" else serve_bus(args.nats))


if __name__ == "__main__":
    main()
