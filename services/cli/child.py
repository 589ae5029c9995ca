"""One supervised process: started in a session of its own, started again with back-off when it ends, stopped with a deadline."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from shared.errors import StartFailed
from shared.process import die_with_parent

_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_S = 60.0  # after running this long a death is the first again
_SETTINGS_REFUSED = 2  # shared.runtime's exit code: another start would end the same


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`environment` is added to ours; secrets travel there, never on the command line."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    grace_s: float


class Child:
    """`run` until `stop`. `say` gets one line per death."""

    def __init__(self, spec: ChildSpec, say: Callable[[str], None]) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0
        self.proven = False  # set by whoever sees it work; a child never proven may not start again for ever
        self._say = say
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    async def run(self) -> None:
        """:raises StartFailed: it ended three times, or refused its settings, before anybody saw it work."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping.is_set():
            started_at = loop.time()
            await self._start()
            assert self.process is not None
            code = await self.process.wait()
            self._end_group()
            if self._stopping.is_set():
                return
            why = f"{self.spec.name} ended ({_how(code)}): {last_line(self.spec.log)}"
            deaths = 1 if loop.time() - started_at > _STEADY_S else deaths + 1
            if not self.proven and (deaths >= 3 or code == _SETTINGS_REFUSED):
                raise StartFailed(f"{why}. Log: {self.spec.log}", log=str(self.spec.log))
            delay_s = _BACKOFF_S[min(deaths, len(_BACKOFF_S)) - 1]
            self._say(f"{why}; starting it again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def stop(self) -> bool:
        """Asks it to end, waits its grace, then kills its whole group. True if it ended by itself."""
        self._stopping.set()
        process = self.process
        if process is None or process.returncode is not None:
            return True
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.spec.grace_s)
        except TimeoutError:
            self._end_group()
            await process.wait()
            return False
        self._end_group()
        return True

    def kill(self) -> None:
        self._stopping.set()
        self._end_group()

    async def _start(self) -> None:
        environment = {**os.environ, **self.spec.environment}
        with self.spec.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self.starts += 1

    def _end_group(self) -> None:
        """Whatever of its session is left (an engine's own processes)."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """What the process said last, short enough for one line."""
    if not log.exists():
        return "it wrote nothing"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it wrote nothing"


def _how(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
