"""The process that outlives a killed front by a moment: reads "<pid> <creation time>" lines until its input ends, then kills those.

Run by its path, without the project on sys.path: it imports psutil and the standard library only.
"""

import signal
import sys
from collections.abc import Iterable

import psutil

_CREATION_SLACK_S = 0.05


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
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    listed: set[tuple[int, float]] = set()
    for line in sys.stdin:
        pid, created_s = line.split()
        listed.add((int(pid), float(created_s)))
    kill(listed)


if __name__ == "__main__":
    main()
