"""Ends an engine's processes when the process that started them is gone, however it ended.

The engine's processes are not children that die with their parent: after a kill -9 they would hold the device for minutes.
A small process (engine_reaper.py) waits on a pipe from the front; the kernel closes it at the front's death, and what the front
had listed is killed.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterable

import psutil

from services.worker import engine_reaper
from shared.errors import StartFailed


class EngineGuard:
    """Owned by the front. What the front starts between `start` and the end of `watch_children_until` is the engine's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[int] = set()
        self._listed: set[tuple[int, float]] = set()

    def start(self) -> None:
        """Returns once the guard stands. Blocking: tens of milliseconds."""
        # -P: the folder of that file is no place to import modules from. A session of its own: no terminal signal reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", engine_reaper.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise StartFailed("the process that guards the engine's processes did not start", package="psutil")
        self._others = {process.pid for process in psutil.Process().children(recursive=True)}

    def engine_processes(self) -> list[psutil.Process]:
        """Descendants that are new since `start`, without multiprocessing's resource trackers: they free shared memory after a
        crash, and end by themselves."""
        found: list[psutil.Process] = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.pid not in self._others and "resource_tracker" not in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Adds processes to those that must not outlive this one."""
        assert self._process is not None and self._process.stdin is not None
        new: list[tuple[int, float]] = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                new.append((process.pid, process.create_time()))
        lines = [f"{pid} {created_s!r}\n" for pid, created_s in new if (pid, created_s) not in self._listed]
        self._listed.update(new)
        self._process.stdin.write("".join(lines).encode())
        self._process.stdin.flush()

    async def watch_children_until(self, done: asyncio.Event, interval_s: float = 0.25) -> None:
        """Lists what this process starts while `done` is not set."""
        try:
            while not done.is_set():
                self.watch(await asyncio.to_thread(self.engine_processes))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await done.wait()
        finally:
            self.watch(self.engine_processes())

    def end_all(self) -> None:
        """Kills every listed process that still runs, and ends the guard. Idempotent."""
        engine_reaper.kill(self._listed)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=5)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
