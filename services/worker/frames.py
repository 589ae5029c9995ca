"""The outbox: frames of every attempt to their routers, many in one message, kept until acknowledged and sent again when asked.

It knows nothing of HTTP or engines; what goes into a frame and when an attempt ends is decided by its attempt (attempt.py).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator

import structlog

from services.worker.identity import Identity
from shared.bus import BusUnavailable
from shared.contracts.inference import Ack, Frame, FrameBatch, FrameKind, Resend, answer_subject, encode
from shared.errors import StreamGap

log = structlog.get_logger()

FRAME_OVERHEAD_BYTES = 96  # ids, seq and kind, generously: what a frame costs beside its data
MESSAGE_BYTES = 1 << 20
PIECE_BYTES = 512 * 1024  # a larger body goes in several frames
_SWEEP_S = 0.25
_RESEND_FIRST_S = 1.0  # an ended attempt's tail is sent again after this, then twice as long, until acknowledged

Publish = Callable[[str, bytes], Awaitable[None]]


class Stream:
    """One attempt's frames. Made by `Outbox.open`."""

    __slots__ = (
        "attempt", "ended_s", "kept", "kept_bytes", "next_seq", "quiet_since_s", "request_id", "resend_at_s", "resend_wait_s", "router_id",
    )  # fmt: skip

    def __init__(self, request_id: str, attempt: int, router_id: str, now_s: float) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.router_id = router_id
        self.next_seq = 0
        self.kept: deque[Frame] = deque()  # sent and not acknowledged, oldest first
        self.kept_bytes = 0
        self.quiet_since_s = now_s
        self.ended_s: float | None = None
        self.resend_at_s = 0.0
        self.resend_wait_s = _RESEND_FIRST_S

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)


class Outbox:
    """At most `stream_limit_bytes` per attempt and `total_limit_bytes` in all stay unacknowledged; beyond that `body` waits.

    An attempt that waited `patience_s` without getting room is given up (StreamGap).
    """

    def __init__(
        self,
        publish: Publish,
        me: Identity,
        *,
        stream_limit_bytes: int = 1 << 20,
        total_limit_bytes: int = 256 << 20,
        patience_s: float = 30.0,
        keep_ended_s: float = 30.0,
    ) -> None:
        self._publish = publish
        self._me = me
        self._stream_limit_bytes = stream_limit_bytes
        self._total_limit_bytes = total_limit_bytes
        self._patience_s = patience_s
        self._keep_ended_s = keep_ended_s
        self._streams: dict[tuple[str, int], Stream] = {}
        self._turn: dict[str, list[Frame]] = {}
        self._wake = asyncio.Event()
        self._subjects: dict[str, str] = {}
        self._waiting_for_room: set[asyncio.Event] = set()
        self.kept_bytes = 0
        self._loop = asyncio.get_running_loop()

    def open(self, request_id: str, attempt: int, router_id: str) -> Stream:
        """A new stream; the attempt must not have one yet."""
        stream = Stream(request_id, attempt, router_id, self._loop.time())
        assert stream.key not in self._streams
        self._streams[stream.key] = stream
        return stream

    def send(self, stream: Stream, kind: FrameKind, data: bytes = b"") -> None:
        """Queues the attempt's next frame for this turn's message and keeps it. Never waits: for all but long bodies."""
        frame = Frame(stream.request_id, stream.attempt, stream.next_seq, kind, data)
        stream.next_seq += 1
        size_bytes = len(data) + FRAME_OVERHEAD_BYTES
        stream.kept.append(frame)
        stream.kept_bytes += size_bytes
        self.kept_bytes += size_bytes
        stream.quiet_since_s = self._loop.time()
        self._enqueue(stream.router_id, frame)

    async def body(self, stream: Stream, data: bytes) -> None:
        """BODY frames for the data, once there is room.

        :raises StreamGap: the router acknowledged nothing for patience_s.
        """
        for start in range(0, len(data), PIECE_BYTES):
            if self._full(stream):
                await self._wait_for_room(stream)
            self.send(stream, FrameKind.BODY, data if len(data) <= PIECE_BYTES else data[start : start + PIECE_BYTES])

    def end(self, stream: Stream, kind: FrameKind, data: bytes = b"") -> None:
        """The attempt's last frame (BOUNCED, END or ERROR); the stream is kept until acknowledged, or keep_ended_s."""
        self.send(stream, kind, data)
        stream.ended_s = self._loop.time()
        stream.resend_at_s = stream.ended_s + stream.resend_wait_s

    def forget(self, stream: Stream) -> None:
        """Nobody wants the attempt's frames any more. Idempotent."""
        if self._streams.pop(stream.key, None) is None:
            return
        self.kept_bytes -= stream.kept_bytes
        stream.kept.clear()
        stream.kept_bytes = 0

    def forget_router(self, router_id: str) -> None:
        """The router is gone: its ended streams go; its running attempts are their owner's to end."""
        for stream in [s for s in self._streams.values() if s.router_id == router_id and s.ended_s is not None]:
            self.forget(stream)

    def acknowledge(self, ack: Ack) -> None:
        for request_id, attempt, seq in ack.positions:
            stream = self._owned(request_id, attempt, ack.router_id)
            if stream is None:
                continue
            kept = stream.kept
            while kept and kept[0].seq <= seq:
                size_bytes = len(kept.popleft().data) + FRAME_OVERHEAD_BYTES
                stream.kept_bytes -= size_bytes
                self.kept_bytes -= size_bytes
            if stream.ended_s is not None and not kept:
                self.forget(stream)
        for waiting in self._waiting_for_room:
            waiting.set()

    def resend(self, order: Resend) -> None:
        """Sends again what a router misses."""
        for request_id, attempt, after_seq in order.positions:
            stream = self._owned(request_id, attempt, order.router_id)
            if stream is not None:
                self._send_again(stream, after_seq)

    def resend_all(self) -> None:
        """After a reconnect: nobody knows what arrived. Routers tell doubles by their seq."""
        for stream in self._streams.values():
            self._send_again(stream, -1)

    def unacknowledged(self) -> int:
        """Streams with frames that their router has not confirmed."""
        return sum(1 for stream in self._streams.values() if stream.kept)

    async def run(self, progress_s: float = 1.0) -> None:
        """Sends until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_turns())
            group.create_task(self._sweep(progress_s))

    async def _send_turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            turn, self._turn = self._turn, {}
            for router_id, frames in turn.items():
                for some in messages(frames):
                    batch = FrameBatch(self._me.worker_id, self._me.incarnation, some)
                    try:
                        await self._publish(self._subject(router_id), encode(batch))
                    except BusUnavailable as error:  # kept frames go again after the reconnect
                        log.warning("frames.not_sent", router_id=router_id, frames=len(some), error=error.message)

    async def _sweep(self, progress_s: float) -> None:
        """Shows life where nothing was sent lately, repeats ended attempts' tails, forgets what nobody acknowledged."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, progress_s / 4))
            now_s = self._loop.time()
            for stream in list(self._streams.values()):
                if stream.ended_s is None:
                    if now_s - stream.quiet_since_s >= progress_s:
                        stream.quiet_since_s = now_s
                        self._enqueue(stream.router_id, Frame(stream.request_id, stream.attempt, stream.next_seq - 1, FrameKind.PROGRESS))
                elif now_s - stream.ended_s >= self._keep_ended_s:
                    self.forget(stream)
                elif now_s >= stream.resend_at_s:
                    stream.resend_wait_s *= 2
                    stream.resend_at_s = now_s + stream.resend_wait_s
                    self._send_again(stream, -1)

    def _enqueue(self, router_id: str, frame: Frame) -> None:
        frames = self._turn.get(router_id)
        if frames is None:
            self._turn[router_id] = [frame]
            self._wake.set()
        else:
            frames.append(frame)

    def _send_again(self, stream: Stream, after_seq: int) -> None:
        for frame in stream.kept:
            if frame.seq > after_seq:
                self._enqueue(stream.router_id, frame)

    def _owned(self, request_id: str, attempt: int, router_id: str) -> Stream | None:
        stream = self._streams.get((request_id, attempt))
        return stream if stream is not None and stream.router_id == router_id else None

    def _full(self, stream: Stream) -> bool:
        return stream.kept_bytes >= self._stream_limit_bytes or self.kept_bytes >= self._total_limit_bytes

    async def _wait_for_room(self, stream: Stream) -> None:
        acknowledged = asyncio.Event()
        self._waiting_for_room.add(acknowledged)
        try:
            async with asyncio.timeout(self._patience_s):
                while self._full(stream):
                    acknowledged.clear()
                    await acknowledged.wait()
        except TimeoutError:
            raise StreamGap(
                f"the answer's buffer is full and the router made no room in {self._patience_s:g} s",
                held_bytes=stream.kept_bytes,
                limit_bytes=self._stream_limit_bytes,
            ) from None
        finally:
            self._waiting_for_room.discard(acknowledged)

    def _subject(self, router_id: str) -> str:
        subject = self._subjects.get(router_id)
        if subject is None:
            if len(self._subjects) >= 1024:
                self._subjects.clear()
            subject = self._subjects[router_id] = answer_subject(router_id)
        return subject


def messages(frames: Iterable[Frame]) -> Iterator[list[Frame]]:
    """The frames in order, cut so that no message grows far beyond MESSAGE_BYTES."""
    some: list[Frame] = []
    size_bytes = 0
    for frame in frames:
        frame_bytes = len(frame.data) + FRAME_OVERHEAD_BYTES
        if some and size_bytes + frame_bytes > MESSAGE_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(frame)
        size_bytes += frame_bytes
    if some:
        yield some
