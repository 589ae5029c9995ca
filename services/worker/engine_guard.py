"""Ends an engine's processes when the process that started them is gone, however it ended.

The engine's processes are not children that die with their parent: after a kill -9 they would hold the device for minutes.
A small process waits on a pipe from the front; the kernel closes it at the front's death, and what the front had listed is
killed. `EngineGuard` is the front's side; running this file is the other.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterable

import psutil

_CREATION_SLACK_S = 0.05


def engine_processes() -> list[psutil.Process]:
    """This process's descendants, without multiprocessing's resource trackers (they clean up shared memory, and end by themselves)
    and without guards."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if command and "resource_tracker" not in command and __file__ not in command:
            found.append(process)
    return found


class EngineGuard:
    """Owned by the front; `watch` may be called again with a longer list."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._listed: set[tuple[int, float]] = set()

    def start(self) -> None:
        # -P: the folder of this file is no place to import modules from. A session of its own: no terminal signal reaches it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """Adds processes to those that must not outlive this one."""
        assert self._process is not None and self._process.stdin is not None
        for process in processes:
            key = (process.pid, process.create_time())
            if key not in self._listed:
                self._listed.add(key)
                self._process.stdin.write(f"{key[0]} {key[1]!r}\n".encode())
        self._process.stdin.flush()

    async def watch_children_until(self, done: asyncio.Event, interval_s: float = 0.25) -> None:
        """Lists what this process starts while `done` is not set."""
        while not done.is_set():
            self.watch(await asyncio.to_thread(engine_processes))
            try:
                async with asyncio.timeout(interval_s):
                    await done.wait()
            except TimeoutError:
                continue
        self.watch(await asyncio.to_thread(engine_processes))

    def end_all(self) -> None:
        """Kills every listed process that still runs, and ends the guard. Idempotent."""
        kill(self._listed)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=5)
            self._process = None


def kill(listed: Iterable[tuple[int, float]]) -> None:
    """SIGKILL to each (pid, creation time) that is still that process."""
    for pid, created_s in listed:
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - created_s) <= _CREATION_SLACK_S:
                process.kill()
        except psutil.Error:
            continue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listed: set[tuple[int, float]] = set()
    for line in sys.stdin:
        pid, created_s = line.split()
        listed.add((int(pid), float(created_s)))
    kill(listed)


if __name__ == "__main__":
    main()
