"""The outbox: order, batching, what is kept, bounds. The bus is a list."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.frames import FRAME_OVERHEAD_BYTES, MESSAGE_BYTES, PIECE_BYTES, Outbox, messages
from services.worker.identity import Identity
from shared.bus import BusUnavailable
from shared.contracts.inference import Ack, Frame, FrameBatch, FrameKind, Resend, decode_batch
from shared.errors import StreamGap
from tests.waiting import until

ME = Identity(worker_id="w1", incarnation="i1", pool_id="main")


class Sent:
    """A bus that keeps what is published, or refuses."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, FrameBatch]] = []
        self.cut = False

    async def publish(self, subject: str, data: bytes) -> None:
        if self.cut:
            raise BusUnavailable("cut")
        self.batches.append((subject, decode_batch(data)))

    def frames(self, request_id: str) -> list[Frame]:
        return [frame for _, batch in self.batches for frame in batch.frames if frame.request_id == request_id]


@asynccontextmanager
async def outbox(progress_s: float = 60.0, **limits: float) -> AsyncIterator[tuple[Outbox, Sent]]:
    sent = Sent()
    box = Outbox(sent.publish, ME, **limits)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(box.run(progress_s))
        yield box, sent
        running.cancel()


async def test_frames_made_in_one_turn_travel_in_one_message_for_each_router() -> None:
    async with outbox() as (box, sent):
        streams = [box.open(f"q{n}", 1, "r1" if n < 30 else "r2") for n in range(40)]
        for stream in streams:
            box.send(stream, FrameKind.ACCEPTED)
        await until(lambda: len(sent.batches) == 2)
    assert [(subject, len(batch.frames)) for subject, batch in sent.batches] == [
        ("tenantry.v1.answer.r1", 30),
        ("tenantry.v1.answer.r2", 10),
    ]
    assert sent.batches[0][1].incarnation == "i1"


async def test_seq_counts_the_frames_of_an_attempt_from_0() -> None:
    async with outbox() as (box, sent):
        stream = box.open("q", 2, "r1")
        box.send(stream, FrameKind.ACCEPTED)
        await box.body(stream, b"a" * (PIECE_BYTES + 1))
        box.end(stream, FrameKind.END)
        await until(lambda: len(sent.frames("q")) == 4)
    frames = sent.frames("q")
    assert [(f.seq, f.kind, len(f.data)) for f in frames] == [
        (0, FrameKind.ACCEPTED, 0),
        (1, FrameKind.BODY, PIECE_BYTES),
        (2, FrameKind.BODY, 1),
        (3, FrameKind.END, 0),
    ]


async def test_what_is_not_acknowledged_is_sent_again_when_asked_and_after_a_reconnect() -> None:
    async with outbox() as (box, sent):
        stream = box.open("q", 1, "r1")
        for _ in range(4):
            box.send(stream, FrameKind.BODY, b"x")
        await until(lambda: len(sent.frames("q")) == 4)
        box.acknowledge(Ack(router_id="r1", positions=(("q", 1, 1),)))
        box.resend(Resend(router_id="r1", positions=(("q", 1, 2),)))
        await until(lambda: len(sent.frames("q")) == 5)
        box.resend_all()
        await until(lambda: len(sent.frames("q")) == 7)
    assert [frame.seq for frame in sent.frames("q")] == [0, 1, 2, 3, 3, 2, 3]


async def test_another_router_can_neither_acknowledge_nor_have_a_stream() -> None:
    async with outbox() as (box, sent):
        stream = box.open("q", 1, "r1")
        box.send(stream, FrameKind.BODY, b"secret")
        await until(lambda: len(sent.frames("q")) == 1)
        box.acknowledge(Ack(router_id="r2", positions=(("q", 1, 0),)))
        box.resend(Resend(router_id="r2", positions=(("q", 1, -1),)))
        await asyncio.sleep(0)
        assert len(stream.kept) == 1
        assert {subject for subject, _ in sent.batches} == {"tenantry.v1.answer.r1"}


async def test_frames_that_could_not_be_sent_stay_for_the_reconnect() -> None:
    async with outbox() as (box, sent):
        sent.cut = True
        stream = box.open("q", 1, "r1")
        box.send(stream, FrameKind.BODY, b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent.cut = False
        box.resend_all()
        await until(lambda: len(sent.frames("q")) == 1)


async def test_a_full_stream_waits_for_acknowledgements_and_keeps_its_bound() -> None:
    limit_bytes = 10 * (1000 + FRAME_OVERHEAD_BYTES)
    async with outbox(stream_limit_bytes=limit_bytes) as (box, sent), asyncio.TaskGroup() as group:
        stream = box.open("q", 1, "r1")
        highest = 0

        async def write() -> None:
            nonlocal highest
            for _ in range(200):
                await box.body(stream, b"x" * 1000)
                highest = max(highest, stream.kept_bytes)

        writing = group.create_task(write())
        while not writing.done():
            await until(lambda: stream.kept_bytes >= limit_bytes or writing.done())
            newest = stream.next_seq - 1
            await until(lambda newest=newest: any(f.seq == newest for f in sent.frames("q")))
            box.acknowledge(Ack(router_id="r1", positions=(("q", 1, newest),)))
    assert highest <= limit_bytes
    assert [frame.seq for frame in sent.frames("q")] == list(range(200))


async def test_a_stream_that_gets_no_room_is_a_gap() -> None:
    async with outbox(stream_limit_bytes=100, patience_s=0.05) as (box, _):
        stream = box.open("q", 1, "r1")
        await box.body(stream, b"x" * 100)
        with pytest.raises(StreamGap):
            await box.body(stream, b"x")


async def test_all_streams_together_keep_the_total_bound() -> None:
    async with outbox(total_limit_bytes=1000, patience_s=0.05) as (box, _):
        first, second = box.open("a", 1, "r1"), box.open("b", 1, "r1")
        await box.body(first, b"x" * 1000)
        with pytest.raises(StreamGap):
            await box.body(second, b"x")
        box.acknowledge(Ack(router_id="r1", positions=(("a", 1, 0),)))
        await box.body(second, b"x")
        box.forget(second)
        assert box.kept_bytes == 0


async def test_an_ended_attempts_tail_is_repeated_until_it_is_acknowledged_and_then_forgotten() -> None:
    async with outbox() as (box, sent):
        stream = box.open("q", 1, "r1")
        box.end(stream, FrameKind.BOUNCED, b"draining")
        await until(lambda: len(sent.frames("q")) >= 2)
        box.acknowledge(Ack(router_id="r1", positions=(("q", 1, 0),)))
        assert box.unacknowledged() == 0
        assert box.kept_bytes == 0
        box.open("q", 1, "r1")  # nothing is left of it


async def test_an_ended_attempt_that_nobody_acknowledges_is_forgotten_in_the_end() -> None:
    async with outbox(keep_ended_s=0.1) as (box, _):
        box.end(box.open("q", 1, "r1"), FrameKind.BOUNCED, b"draining")
        await until(lambda: box.kept_bytes == 0)


async def test_silence_shows_progress_that_repeats_the_highest_seq_and_is_not_kept() -> None:
    async with outbox(progress_s=0.05) as (box, sent):
        stream = box.open("q", 1, "r1")
        box.send(stream, FrameKind.ACCEPTED)
        box.send(stream, FrameKind.HEAD)
        await until(lambda: any(f.kind is FrameKind.PROGRESS for f in sent.frames("q")))
        progress = next(f for f in sent.frames("q") if f.kind is FrameKind.PROGRESS)
        assert progress.seq == 1
        assert [f.kind for f in stream.kept] == [FrameKind.ACCEPTED, FrameKind.HEAD]


def test_messages_keep_order_and_stay_near_their_bound() -> None:
    frames = [Frame("q", 1, seq, FrameKind.BODY, b"x" * (300 * 1024)) for seq in range(20)] + [Frame("p", 1, 0, FrameKind.END)]
    cut = list(messages(frames))
    assert [frame for some in cut for frame in some] == frames
    assert all(sum(len(f.data) for f in some) <= MESSAGE_BYTES for some in cut)
    assert list(messages([])) == []
