"""What has come back of one attempt: frames put in order, duplicates dropped, gaps seen, body pieces held until the client takes them.

No I/O: frames and times come in as arguments; one waiter is woken when something new can be done.
"""

import asyncio
from collections.abc import Callable

from shared.contracts.errors import to_error
from shared.contracts.inference import Frame, FrameKind, Head, Totals, decode_error, decode_head, decode_totals
from shared.errors import InternalError, TenantryError, WorkerLost

_AHEAD_LIMIT = 4096  # frames kept that came before the missing one


class Bounced(TenantryError):
    """The worker gave the attempt back unstarted: reason."""

    code = "bounced"


class Answer:
    """One attempt's answer. Exactly one of `totals` (END) and `error` ends it; `lost` says that another attempt may be made.

    Times `_s` are the dispatcher's connected time, which stands still while the bus is away, except `expires_s`.
    `pieces` hold at most limit_bytes; over that, the answer ends with `too_much`.
    """

    __slots__ = (
        "accept_timeout_s",
        "accepted",
        "acked_seq",
        "ahead",
        "ahead_bytes",
        "attempt",
        "body_s",
        "cancelled",
        "ended",
        "error",
        "expires_s",
        "gap_s",
        "hang_up",
        "head",
        "heard_s",
        "held_bytes",
        "incarnation",
        "limit_bytes",
        "lost",
        "next_seq",
        "pieces",
        "request_id",
        "resend_s",
        "sink",
        "stalled_s",
        "started_s",
        "stream",
        "taken",
        "taken_then",
        "too_much",
        "totals",
        "waiter",
        "worker_id",
    )

    def __init__(
        self,
        *,
        request_id: str,
        attempt: int,
        worker_id: str,
        stream: bool,
        now_s: float,
        accept_timeout_s: float,
        expires_s: float,
        limit_bytes: int,
        too_much: TenantryError,
        hang_up: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.worker_id = worker_id
        self.incarnation = ""  # of the worker process that accepted it
        self.accepted = False
        self.head: Head | None = None
        self.pieces: list[bytes] = []
        self.held_bytes = 0
        self.limit_bytes = limit_bytes
        self.too_much = too_much
        self.totals: Totals | None = None
        self.error: TenantryError | None = None
        self.lost = False
        self.ended = False  # the worker itself said END, ERROR or BOUNCED: there is nothing to cancel
        self.cancelled = False  # the worker has been told
        self.hang_up = hang_up
        self.taken = 0  # how often the client's side took pieces
        self.taken_then = 0
        self.stalled_s: float | None = None  # loop time since when it is over and nothing is taken
        self.stream = stream
        self.accept_timeout_s = accept_timeout_s
        self.expires_s = expires_s  # loop time at which the whole request's budget is spent
        self.next_seq = 0
        self.acked_seq = -1
        self.ahead: dict[int, Frame] = {}
        self.ahead_bytes = 0
        self.started_s = now_s
        self.heard_s = now_s  # any frame
        self.body_s: float | None = None  # a body frame
        self.gap_s: float | None = None  # since when a frame is missing
        self.resend_s = 0.0
        self.waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[bytes], bool] | None = None  # takes a piece at once, or returns False; set while its reader waits

    @property
    def over(self) -> bool:
        return self.totals is not None or self.error is not None

    def receive(self, frame: Frame, now_s: float) -> bool:
        """Takes one frame of this attempt. True when a frame before it is missing (ask for it again)."""
        self.heard_s = now_s
        if self.totals is not None or self.error is not None:
            return False
        seq = frame.seq
        if frame.kind == FrameKind.PROGRESS:
            if seq >= self.next_seq:
                return self._missing(now_s)
            return False
        if seq != self.next_seq:
            if seq < self.next_seq:
                return False
            if len(self.ahead) < _AHEAD_LIMIT and self.ahead_bytes <= self.limit_bytes and seq not in self.ahead:
                self.ahead[seq] = frame  # what finds no room here is asked for again
                self.ahead_bytes += len(frame.data)
            return self._missing(now_s)
        self._apply(frame, now_s)
        while self.ahead and not self.over:
            following = self.ahead.pop(self.next_seq, None)
            if following is None:
                break
            self.ahead_bytes -= len(following.data)
            self._apply(following, now_s)
        if self.gap_s is not None and not self.ahead:
            self.gap_s = None
        if self.pieces or self.over:
            self.wake()
        return False

    def _missing(self, now_s: float) -> bool:
        if self.gap_s is None:
            self.gap_s = now_s
            return True
        return False

    def _apply(self, frame: Frame, now_s: float) -> None:
        self.next_seq = frame.seq + 1
        kind = frame.kind
        if kind == FrameKind.BODY:
            self.body_s = now_s
            if self.sink is not None and not self.pieces and self.sink(frame.data):
                return
            self.pieces.append(frame.data)
            self.held_bytes += len(frame.data)
            if self.held_bytes > self.limit_bytes:
                self.fail(self.too_much)
        elif kind == FrameKind.ACCEPTED:
            self.accepted = True
        elif kind == FrameKind.HEAD:
            self.head = decode_head(frame.data)
        elif kind == FrameKind.END:
            self.ended = True
            self.totals = decode_totals(frame.data)
        elif kind == FrameKind.ERROR:
            self.ended = True
            error = to_error(decode_error(frame.data))
            self.fail(error, lost=isinstance(error, WorkerLost))
        elif kind == FrameKind.BOUNCED:
            self.ended = True
            self.fail(Bounced("the worker gave it back unstarted", reason=frame.data.decode(errors="replace")[:64]), lost=True)
        else:
            self.fail(InternalError(f"a frame of kind {kind} came from the worker"))

    def fail(self, error: TenantryError, *, lost: bool = False) -> None:
        """Ends it; what ended it first stays."""
        if self.totals is not None or self.error is not None:
            return
        self.error = error
        self.lost = lost
        self.wake()

    def take(self) -> bytes:
        """Every piece that waits, joined (b"" when none)."""
        pieces = self.pieces
        if not pieces:
            return b""
        self.taken += 1
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.pieces = []
        self.held_bytes = 0
        return body

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until something came after the caller last looked; the deadlines that bound it are the dispatcher's, which fail the answer."""
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None
