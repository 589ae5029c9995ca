"""Connections that ask for nothing, or never finish asking, end; and however many there are, there is room for one more that asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.bus.embedded import EmbeddedNats
from tests.router_fakes import SALES_KEY, Attempt, Cluster, cluster, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
WHOLE = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SALES_KEY}\r\n\r\n".encode()


@asynccontextmanager
async def connected(running: Cluster, count: int = 1) -> AsyncIterator[list[Streams]]:
    found = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(count)]
    try:
        yield found
    finally:
        for _, writer in found:
            writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the router closes; nothing where it had closed when we still wrote."""
    async with asyncio.timeout(20):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@asynccontextmanager
async def held_up(running: Cluster) -> AsyncIterator[asyncio.Event]:
    """Answers wait for the event, or for the end."""
    over = asyncio.Event()

    async def hold(attempt: Attempt) -> None:
        await over.wait()
        await attempt.answer()

    running.worker.behaviour = hold
    try:
        yield over
    finally:
        over.set()


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        return head + await reader.readexactly(length)


async def test_a_connection_on_which_nothing_comes_is_closed(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, head_timeout_s=0.3) as running, connected(running) as [(reader, _)]:
        assert await rest(reader) == b""


async def test_a_head_that_trickles_in_is_a_408_however_steadily(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, head_timeout_s=1.0) as running, connected(running) as [(reader, writer)]:
        writer.write(b"GET /v1/models HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.1)

        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            trickling = group.create_task(trickle())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            trickling.cancel()


async def test_after_an_answer_neither_silence_nor_bytes_of_no_head_keep_a_connection(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, head_timeout_s=1.0, keep_alive_s=1) as running, connected(running, 2) as (quiet, noisy):
        for reader, writer in (quiet, noisy):
            for _ in range(2):
                writer.write(WHOLE)
                assert (await whole_answer(reader)).startswith(b"HTTP/1.1 200 ")

        async def line_ends() -> None:
            while True:
                noisy[1].write(b"\r\n")
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            sending = group.create_task(line_ends())
            assert await rest(quiet[0]) == b""
            assert b"200" not in await rest(noisy[0])
            sending.cancel()


async def test_an_answer_that_takes_long_is_not_cut_by_any_of_it(nats_server: EmbeddedNats) -> None:
    async with (
        cluster(nats_server, head_timeout_s=1.0, keep_alive_s=1) as running,
        connected(running) as [(reader, writer)],
        held_up(running) as over,
    ):
        body = b'{"model": "tone", "messages": []}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SALES_KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: len(running.worker.attempts) == 1)
        writer.write(b"GET /v1/mod")  # the next one, half of it
        async with connected(running) as [(other, _)]:
            assert await rest(other) == b"", "in this time others were closed"
        over.set()
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"408" in answer


async def test_idle_connections_make_room_and_busy_ones_do_not(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, max_connections=8) as running, connected(running, 40) as idle:
        async with connected(running) as [(reader, writer)]:
            writer.write(WHOLE)
            assert (await whole_answer(reader)).startswith(b"HTTP/1.1 200 ")
        body = b'{"model": "tone", "messages": []}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SALES_KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        async with held_up(running) as over, connected(running, 8) as busy:
            for number, (_, writer) in enumerate(busy):
                writer.write(head.encode() + body)
                await until(lambda number=number: len(running.worker.attempts) == number + 1)
            async with connected(running) as [(reader, _)]:
                assert (await rest(reader)).startswith(b"HTTP/1.1 503 ")
            over.set()
            for reader, _ in busy:
                async with asyncio.timeout(20):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert len(idle) == 40
