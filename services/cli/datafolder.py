"""The data folder of `tenantry up`: what lies where, its secrets (files of mode 0600), and the lock that lets one process have it.

Other commands on the same machine find the router's address, the admin key and the demo's API keys here.
"""

import fcntl
import os
import secrets
from pathlib import Path
from typing import IO

import msgspec

from shared.errors import StartFailed

SERVICES = ("router", "registry", "worker", "supervisor")


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """`nats`: service -> its NATS password. `cluster`: what the worker salts prefix caches with."""

    admin_key: str
    cluster: str
    nats: dict[str, str]


class SavedKey(msgspec.Struct, frozen=True, kw_only=True):
    """An API key made for use on this machine."""

    key_id: str
    secret: str


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What `tenantry up` tells the other commands while it runs."""

    pid: int
    url: str
    nats_url: str
    pids: dict[str, int] = {}


class DataFolder:
    """Paths are made by `prepare`; reading works on a folder that another process owns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nats = path / "nats"
        self.logs = path / "logs"
        self.worker = path / "worker"
        self.admin_key_file = path / "admin.key"
        self.keys_file = path / "keys.json"
        self._secrets_file = path / "secrets.json"
        self._running_file = path / "running.json"
        self._nats_port_file = self.nats / "port"
        self._lock: IO[str] | None = None

    def prepare(self) -> None:
        """:raises StartFailed: the folder cannot be made or written."""
        try:
            for folder in (self.path, self.nats, self.logs, self.worker):
                folder.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise StartFailed(f"the data folder {self.path} cannot be used: {error.strerror}; name another with --data") from error

    def lock(self) -> None:
        """This process owns the folder until it ends, however it ends.

        :raises StartFailed: another `tenantry up` owns it.
        """
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise StartFailed(
                f"`tenantry up` is running on {self.path} already (process {owner}): stop it, or name another folder with --data"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def secrets(self) -> Secrets:
        """Made at the first start, kept afterwards."""
        if self._secrets_file.exists():
            return msgspec.json.decode(self._secrets_file.read_bytes(), type=Secrets)
        made = Secrets(
            admin_key="tadm_" + secrets.token_urlsafe(32),
            cluster=secrets.token_urlsafe(32),
            nats={service: secrets.token_urlsafe(32) for service in SERVICES},
        )
        write_private(self._secrets_file, msgspec.json.encode(made))
        write_private(self.admin_key_file, (made.admin_key + "\n").encode())
        return made

    def admin_key(self) -> str:
        """Empty if there is none."""
        return self.admin_key_file.read_text().strip() if self.admin_key_file.exists() else ""

    def api_keys(self) -> dict[str, SavedKey]:
        """By tenant; "*" is a gateway's."""
        return msgspec.json.decode(self.keys_file.read_bytes(), type=dict[str, SavedKey]) if self.keys_file.exists() else {}

    def save_api_keys(self, keys: dict[str, SavedKey]) -> None:
        write_private(self.keys_file, msgspec.json.format(msgspec.json.encode(keys)))

    def last_nats_port(self) -> int:
        """0 if there was none."""
        return int(self._nats_port_file.read_text()) if self._nats_port_file.exists() else 0

    def keep_nats_port(self, port: int) -> None:
        """Tenants' programs go on after a restart where the port stays."""
        self._nats_port_file.write_text(str(port))

    def announce(self, running: Running) -> None:
        write_private(self._running_file, msgspec.json.encode(running))

    def withdraw(self) -> None:
        self._running_file.unlink(missing_ok=True)

    def running(self) -> Running | None:
        """What was announced; it may be out of date after a kill -9."""
        if not self._running_file.exists():
            return None
        return msgspec.json.decode(self._running_file.read_bytes(), type=Running)


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file in one step; only its owner can read it."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
