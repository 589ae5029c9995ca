"""What a flush promises: everything subscribed, unsubscribed and published before it is with the server when it returns.

Seen on the wire, because a wrong order shows elsewhere only as a rare lost message on a busy machine.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus import Bus, BusSettings, connect
from shared.bus.embedded import EmbeddedNats


class Wire:
    """What one client sent to the server, in order."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def before_the_next_ping(self, command: bytes) -> bool:
        """Was `command` sent, and a PING after it?"""
        at = self.sent.find(command)
        return at >= 0 and self.sent.find(b"PING\r\n", at) >= 0


@pytest.fixture
async def wire_and_bus(nats_server: EmbeddedNats) -> AsyncIterator[tuple[Wire, Bus]]:
    wire = Wire()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bytearray | None) -> None:
        while piece := await reader.read(65536):
            if note is not None:
                note += piece
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", nats_server.port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forward(reader, server_writer, wire.sent))
            tasks.create_task(forward(server_reader, writer, None))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        bus = await connect(BusSettings(url=f"nats://127.0.0.1:{port}", name="watched"))
        yield wire, bus
        await bus.close()


async def test_a_flush_asks_after_the_subscription_not_before(wire_and_bus: tuple[Wire, Bus]) -> None:
    wire, bus = wire_and_bus
    await bus.subscribe("test.subject", lambda _message: None)
    await bus.flush()
    assert wire.before_the_next_ping(b"SUB test.subject")


async def test_a_flush_asks_after_the_message_not_before(wire_and_bus: tuple[Wire, Bus]) -> None:
    wire, bus = wire_and_bus
    await bus.publish("test.subject", b"x")
    await bus.flush()
    assert wire.before_the_next_ping(b"PUB test.subject")


async def test_a_drain_asks_after_the_interest_is_gone_so_that_nothing_comes_later(wire_and_bus: tuple[Wire, Bus]) -> None:
    wire, bus = wire_and_bus
    subscription = await bus.subscribe("test.subject", lambda _message: None)
    await bus.flush()
    wire.sent.clear()
    await subscription.drain()
    assert wire.before_the_next_ping(b"UNSUB ")
