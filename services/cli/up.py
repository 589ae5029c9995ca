"""`tenantry up`: everything on this machine in one command, from checks to ready-to-paste lines; Ctrl-C drains and ends all of it."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import httpx
import msgspec
import typer

from services.cli import checks
from services.cli.apply import Outcome, apply
from services.cli.apply_command import print_outcome
from services.cli.child import last_line
from services.cli.client import Client
from services.cli.datafolder import DataFolder, SavedKey, Secrets
from services.cli.manifest import Manifest, read
from services.cli.output import console, print_line
from services.cli.progress import ApplyProgress
from services.cli.ready import print_ready
from services.cli.supervisor import ServiceSettings, Supervisor
from shared import log as logging
from shared.contracts.admin import AdapterView
from shared.errors import ConfigInvalid, StartFailed, TenantryError
from shared.runtime import Stop

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
DEMO_LABEL = "tenantry/qwen3-moe-demo@v1"
_UNDERWAY = {"uploaded", "validating", "admitted", "loading"}
_START_S = 900.0  # a big model on a slow disk


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    data: Path
    model: str
    label: str  # what adapters name as this base: label or label@revision
    engine: str
    max_loras: int
    max_lora_rank: int
    dtype: str
    engine_args: dict[str, Any]
    config: Path | None
    nats_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def up(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The router's, on 127.0.0.1.")] = 8080,
    data: Annotated[Path, typer.Option("--data", envvar="TENANTRY_DATA", help="State, keys and logs; kept between runs.")] = Path(
        ".tenantry"
    ),
    model: Annotated[str, typer.Option("--model", help="Model folder or hub id; default: the bundled demo base.")] = "",
    label: Annotated[
        str, typer.Option("--label", help="What adapters name as their base (label or label@revision); default: the hub id.")
    ] = "",
    max_loras: Annotated[int, typer.Option("--max-loras", min=1, help="Slots for adapters.")] = 8,
    max_lora_rank: Annotated[int, typer.Option("--max-lora-rank", min=1, help="1, 8, 16, 32, 64, ...")] = 16,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, float16, bfloat16; default: float32 for the demo.")] = "",
    engine_arg: Annotated[str, typer.Option("--engine-arg", metavar="JSON", help="Further vLLM arguments as one JSON object.")] = "{}",
    config: Annotated[Path | None, typer.Option("--config", help="The YAML file to apply; default: the demo's.")] = None,
    demo: Annotated[bool, typer.Option("--demo/--no-demo", help="Apply the demo's file where no --config and no --model is given.")] = True,
    nats_port: Annotated[int, typer.Option("--nats-port", help="Default: a free one, the same at the next start.")] = 0,
    engine: Annotated[str, typer.Option("--engine", hidden=True)] = "vllm",
) -> None:
    """Start NATS, registry, one worker and the router here, apply a file, and say how to use it."""
    try:
        engine_args = _engine_args(engine_arg)
    except ConfigInvalid as error:
        _fail(error)
        raise SystemExit(2) from error
    if config is None and demo and not model:
        config = DEMO / "tenantry.yaml"
    options = UpOptions(
        port=port,
        data=data.absolute(),
        model=model or str(DEMO / "base"),
        label=label or (DEMO_LABEL if not model else model if not Path(model).exists() else ""),
        engine=engine,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        dtype=dtype or "float32",
        engine_args=engine_args,
        config=config,
        nats_port=nats_port,
    )
    raise SystemExit(run(options))


def run(options: UpOptions) -> int:
    """The exit code: 0 after a clean stop, 2 when it could not start, 1 when it failed later."""
    try:
        manifest = read(options.config) if options.config is not None else None
        folder = prepare(options)
    except TenantryError as error:
        _fail(error)
        return 2
    logging.configure("up", {"TENANTRY_LOG_LEVEL": "error"} | dict(os.environ))
    session = UpSession(options, folder, manifest)
    try:
        asyncio.run(session.main())
    except BaseExceptionGroup as group:
        ours, others = group.split(TenantryError)
        if ours is None or others is not None:
            raise
        _fail(_first(ours))
        return 1 if session.served else 2
    return 0


def prepare(options: UpOptions) -> DataFolder:
    """Checks in the order in which they are cheap; the data folder is locked afterwards.

    :raises StartFailed: one line with what to do.
    """
    checks.check_packages(options.engine)
    checks.check_model(options.model)
    folder = DataFolder(options.data)
    folder.prepare()
    folder.lock()
    checks.check_port(options.port, "--port")
    if options.nats_port > 0:
        checks.check_port(options.nats_port, "--nats-port")
    checks.check_disk(options.data)
    checks.check_memory(options.engine, Path(options.model).expanduser())
    return folder


def service_settings(options: UpOptions, secrets: Secrets, folder: DataFolder) -> ServiceSettings:
    """What each service is told; NATS credentials are the supervisor's to add."""
    label = options.label.rsplit("/", 1)[-1].split("@", 1)[0]
    worker = {
        "TENANTRY_WORKER_MODEL": options.model,
        "TENANTRY_WORKER_LABEL": label,
        "TENANTRY_WORKER_ENGINE": options.engine,
        "TENANTRY_WORKER_DTYPE": options.dtype,
        "TENANTRY_WORKER_MAX_LORAS": str(options.max_loras),
        "TENANTRY_WORKER_MAX_LORA_RANK": str(options.max_lora_rank),
        "TENANTRY_WORKER_ENGINE_ARGS": json.dumps(options.engine_args),
        "TENANTRY_WORKER_WORKER_ID": "worker-1",
        "TENANTRY_WORKER_CACHE_DIR": str(folder.worker),
        "TENANTRY_WORKER_CLUSTER_SECRET": secrets.cluster,
    }
    return ServiceSettings(
        router={
            "TENANTRY_ROUTER_PORT": str(options.port),
            "TENANTRY_ROUTER_ADMIN_KEY_SHA256": hashlib.sha256(secrets.admin_key.encode()).hexdigest(),
        },
        registry={"TENANTRY_REGISTRY_WORK_DIR": str(folder.path / "registry")},
        worker=worker,
    )


class UpSession:
    """One run. `served`: everything had been ready once."""

    def __init__(self, options: UpOptions, folder: DataFolder, manifest: Manifest | None) -> None:
        self.served = False
        self._options = options
        self._folder = folder
        self._manifest = manifest
        self._secrets = folder.secrets()
        self._supervisor = Supervisor(
            folder,
            self._secrets,
            service_settings(options, self._secrets, folder),
            nats_port=_nats_port(options, folder),
            url=options.url,
            say=lambda line: console.print(line, style="yellow", markup=False, soft_wrap=True),
        )

    async def main(self) -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled, stop, signal.Signals(number).name)
        async with asyncio.TaskGroup() as tasks:
            front = tasks.create_task(self._front())
            await self._supervisor.run(stop)
            front.cancel()
        print_line("Stopped; the state is kept in " + str(self._options.data))

    def _signalled(self, stop: Stop, name: str) -> None:
        if stop.is_set:
            print_line("Stopping at once")
            self._supervisor.kill()
            return
        print_line("\nDraining and stopping (again: at once) ...")
        stop.set(name)

    async def _front(self) -> None:
        await self._wait_until_up()
        outcome = await anyio.to_thread.run_sync(self._apply, abandon_on_cancel=True)
        self.served = True
        self._supervisor.announce()
        print_ready(
            url=self._options.url,
            nats_url=self._supervisor.nats.url,
            folder=self._folder,
            outcome=outcome,
            tenants=self._client().tenants(),
            keys=self._folder.api_keys(),
            routing=self._client().routing(),
        )

    async def _wait_until_up(self) -> None:
        """:raises StartFailed: not everything came up in time."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        with console.status("starting NATS") as status:
            await self._supervisor.nats_ready.wait()
            self._folder.keep_nats_port(self._supervisor.nats.port)
            self._say(f"NATS on {self._supervisor.nats.url}", started_at)
            self._supervisor.announce()
            status.update("starting the router and the registry")
            await self._until(self._router_ready, "router", started_at)
            self._supervisor.child("router").proven = True
            self._supervisor.child("registry").proven = True
            self._say(f"registry; router on {self._options.url}", started_at)
            model = self._options.label or Path(self._options.model).name
            while not self._supervisor.worker_ready.is_set():
                status.update(f"worker: {_engine_name(self._options.engine)} loads {model} ({loop.time() - started_at:.0f} s)")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._supervisor.worker_ready.wait(), 0.5)
                if loop.time() - started_at > _START_S:
                    raise StartFailed(f"the worker is not ready after {_START_S:.0f} s; see {self._folder.logs / 'worker.log'}")
            self._supervisor.child("worker").proven = True
            self._say(f"worker with {model}", started_at)
            self._supervisor.announce()

    async def _until(self, ready: Callable[[], Awaitable[bool]], name: str, started_at: float) -> None:
        loop = asyncio.get_running_loop()
        while not await ready():
            if loop.time() - started_at > 60.0:
                log = self._folder.logs / f"{name}.log"
                raise StartFailed(f"the {name} is not ready after 60 s: {last_line(log)}. Log: {log}")
            await asyncio.sleep(0.1)

    async def _router_ready(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as http:
                return (await http.get(f"{self._options.url}/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    def _say(self, text: str, started_at: float) -> None:
        seconds = asyncio.get_running_loop().time() - started_at
        console.print(f"[green]✓[/green] {text:<66} {seconds:>5.1f} s")

    def _client(self) -> Client:
        return Client(self._options.url, self._secrets.admin_key)

    def _apply(self) -> Outcome:
        """In a thread: labels, what the file says, and API keys for use on this machine."""
        with self._client() as client:
            base = self._base(client)
            if self._options.label and base not in client.matrix().labels.get(self._options.label, ()):
                client.set_label(self._options.label, base)
            settled = _settle(client)
            if self._manifest is None or self._options.config is None:
                return Outcome(changes=(), adapters=tuple(settled))
            with ApplyProgress() as listener:
                outcome = apply(client, self._manifest, self._options.config.parent, listener=listener)
            if outcome.changed or outcome.failed:
                print_outcome(outcome)
            self._folder.save_api_keys(_keys(client, self._manifest, self._folder.api_keys()))
            return outcome

    def _base(self, client: Client) -> str:
        """The identity of the base that this machine's worker serves."""
        report = self._supervisor.report
        pools = [pool for pool in client.pools() if report is None or pool.get("pool_id") == report.pool_id]
        if not pools:
            raise StartFailed("the worker runs and the registry knows no pool of it; see the registry's log")
        return str(pools[0]["base"])


def _settle(client: Client) -> list[AdapterView]:
    """Adapters of an earlier run are loaded again by the new worker; waits for them.

    :raises StartFailed: they are still under way after 5 minutes.
    """
    with console.status("loading the adapters of the last run"):
        for _ in range(1500):
            views = client.adapters()
            if not any(view.state in _UNDERWAY for view in views):
                return views
            time.sleep(0.2)
    raise StartFailed("the adapters of the last run are not loaded after 5 minutes; see the worker's log")


def _keys(client: Client, manifest: Manifest, kept: dict[str, SavedKey]) -> dict[str, SavedKey]:
    """One API key per tenant of the file and a gateway's ("*") for all of them; those that still hold are kept."""
    valid = {key.key_id: key for key in client.keys() if not key.revoked}  # noqa: SIM118  (not a dict)
    wanted = manifest.tenant_names
    keys = {name: key for name, key in kept.items() if key.key_id in valid}
    for name in wanted:
        if name not in keys:
            made = client.add_key(name, label="made by tenantry up")
            keys[name] = SavedKey(key_id=made.key_id, secret=made.secret)
    if wanted and ("*" not in keys or not set(wanted) <= set(valid[keys["*"].key_id].tenants)):
        made = client.add_key(*wanted, gateway=True, label="gateway, made by tenantry up")
        keys["*"] = SavedKey(key_id=made.key_id, secret=made.secret)
    return keys


def _nats_port(options: UpOptions, folder: DataFolder) -> int:
    """The one asked for, else the last run's if it is free, else any."""
    if options.nats_port > 0:
        return options.nats_port
    last = folder.last_nats_port()
    if last:
        with contextlib.suppress(StartFailed):
            checks.check_port(last, "--nats-port")
            return last
    return -1


def _engine_args(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigInvalid(
            f"--engine-arg must be a JSON object such as '{{\"max_model_len\": 2048}}': {error}", where="--engine-arg"
        ) from error


def _engine_name(engine: str) -> str:
    return "vLLM" if engine == "vllm" else f"the {engine} engine"


def _first(group: BaseExceptionGroup[TenantryError]) -> TenantryError:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, TenantryError)
    return found


def _fail(error: TenantryError) -> None:
    sys.stderr.write(f"tenantry up: {error.message}\n")
