"""A real registry on a real bus, asked as the router asks it, with workers that speak the contracts and hold nothing."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from ulid import ULID

from services.registry.__main__ import serve
from services.registry.settings import RegistrySettings
from shared.bus import Bus, Consumer, NoResponder, RequestTimeout, open_bucket, open_objects, publish_durable
from shared.contracts import adapters, admin, state, workers
from shared.contracts.adapters import (
    AdapterDrained,
    AdapterFailed,
    AdapterLoaded,
    Command,
    LoadAdapter,
    PoolEntry,
)
from shared.contracts.base import BaseDescription, EngineLimits
from shared.contracts.errors import ErrorInfo, to_error
from shared.errors import NotFound, TenantryError
from shared.runtime import Stop, end
from tests import adapters_factory as factory
from tests.waiting import until_async

T = TypeVar("T")
POOL = "main"
QUICK = RegistrySettings(reconcile_s=0.1, reissue_s=0.4, abandoned_s=1.2, housekeeping_s=0.2, heartbeat_ms=50)


def base_of(label: str = "tiny", fill: str = "0") -> BaseDescription:
    base = factory.make_base("moe", label=label)
    return msgspec.structs.replace(base, identity=f"{label}@{fill * 64}")


BASE = base_of()
LIMITS = EngineLimits(slots=4, max_rank=16, bytes_per_rank=1000)
SLOT_BYTES = 8000  # what an adapter of rank 4 is charged: rank class 8


class Admin:
    """Asks the registries as the router does."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.patience_s = 20.0
        self._names = itertools.count()

    async def ask(self, request: Any, timeout_s: float = 0.0) -> Any:
        """:raises TenantryError: the refusal in the reply."""
        reply = admin.decode_reply(await self.bus.request(admin.ADMIN_SUBJECT, admin.encode(request), timeout_s or self.patience_s))
        if reply.error is not None:
            raise to_error(reply.error)
        return reply.result

    async def tenant(self, name: str, quota: int = 10 * SLOT_BYTES, **fields: Any) -> admin.TenantView:
        made = await self.ask(admin.CreateTenant(name=name, vram_quota_bytes=quota, **fields))
        return msgspec.convert(made, admin.TenantView)

    async def stage(self, archive: bytes | Path, folder: Path, bucket: str = adapters.STAGING_BUCKET) -> str:
        """The name under which the archive (or a folder, packed) lies in the bucket."""
        content = archive if isinstance(archive, bytes) else factory.pack(archive, "tar.gz")
        name = f"staged-{next(self._names)}-{ULID()}"
        file = folder / name
        file.write_bytes(content)
        await (await open_objects(self.bus, bucket)).put_file(name, file)
        return name

    async def add(self, tenant: str, name: str, archive: bytes | Path, folder: Path, **fields: Any) -> admin.AdapterView:
        staged = await self.stage(archive, folder)
        request = admin.AddAdapter(tenant=tenant, name=name, object=staged, **{"wait_s": 10.0, **fields})
        return msgspec.convert(await self.ask(request), admin.AdapterView)

    async def show(self, tenant: str, name: str, version: int = 0) -> admin.AdapterView:
        return msgspec.convert(await self.ask(admin.ShowAdapter(tenant=tenant, name=name, version=version)), admin.AdapterView)

    async def held(self, tenant: str) -> int:
        views = msgspec.convert(await self.ask(admin.ListTenants()), list[admin.TenantView])
        return next(view.vram_held_bytes for view in views if view.name == tenant)

    async def pool(self) -> PoolEntry:
        found = await (await open_bucket(self.bus, state.STATE_BUCKET)).get(state.POOL_PREFIX + POOL)
        assert found is not None
        return adapters.decode_pool(found.value)

    async def events(self, tenant: str = "", name: str = "") -> list[adapters.AdapterEvent]:
        return msgspec.convert(await self.ask(admin.ListEvents(tenant=tenant, name=name)), list[adapters.AdapterEvent])

    async def in_state(self, tenant: str, name: str, *states: str, version: int = 0) -> admin.AdapterView:
        view: admin.AdapterView | None = None

        async def is_there() -> bool:
            nonlocal view
            try:
                view = await self.show(tenant, name, version)
            except (NotFound, NoResponder, RequestTimeout):
                return False
            return view.state in states

        await until_async(is_there, what=f"{tenant}/{name} is one of {states}")
        assert view is not None
        return view


Behaviour = Callable[[Command], Awaitable[ErrorInfo | None]]


class FakeWorker:
    """Obeys commands at once. `hold`: while set, commands wait. `behave`: an error to fail the load with."""

    def __init__(self, bus: Bus, worker_id: str = "w1", limits: EngineLimits = LIMITS, base: BaseDescription = BASE) -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.limits = limits
        self.base = base
        self.incarnation = str(ULID())
        self.open = asyncio.Event()
        self.open.set()
        self.commands: list[Command] = []
        self.fail_with: ErrorInfo | None = None
        self.deaf = False  # takes commands and does nothing

    async def hello(self) -> int:
        hello = workers.WorkerHello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            pool_id=POOL,
            base=self.base,
            limits=self.limits,
            engine="fake",
        )
        reply = admin.decode_reply(await self.bus.request(workers.HELLO_SUBJECT, workers.encode(hello), 10.0))
        if reply.error is not None:
            raise to_error(reply.error)
        return msgspec.convert(reply.result, workers.HelloAccepted).generation

    async def restart(self) -> None:
        self.incarnation = str(ULID())
        await self.hello()

    async def obey(self) -> None:
        subjects = (adapters.load_subject(self.worker_id), adapters.drain_subject(self.worker_id))
        consumer = Consumer(self.bus, adapters.COMMANDS_STREAM, f"worker-{self.worker_id}", subjects, ack_wait_s=10.0)
        async for delivery in consumer.messages():
            command = adapters.decode_command(delivery.data)
            self.commands.append(command)
            await self.open.wait()
            if not self.deaf:
                await self.acknowledge(command)
            await delivery.ack()

    async def acknowledge(self, command: Command, **changes: Any) -> None:
        common = {
            "pool_id": command.pool_id,
            "adapter_id": command.adapter_id,
            "worker_id": self.worker_id,
            "incarnation": self.incarnation,
            "generation": command.generation,
        } | changes
        kind, ack = "drained", None
        if isinstance(command, LoadAdapter) and self.fail_with is not None:
            kind, ack = "failed", AdapterFailed(**common, error=self.fail_with)
        elif isinstance(command, LoadAdapter):
            kind = "loaded"
            ack = AdapterLoaded(**common, modules_matched=3, probe_difference=0.5, fetch_ms=1.0, load_ms=2.5, bytes_loaded=10)
        else:
            ack = AdapterDrained(
                **common,
                slot_bytes_returned=SLOT_BYTES,
                host_bytes_freed=1,
                device_free_bytes_before=0,
                device_free_bytes_after=0,
                completed=0,
                aborted=0,
            )
        await publish_durable(self.bus, adapters.ack_subject(kind, self.worker_id), adapters.encode(ack))


@asynccontextmanager
async def running_registry(bus: Bus, settings: RegistrySettings = QUICK, asked_by: Bus | None = None) -> AsyncIterator[None]:
    """A registry in this process, asked over the other bus if given; gone when the block ends."""
    stop = Stop()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(bus, settings, stop))
        await until_async(lambda: _answers(asked_by or bus), what="the registry answers")
        try:
            yield
        finally:
            stop.set("the test is over")


async def _answers(bus: Bus) -> bool:
    try:
        await Admin(bus).ask(admin.GetMatrix(), timeout_s=1.0)
    except TenantryError:
        return False
    return True


@asynccontextmanager
async def obeying(*fakes: FakeWorker) -> AsyncIterator[None]:
    """The workers have said hello and obey."""
    async with asyncio.TaskGroup() as group:
        for fake in fakes:
            await fake.hello()
        tasks = [group.create_task(fake.obey()) for fake in fakes]
        try:
            yield
        finally:
            await end(tasks)


@asynccontextmanager
async def small_cluster(bus: Bus, settings: RegistrySettings = QUICK, **worker: Any) -> AsyncIterator[tuple[Admin, FakeWorker]]:
    """One registry, one worker, no tenants."""
    fake = FakeWorker(bus, **worker)
    async with running_registry(bus, settings), obeying(fake):
        yield Admin(bus), fake
