"""`python -m benchmarks.start_up` (`make bench-start`): seconds until everything is ready, and each process's memory.

`cold` is `make up` in a fresh clone of the last commit, its installation included; `first` is `tenantry up` from this checkout's
.venv on an empty data folder, `warm` on what the first left.
"""

import argparse
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from tests.e2e.stack import free_port, wait_for

_READY = "curl "  # `up` prints lines to paste once every adapter serves
_START_TIMEOUT_S = 600.0


@contextmanager
def warm_start(data: Path) -> Iterator[tuple[psutil.Process, float]]:
    argv = [str(machine.ROOT / ".venv" / "bin" / "tenantry"), "up", "--port", str(free_port()), "--data", str(data)]
    with started(argv, machine.ROOT, data.parent / "up.log") as found:
        yield found


def cold_s(folder: Path) -> float:
    """Seconds of `make up` in a fresh clone of the last commit, without the clone itself."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(machine.ROOT), str(clone)], check=True)
    argv = ["make", "up", f"ARGS=--port {free_port()} --data {folder / 'cold'}"]
    with started(argv, clone, folder / "cold.log") as (_, seconds):
        return seconds


@contextmanager
def started(argv: list[str], cwd: Path, log: Path) -> Iterator[tuple[psutil.Process, float]]:
    """The process and the seconds until its curl lines stood there; ends it as Ctrl-C does."""
    with log.open("wb") as out:
        started_s = monotonic()
        up = subprocess.Popen(argv, cwd=cwd, stdout=out, stderr=out, env=os.environ | {"COLUMNS": "200"}, start_new_session=True)
        try:

            def ready() -> bool:
                assert up.poll() is None, log.read_text(errors="replace")[-2000:]
                return _READY in log.read_text(errors="replace")

            wait_for(ready, _START_TIMEOUT_S, "tenantry up")
            yield psutil.Process(up.pid), monotonic() - started_s
        finally:
            if up.poll() is None:
                os.killpg(up.pid, signal.SIGINT)
                up.wait(60)


def memory(root: psutil.Process) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for process in (root, *root.children(recursive=True)):
        usage = process.memory_full_info()
        rows.append({"process": _name(process), "rss_mib": usage.rss / 2**20, "pss_mib": usage.pss / 2**20})
    return rows


def _name(process: psutil.Process) -> str:
    argv = process.cmdline()
    module = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "-m"), "")
    script = next((Path(word).stem for word in argv if word.endswith(".py")), "")
    return module or script or ("tenantry up" if "up" in argv else process.name())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description=__doc__)
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "start_up.json")
    args = parser.parse_args()
    context = machine.context()
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as folder:
        from_nothing_s = cold_s(Path(folder))
        data = Path(folder) / "data"
        with warm_start(data) as (_, first_s):
            pass
        with warm_start(data) as (root, warm_s):
            rows = memory(root)
    result = {"cold_s": from_nothing_s, "first_s": first_s, "warm_s": warm_s, "memory": rows, **context}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    title = f"ready after {from_nothing_s:.0f} s from a fresh clone, {first_s:.1f} s on an empty folder, {warm_s:.1f} s warm"
    table = Table(title=title)
    for column in ("process", "RSS MiB", "PSS MiB"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for row in rows:
        table.add_row(row["process"], f"{row['rss_mib']:.0f}", f"{row['pss_mib']:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
