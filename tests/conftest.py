"""Fixtures shared by every kind of test: a real nats-server each test can break."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus import Bus, BusSettings, connect
from shared.bus.embedded import EmbeddedNats


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    """A server of this test's own on a free port, without users."""
    server = EmbeddedNats(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def bus(nats_server: EmbeddedNats) -> AsyncIterator[Bus]:
    connection = await connect(BusSettings(url=nats_server.url, name="test"))
    yield connection
    await connection.close()
