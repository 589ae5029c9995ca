"""One system's process as the run sees it: started early, held at the gate, asked, ended with all that it started."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving import engines

_PIPE_LIMIT_S = 5.0
_MEMORY = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]


class SystemFailed(Exception):
    """The system's process ended, or did not answer in time."""


class Child:
    """`open_gate` gives it the card: until then it imports and waits."""

    def __init__(self, name: str, plan: engines.Plan, scratch: Path, module: str = "benchmarks.serving.system") -> None:
        self.name = name
        self.log = scratch / f"{name}.log"
        self._gate = scratch / f"{name}.gate"
        self._gate.unlink(missing_ok=True)
        environment = {**os.environ, "TENANTRY_BENCH_GATE": str(self._gate), "TENANTRY_BENCH_SEED": str(plan.seed)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, name, msgspec.json.encode(plan).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()

    def open_gate(self) -> None:
        self._gate.touch()

    def wait_ready(self, limit_s: float) -> dict[str, Any]:
        """:raises SystemFailed: with the last lines of its log."""
        return self._answer(limit_s)

    def ask(self, do: str, limit_s: float, **order: Any) -> dict[str, Any]:
        """:raises SystemFailed: with the last lines of its log."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode({"do": do, **order}) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SystemFailed(f"{self.name} has ended:\n{self.tail()}") from error
        return self._answer(limit_s)

    def end(self) -> None:
        """Kills its process group. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_PIPE_LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            raise SystemFailed(f"{self.name} did not answer in {limit_s:.0f} s:\n{self.tail()}") from None
        if not line:
            self._answers.put(b"")  # for whoever asks once more
            raise SystemFailed(f"{self.name} has ended:\n{self.tail()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise SystemFailed(f"{self.name}: {answer['error']}\n{self.tail()}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")


def wait_for_card(limit_s: float = 15.0, free_share: float = 0.9) -> None:
    """Returns once little of the card is in use, or the limit has passed: an ended process's memory comes back a moment later."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        found = subprocess.run(_MEMORY, capture_output=True, text=True, check=False)
        if found.returncode:
            return
        used, total = (float(part) for part in found.stdout.splitlines()[0].split(","))
        if used < (1 - free_share) * total:
            return
        time.sleep(0.2)
