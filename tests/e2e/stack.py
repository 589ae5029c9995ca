"""The whole of Tenantry as real processes on one machine, each of which a test may kill: nats-server, registry, worker, router.

Every service connects as its own NATS user with its own permissions, as in production.
"""

import base64
import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from services.cli.client import Client, ClientError
from shared.bus.embedded import NatsUser, server_binary, server_config
from shared.contracts import permissions

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
POOL = "main"


_COMING_BACK = frozenset({"unreachable", "timeout", "registry_unavailable", "bus_unavailable", "bus_timeout"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of `condition()`, which may fail for want of a connection or of a registry while things start."""
    give_up_at = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < give_up_at:
        try:
            value = condition()
        except (httpx.HTTPError, OSError) as error:
            value, last = None, error
        except ClientError as error:
            if error.peer_code not in _COMING_BACK:
                raise
            value, last = None, error
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come true in {timeout_s} s (last: {last!r})")


class Process:
    """One service process, started and broken at will; its log stays in `log`."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self.argv = argv
        self.env = env
        self.log = folder / f"{name}.log"
        self.popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        assert not self.running
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.argv, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
            )

    def kill(self) -> None:
        """kill -9 of this process alone; what it started must look after itself."""
        if self.running:
            assert self.popen is not None
            self.popen.kill()
            self.popen.wait(10)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then its exit code."""
        assert self.popen is not None
        if self.running:
            self.popen.terminate()
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"{self.name} did not stop in {timeout_s} s:\n{self.tail()}") from None
        return self.popen.returncode

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Stack:
    """`engine`: "vllm" (the demo base on the CPU) or "scripted". Ports are free ones; nothing is shared with other stacks."""

    def __init__(self, folder: Path, *, engine: str = "vllm", max_loras: int = 4, workers: int = 1, **worker_env: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.engine = engine
        self.nats_port = free_port()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin_key = secrets.token_urlsafe(32)
        self.keys: dict[str, str] = {}
        self.tenant_ids: dict[str, str] = {}
        self.nats_passwords = {name: secrets.token_hex(16) for name in ("router", "registry", "worker", "supervisor")}
        self.nats = Process("nats", [str(server_binary()), "-c", str(folder / "nats.conf")], dict(os.environ), folder)
        self.registry = self._service("registry", {"TENANTRY_REGISTRY_WORK_DIR": str(folder / "registry")})
        self.router = self._service(
            "router",
            {
                "TENANTRY_ROUTER_PORT": str(self.port),
                "TENANTRY_ROUTER_ADMIN_KEY_SHA256": hashlib.sha256(self.admin_key.encode()).hexdigest(),
            },
        )
        model = {"TENANTRY_WORKER_MODEL": str(DEMO / "base"), "TENANTRY_WORKER_LABEL": "qwen3-moe-demo"}
        settings = {
            "TENANTRY_WORKER_POOL_ID": POOL,
            "TENANTRY_WORKER_ENGINE": engine,
            "TENANTRY_WORKER_MAX_LORAS": str(max_loras),
            "TENANTRY_WORKER_MAX_LORA_RANK": "16",
            "TENANTRY_WORKER_CACHE_DIR": str(folder / "cache"),
            **model,
            **worker_env,
        }
        self.workers = [self._service("worker", settings | {"TENANTRY_WORKER_WORKER_ID": f"w{n}"}, suffix=str(n)) for n in range(workers)]
        self.admin = Client(self.url, self.admin_key)

    @property
    def worker(self) -> Process:
        return self.workers[0]

    def _service(self, name: str, settings: dict[str, str], suffix: str = "") -> Process:
        env = {key: value for key, value in os.environ.items() if not key.startswith("TENANTRY_")}
        env |= {
            "TENANTRY_NATS_URL": f"nats://127.0.0.1:{self.nats_port}",
            "TENANTRY_NATS_USER": name,
            "TENANTRY_NATS_PASSWORD": self.nats_passwords[name],
            "TENANTRY_LOG_LEVEL": os.environ.get("TENANTRY_LOG_LEVEL", "info"),
            **settings,
        }
        return Process(name + suffix, [sys.executable, "-m", f"services.{name}"], env, self.folder)

    def nats_users(self) -> tuple[NatsUser, ...]:
        own = {"router": permissions.ROUTER, "registry": permissions.REGISTRY, "worker": permissions.WORKER, "supervisor": None}
        return tuple(NatsUser(name=name, password=self.nats_passwords[name], permissions=allowed) for name, allowed in own.items())

    def write_nats_config(self, extra: tuple[NatsUser, ...] = ()) -> None:
        text = server_config(port=self.nats_port, store=self.folder / "jetstream", users=self.nats_users() + extra)
        (self.folder / "nats.conf").write_text(text)

    def start(self, timeout_s: float = 120.0) -> None:
        self.write_nats_config()
        self.start_nats()
        self.registry.start()
        for worker in self.workers:
            worker.start()
        self.router.start()
        self.wait_ready(timeout_s)

    def start_nats(self) -> None:
        self.nats.start()
        wait_for(lambda: socket.create_connection(("127.0.0.1", self.nats_port), 1).close() or True, 10, "nats-server")

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """The router answers, and every worker stands in the pool with a fresh report."""

        def ready() -> bool:
            for process in (self.registry, self.router, *self.workers):
                assert process.running, f"{process.name} ended:\n{process.tail()}"
            if httpx.get(f"{self.url}/ready", timeout=2).status_code != 200:
                return False
            pools = httpx.get(f"{self.url}/admin/v1/top", headers=self.admin_headers, timeout=5)
            return pools.status_code == 200 and self._workers_ready(pools.json())

        wait_for(ready, timeout_s, "a ready stack")

    def _workers_ready(self, top: dict[str, Any]) -> bool:
        reports = json.dumps(top)
        return all(worker.env["TENANTRY_WORKER_WORKER_ID"] in reports for worker in self.workers) and '"ready"' in reports

    def reports(self) -> list[dict[str, Any]]:
        """The last report of every worker that is heard of (one a second)."""
        workers = [worker for pool in self.admin.top()["pools"] for worker in pool["workers"]]
        return [worker["report"] for worker in workers if worker["report"] is not None]

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin_key}"}

    def add_tenant(self, name: str, quota_mb: int = 1200, **options: Any) -> None:
        view = self.admin.add_tenant(name, vram_quota_mb=quota_mb, **options)
        self.tenant_ids[name] = view.tenant_id
        self.keys[name] = self.admin.add_key(name, label="test").secret

    def allow_label(self, label: str = "tenantry/qwen3-moe-demo@v1") -> None:
        """Tells the matrix that this label means the base this stack serves."""
        self.admin.set_label(label, self.base_identity())

    def base_identity(self) -> str:
        pools = self.admin.pools()
        return pools[0]["base"]

    def stop(self) -> None:
        """Everything, in order; what does not end by itself is killed."""
        self.admin.close()
        for process in (self.router, *self.workers, self.registry, self.nats):
            if process.running:
                with contextlib.suppress(AssertionError):
                    process.stop(20)


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def goldens() -> dict[str, list[dict[str, str]]]:
    """Question and answer pairs of "base" and each demo adapter."""
    found = json.loads((DEMO / "golden.json").read_text())
    return {name: found[name] for name in ("base", "lora_sales", "lora_cs", "lora_finance")}


def random_name() -> str:
    return "x" + base64.b32encode(secrets.token_bytes(5)).decode().lower().rstrip("=")
