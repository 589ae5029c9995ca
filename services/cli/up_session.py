"""One run of `tenantry up`: waits until everything serves, applies the file, prints how to use it, ends on a signal."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread
import httpx

from services.cli import checks
from services.cli.apply import Outcome, apply
from services.cli.apply_command import print_outcome
from services.cli.child import last_line
from services.cli.client import Client
from services.cli.datafolder import DataFolder, SavedKey
from services.cli.manifest import Manifest
from services.cli.output import console, print_line
from services.cli.progress import ApplyProgress
from services.cli.ready import print_ready
from services.cli.supervisor import Supervisor
from services.cli.up_options import UpOptions, service_settings
from shared.contracts.admin import AdapterView
from shared.errors import StartFailed
from shared.runtime import Stop

_UNDERWAY = {"uploaded", "validating", "admitted", "loading"}
_START_S = 900.0  # a big model on a slow disk


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


def _engine_name(engine: str) -> str:
    return "vLLM" if engine == "vllm" else f"the {engine} engine"
