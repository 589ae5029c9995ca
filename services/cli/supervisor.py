"""Starts and keeps alive what one machine needs: NATS, registry, worker, router; stops them in the reverse of their dependence.

Knows processes and the bus's users; what is then applied and printed is up.py's.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

import msgspec

from services.cli.child import Child, ChildSpec
from services.cli.datafolder import DataFolder, Running, Secrets
from services.cli.nats_users import service_users, tenant_users, tenants_in
from shared.bus import Bus, BusSettings, BusUnavailable, Entry, Message, Mirror, connect_with_patience, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts.state import STATE_BUCKET, TENANT_PREFIX
from shared.contracts.workers import REPORTS_SUBJECT, WorkerReport, decode_report
from shared.errors import StartFailed
from shared.runtime import Stop

Say = Callable[[str], None]

_RETRY_S = 0.5
_NATS_ATTEMPTS = 5


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Each service's own environment, secrets left out."""

    router: dict[str, str]
    registry: dict[str, str]
    worker: dict[str, str]
    router_grace_s: float = 40.0
    worker_grace_s: float = 40.0
    registry_grace_s: float = 10.0


class Supervisor:
    """`run` returns after a stop, with nothing left running. `worker_ready` and `nats_ready` are for whoever waits."""

    def __init__(self, folder: DataFolder, secrets: Secrets, settings: ServiceSettings, *, nats_port: int, url: str, say: Say) -> None:
        self.nats = EmbeddedNats(folder.nats, port=nats_port, users=service_users(secrets.nats), dies_with_parent=True)
        self.nats_ready = asyncio.Event()
        self.worker_ready = asyncio.Event()
        self.report: WorkerReport | None = None
        self._folder = folder
        self._secrets = secrets
        self._settings = settings
        self._url = url
        self._say = say
        self._children: list[Child] = []
        self._stopping = False

    def child(self, name: str) -> Child:
        return next(child for child in self._children if child.spec.name == name)

    async def run(self, stop: Stop) -> None:
        """:raises StartFailed: a process cannot be started, or dies again and again before it ever worked."""
        await self.nats.start()
        self.nats_ready.set()
        self._children = [Child(spec, self._say) for spec in self._specs()]
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(self._keep_nats()), tasks.create_task(self._watch())]
                running = [tasks.create_task(child.run()) for child in self._children]
                await stop.wait()
                await self._stop_children()
                for task in background:
                    task.cancel()
                for task in running:
                    await task
        finally:
            for child in self._children:
                child.kill()
            await self.nats.stop()
            self._folder.withdraw()

    def kill(self) -> None:
        """At once; requests in flight are cut."""
        for child in self._children:
            child.kill()

    def announce(self) -> None:
        """Tells the other commands where everything is."""
        pids = {child.spec.name: child.pid for child in self._children} | {"nats": self.nats.process.pid if self.nats.process else 0}
        self._folder.announce(Running(pid=os.getpid(), url=self._url, nats_url=self.nats.url, pids=pids))

    def _specs(self) -> list[ChildSpec]:
        """In the order of stopping."""
        own = {
            "router": (self._settings.router, self._settings.router_grace_s),
            "worker": (self._settings.worker, self._settings.worker_grace_s),
            "registry": (self._settings.registry, self._settings.registry_grace_s),
        }
        return [
            ChildSpec(
                name=name,
                command=(sys.executable, "-m", f"services.{name}"),
                environment={
                    **environment,
                    "TENANTRY_NATS_URL": self.nats.url,
                    "TENANTRY_NATS_USER": name,
                    "TENANTRY_NATS_PASSWORD": self._secrets.nats[name],
                },
                log=self._folder.logs / f"{name}.log",
                grace_s=grace_s,
            )
            for name, (environment, grace_s) in own.items()
        ]

    async def _stop_children(self) -> None:
        self._stopping = True
        for child in self._children:
            if not await child.stop():
                self._say(f"{child.spec.name} did not stop in {child.spec.grace_s:g} s and was killed")

    async def _keep_nats(self) -> None:
        while True:
            assert self.nats.process is not None
            code = await self.nats.process.wait()
            if self._stopping:
                return
            self._say(f"nats ended (exit code {code}); starting it again")
            for attempt in range(_NATS_ATTEMPTS):
                await asyncio.sleep(_RETRY_S)
                try:
                    await self.nats.start()
                    break
                except StartFailed:
                    if attempt == _NATS_ATTEMPTS - 1:
                        raise

    async def _watch(self) -> None:
        """Keeps the bus's users as the tenants' records say, and notices the worker's reports."""
        settings = BusSettings(url=self.nats.url, name="supervisor", user="supervisor", password=self._secrets.nats["supervisor"])
        bus = await connect_with_patience(settings, 30.0)
        try:
            await bus.subscribe(REPORTS_SUBJECT, self._reported)
            await self._follow_tenants(bus)
        finally:
            await bus.close()

    async def _follow_tenants(self, bus: Bus) -> None:
        while True:
            try:
                bucket = await open_bucket(bus, STATE_BUCKET)
                break
            except BusUnavailable:
                await asyncio.sleep(0.2)  # the registry makes it
        changed = asyncio.Event()

        def on_change(key: str, _: Entry | None) -> None:
            if key.startswith(TENANT_PREFIX):
                changed.set()

        in_force = self.nats.users
        mirror = Mirror(bus, bucket, on_change, keys=f"{TENANT_PREFIX}*")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mirror.run())
            await mirror.synced.wait()
            changed.set()
            while True:
                await changed.wait()
                await asyncio.sleep(0.1)  # a file that names many tenants makes one reload
                changed.clear()
                users = service_users(self._secrets.nats) + tenant_users(tenants_in(mirror.entries))
                if users == in_force:
                    continue
                try:
                    await self.nats.reload(users)
                    in_force = users
                except StartFailed as error:
                    self._say(f"the bus's users could not be changed, trying again: {error.message}")
                    changed.set()
                    await asyncio.sleep(_RETRY_S)

    def _reported(self, message: Message) -> None:
        try:
            report = decode_report(message.data)
        except msgspec.DecodeError:
            return
        self.report = report
        if report.state == "ready":
            self.worker_ready.set()


async def wait_for_port(port: int, timeout_s: float) -> None:
    """:raises StartFailed: nothing accepts connections in time."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        if time.monotonic() > give_up_at:
            raise StartFailed(f"the router did not listen on port {port} in {timeout_s:g} s; see its log")
        await asyncio.sleep(0.1)
