"""From the engine's process to ours: batches of step records over a Unix datagram socket, ten times a second.

Neither side ever waits for the other: the engine's loop appends to queues, a thread sends; what cannot be sent is kept, within a bound.
"""

import asyncio
import contextlib
import errno
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from services.worker.step_records import Span, StepBatch, StepRecord, decode, encode

T = TypeVar("T")

SEND_INTERVAL_S = 0.1
_ROWS_PER_BATCH = 1000  # about 80 KB; a datagram may have twice that
_KEPT_BATCHES = 1200  # while nobody reads; then the oldest are lost, which the numbers of steps show


class StepQueues:
    """Filled by the engine's loop, emptied by the sender's thread. `state` is set after what came before it was appended."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque()
        self.spans: deque[Span] = deque()
        self.ended: deque[str] = deque()
        self.state: tuple[bool, int] = (False, time.monotonic_ns())  # idle?, everything before then has been appended

    def take(self) -> StepBatch:
        now_ns = time.monotonic_ns()
        is_idle, since_ns = self.state
        steps: list[StepRecord] = []
        rows = 0
        is_all = True
        while self.steps:
            if rows >= _ROWS_PER_BATCH:
                is_all = False
                break
            step = self.steps.popleft()
            rows += 1 + len(step.rows)
            steps.append(step)
        spans = _drained(self.spans)
        ended = _drained(self.ended) if is_all else []
        until_ns = (max(now_ns, since_ns) if is_idle else since_ns) if is_all else 0
        return StepBatch(until_ns, since_ns if is_idle and is_all else 0, steps, spans, ended)


class StepSender:
    """In the engine's process."""

    def __init__(self, queues: StepQueues, path: str) -> None:
        self._queues = queues
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._unsent: deque[bytes] = deque()

    def start(self) -> None:
        threading.Thread(target=self._run, name="tenantry-steps", daemon=True).start()

    def close(self) -> None:
        """Of one that was not started."""
        self._socket.close()

    def _run(self) -> None:
        while True:
            time.sleep(SEND_INTERVAL_S)
            self.send()

    def send(self) -> None:
        """What is there now, after what could not be sent before."""
        while True:
            batch = self._queues.take()
            self._unsent.append(encode(batch))
            if batch.until_ns:
                break
        while len(self._unsent) > _KEPT_BATCHES:
            self._unsent.popleft()
        try:
            while self._unsent:
                self._socket.sendto(self._unsent[0], self._path)
                self._unsent.popleft()
        except OSError as error:  # its queue is full, or nobody listens yet, or any more
            if error.errno == errno.EMSGSIZE:
                self._unsent.popleft()


class StepReceiver:
    """In the worker's process: binds `path`, hands every batch to `take` in the loop."""

    def __init__(self, take: Callable[[StepBatch], None]) -> None:
        self.take = take
        self._folder = Path(tempfile.mkdtemp(prefix="tenantry-steps-"))
        self.path = str(self._folder / "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.take(decode(self._socket.recv(1 << 20)))


def _drained(queue: deque[T]) -> list[T]:
    found: list[T] = []
    while queue:
        found.append(queue.popleft())
    return found
