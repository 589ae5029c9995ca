"""`python -m services.worker.health FILE`: exit code 0 while the worker says that it is ready, for a container's healthcheck.

The worker writes its state into the file with every report; one that has stopped doing so is not healthy whatever the file says.
"""

import sys
import time
from pathlib import Path

LATEST_S = 10.0
READY = "ready"


def write(path: Path, state: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(state)
    unfinished.replace(path)


def trouble(path: Path, now_s: float) -> str:
    """What is wrong, empty if nothing is. `now_s`: seconds since 1970, as files' times are."""
    try:
        state, written_s = path.read_text(), path.stat().st_mtime
    except OSError:
        return "the worker has not said anything yet"
    if now_s - written_s > LATEST_S:
        return f"the worker said `{state}` {now_s - written_s:.0f} s ago and nothing since"
    return "" if state == READY else f"the worker is `{state}`"


if __name__ == "__main__":
    sys.exit(trouble(Path(sys.argv[1]), time.time()) or 0)  # noqa: TID251  compared with a file's time
