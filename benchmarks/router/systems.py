"""Each system under test, started whole: the gateway alone on one core, everything else on the other.

A system has three faces, one per kind of load: `canned` (backend that answers at once), `fast` (the scripted engine as fast as
it goes) and `paced` (the scripted engine at 50 tokens/s per stream).
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.router import canned, peers
from shared.bus.embedded import server_binary, server_config
from tests.e2e.stack import DEMO, ROOT, Process, Stack, free_port, wait_for

GATEWAY_CORE = "0"
OTHER_CORE = "1"
TOKENS_PER_S = 50.0
KINDS = ("canned", "fast", "paced")
_LITELLM_KEY = "sk-bench"
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Face:
    """Where the load goes, and whose CPU counts. `gateway` is empty for `direct`."""

    port: int
    model: str = canned.MODEL
    key: str = "none"
    gateway: tuple[int, ...] = ()
    beside: dict[str, int] = field(default_factory=dict)  # what else works for a request, by name; the engine's app is in one of them


Faces = dict[str, Face]
System = Callable[[], AbstractContextManager[Faces]]


class Started(contextlib.ExitStack):
    """Processes that end with the block, and a folder for their logs."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="tenantry-bench-")))

    def start(self, name: str, argv: list[str], core: str, **env: str) -> Process:
        process = Process(name, pinned(argv, core), dict(os.environ) | env, self.folder)
        process.start()
        self.callback(process.kill)
        return process

    def module(self, name: str, argv: list[str], core: str, **env: str) -> Process:
        return self.start(name, [*python(), *argv], core, **env)

    def http_backend(self, kind: str) -> tuple[int, Process]:
        port = free_port()
        if kind == "canned":
            argv = ["benchmarks.router.canned", "http", "--port", str(port)]
        else:
            rate = TOKENS_PER_S if kind == "paced" else 0.0
            argv = ["benchmarks.router.scripted_http", "serve", "--port", str(port), "--tokens-per-s", str(rate)]
        process = self.module(f"backend-{kind}", argv, OTHER_CORE)
        answers(port, "/health", process)
        return port, process


def python() -> list[str]:
    return [str(ROOT / ".venv" / "bin" / "python"), "-m"]


def pinned(argv: list[str], core: str) -> list[str]:
    return ["taskset", "-c", core, *argv]


def answers(port: int, path: str, process: Process) -> None:
    def ready() -> bool:
        assert process.running, f"{process.name} ended:\n{process.tail()}"
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code == 200

    wait_for(ready, _START_TIMEOUT_S, f"an answer of {process.name}")


@contextlib.contextmanager
def direct() -> Iterator[Faces]:
    with Started() as started:
        faces: Faces = {}
        for kind in KINDS:
            port, backend = started.http_backend(kind)
            faces[kind] = Face(port, beside={"backend": backend.pid})
        yield faces


@contextlib.contextmanager
def litellm() -> Iterator[Faces]:
    with Started() as started:
        backends = {kind: started.http_backend(kind) for kind in KINDS}
        config = {
            "model_list": [
                {
                    "model_name": kind,
                    "litellm_params": {"model": f"openai/{canned.MODEL}", "api_base": f"http://127.0.0.1:{port}/v1", "api_key": "none"},
                }
                for kind, (port, _) in backends.items()
            ],
            "general_settings": {"master_key": _LITELLM_KEY},
        }
        path = started.folder / "litellm.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        port = free_port()
        argv = [peers.binary("litellm"), "--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        gateway = started.start("litellm", argv, GATEWAY_CORE, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR")
        answers(port, "/health/liveliness", gateway)
        yield {kind: Face(port, kind, _LITELLM_KEY, (gateway.pid,), {"backend": backend.pid}) for kind, (_, backend) in backends.items()}


def vllm_router(policy: str) -> System:
    @contextlib.contextmanager
    def start() -> Iterator[Faces]:
        with Started() as started:
            faces: Faces = {}
            for kind in KINDS:
                backend_port, backend = started.http_backend(kind)
                port = free_port()
                argv = [peers.binary("vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
                argv += [
                    "--worker-urls",
                    f"http://127.0.0.1:{backend_port}",
                    "--prometheus-port",
                    str(free_port()),
                    "--log-level",
                    "warning",
                ]
                gateway = started.start(f"vllm-router-{kind}", argv, GATEWAY_CORE)
                answers(port, "/health", gateway)
                faces[kind] = Face(port, gateway=(gateway.pid,), beside={"backend": backend.pid})
            yield faces

    return start


@contextlib.contextmanager
def tenantry() -> Iterator[Faces]:
    """`canned` has the bus backend in the registry's and the worker's place; the others are the whole real stack and one adapter."""
    with Started() as started:
        faces = {"canned": _canned_tenantry(started)}
        for kind in ("fast", "paced"):
            rate = TOKENS_PER_S if kind == "paced" else 0.0
            stack = Stack(
                started.folder / kind,
                engine="scripted",
                TENANTRY_WORKER_SCRIPTED_TOKENS_PER_S=str(rate),
                TENANTRY_WORKER_MAX_NUM_SEQS="256",
            )
            stack.router.argv = pinned(stack.router.argv, GATEWAY_CORE)
            for process in (stack.nats, stack.registry, *stack.workers):
                process.argv = pinned(process.argv, OTHER_CORE)
            started.callback(stack.stop)
            stack.start()
            stack.allow_label()
            stack.add_tenant("sales")
            stack.admin.upload("sales", "lora_sales", DEMO / "adapters" / "lora_sales")
            beside = {"nats": stack.nats.pid, "worker": stack.worker.pid, "registry": stack.registry.pid}
            faces[kind] = Face(stack.port, "lora_sales", stack.keys["sales"], (stack.router.pid,), beside)
        yield faces


def _canned_tenantry(started: Started) -> Face:
    nats_port, port = free_port(), free_port()
    config = started.folder / "nats.conf"
    config.write_text(server_config(port=nats_port, store=started.folder / "jetstream", users=()))
    nats = started.start("nats", [str(server_binary()), "-c", str(config)], OTHER_CORE)
    wait_for(lambda: "Server is ready" in nats.log.read_text(), 10, "nats-server")
    url = f"nats://127.0.0.1:{nats_port}"
    backend = started.module("canned-bus", ["benchmarks.router.canned", "bus", "--nats", url], OTHER_CORE)
    wait_for(lambda: "ready" in backend.log.read_text(), 30, "the canned worker")
    gateway = started.module("router", ["services.router"], GATEWAY_CORE, TENANTRY_NATS_URL=url, TENANTRY_ROUTER_PORT=str(port))
    answers(port, "/ready", gateway)
    return Face(port, key=canned.KEY, gateway=(gateway.pid,), beside={"nats": nats.pid, "backend": backend.pid})


SYSTEMS: dict[str, System] = {
    "direct": direct,
    "tenantry": tenantry,
    "litellm": litellm,
    "vllm-router": vllm_router("cache_aware"),
    "vllm-router round_robin": vllm_router("round_robin"),
}
