"""Pieces that go from a frame to the connection without waking the request's task: same bytes, same order, also when the client stalls."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.deliver import deliver
from services.router.exchange import Exchange
from services.router.resolve import Route
from services.router.streams import Answer
from shared.contracts.inference import Frame, FrameKind, Handle, Head, Totals, encode
from shared.errors import Overloaded, WorkerLost

HANDLE = Handle(tenant_id="t", tenant="sales", pool_id="main", base="demo@" + "ab" * 32)
HEAD = encode(Head(status=200, content_type="text/event-stream"))


class Connection:
    """Takes what is written in the order of the calls; `send` waits while it is paused, as a server does for a slow client."""

    def __init__(self) -> None:
        self.body = b""
        self.direct = 0
        self.ended = False
        self._resumed = asyncio.Event()
        self._resumed.set()

    def pause(self, paused: bool) -> None:
        if paused:
            self._resumed.clear()
        else:
            self._resumed.set()

    def write_piece(self, body: bytes) -> bool:
        if not self._resumed.is_set():
            return False
        self.body += body
        self.direct += 1
        return True

    async def send(self, message: Any) -> None:
        await self._resumed.wait()
        self.body += message.get("body", b"")
        self.ended |= message["type"] == "http.response.body" and not message["more_body"]


def exchange(connection: Connection) -> Exchange:
    made = Exchange("r", "/v1/chat/completions", 0.0)
    made.route = Route(handle=HANDLE, workers=())
    made.stream = True
    made.write_piece = connection.write_piece
    return made


def answer() -> Answer:
    return Answer(
        request_id="r",
        attempt=1,
        worker_id="w",
        stream=True,
        now_s=0.0,
        accept_timeout_s=0.3,
        expires_s=100.0,
        limit_bytes=1 << 20,
        too_much=Overloaded("too much"),
    )


def opened() -> Answer:
    made = answer()
    made.receive(Frame("r", 1, 0, FrameKind.ACCEPTED), 0.0)
    made.receive(Frame("r", 1, 1, FrameKind.HEAD, HEAD), 0.0)
    made.receive(Frame("r", 1, 2, FrameKind.BODY, b"data: first\n\n"), 0.0)
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["piece", "turn", "pause", "resume"]), max_size=60))
def test_every_piece_arrives_once_and_in_order_however_the_client_stalls(steps: list[str]) -> None:
    async def run() -> None:
        connection = Connection()
        asked, got = exchange(connection), opened()
        expected = b"data: first\n\n"
        seq = 3
        async with asyncio.TaskGroup() as group:
            delivering = group.create_task(deliver(asked, got, connection.send))
            for step in steps:
                if step == "piece":
                    piece = b"data: %d\n\n" % seq
                    expected += piece
                    got.receive(Frame("r", 1, seq, FrameKind.BODY, piece), 0.0)
                    seq += 1
                elif step == "turn":
                    await asyncio.sleep(0)
                else:
                    connection.pause(step == "pause")
            connection.pause(False)
            got.receive(Frame("r", 1, seq, FrameKind.END, encode(Totals())), 0.0)
            assert await delivering
        assert connection.body == expected
        assert connection.ended
        assert asked.delivered_bytes == len(expected)
        assert asked.outcome == "complete"

    asyncio.run(run())


async def test_pieces_of_a_stream_that_keeps_up_are_written_at_once() -> None:
    connection = Connection()
    asked, got = exchange(connection), opened()
    async with asyncio.TaskGroup() as group:
        delivering = group.create_task(deliver(asked, got, connection.send))
        while got.sink is None:
            await asyncio.sleep(0)
        got.receive(Frame("r", 1, 3, FrameKind.BODY, b"data: second\n\n"), 0.0)
        assert connection.body.endswith(b"data: second\n\n")
        assert connection.direct == 1
        got.receive(Frame("r", 1, 4, FrameKind.END, encode(Totals())), 0.0)
        assert await delivering


async def test_a_stream_that_breaks_off_inside_an_event_ends_that_event_before_the_error() -> None:
    connection = Connection()
    asked, got = exchange(connection), opened()
    async with asyncio.TaskGroup() as group:
        delivering = group.create_task(deliver(asked, got, connection.send))
        while got.sink is None:
            await asyncio.sleep(0)
        got.receive(Frame("r", 1, 3, FrameKind.BODY, b"data: half"), 0.0)
        got.fail(WorkerLost("gone"))
        assert await delivering
    assert b'data: half\n\ndata: {"error"' in connection.body
    assert not connection.ended
