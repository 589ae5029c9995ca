"""Brings the engine to what the pool's entry says of this worker: loads, drains, reconciles with the engine's own list, acknowledges.

The entry in KV is the only order. A command is a hint to read it now; so commands may come twice, late, or in any order. What a
step decides is mounts.py's; how one adapter is loaded or drained, mounting.py's.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import structlog

from services.worker.engine import Engine
from services.worker.identity import Identity
from services.worker.mounting import Mounter
from services.worker.mounts import Action, Step, mine, plan
from services.worker.service import Service
from shared.bus import Bucket, Bus, BusUnavailable, Consumer, Delivery, Entry, Mirror, publish_durable
from shared.contracts.adapters import (
    COMMANDS_STREAM,
    Acknowledgement,
    AdapterFailed,
    AdapterLoaded,
    Mount,
    PoolEntry,
    ack_subject,
    decode_command,
    decode_pool,
    drain_subject,
    encode,
    load_subject,
)
from shared.contracts.state import POOL_PREFIX
from shared.errors import Conflict

log = structlog.get_logger()

_SAY_AGAIN_S = 15.0  # an acknowledgement that changed nothing so far is given again after this


class _Said(msgspec.Struct, frozen=True):
    action: Action
    generation: int
    at_s: float


class Lifecycle:
    """`hello` makes this incarnation known and returns the generation it stands in; nothing older is acted on."""

    def __init__(
        self,
        *,
        bus: Bus,
        bucket: Bucket,
        engine: Engine,
        service: Service,
        mounter: Mounter,
        me: Identity,
        hello: Callable[[], Awaitable[int]],
        reconcile_s: float = 3.0,
    ) -> None:
        self.generation = 0  # newest revision of the pool's entry read
        self.reconciled = asyncio.Event()  # set after the first pass
        self._bus = bus
        self._me = me
        self._bucket = bucket
        self._engine = engine
        self._service = service
        self._mounter = mounter
        self._key = POOL_PREFIX + me.pool_id
        self._hello = hello
        self._accepted_generation = 0
        self._reconcile_s = reconcile_s
        self._entry: PoolEntry | None = None
        self._busy: set[str] = set()
        self._failed: dict[str, int] = {}  # adapter_id -> generation under which its load failed
        self._said: dict[str, _Said] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mirror = Mirror(bus, bucket, self._changed, keys=self._key)

    async def run(self) -> None:
        """Runs until cancelled.

        :raises Conflict: another process has taken over this worker's id.
        """
        self._accepted_generation = await self._hello()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror.run())
            group.create_task(self._hear_commands())
            await self._read_entry(self._accepted_generation)
            while True:
                self._wake.clear()
                await self._pass(group)
                self.reconciled.set()
                try:
                    async with asyncio.timeout(self._reconcile_s):
                        await self._wake.wait()
                except TimeoutError:
                    await self._read_entry(0)  # a watch can be silent

    async def _pass(self, group: asyncio.TaskGroup) -> None:
        """Starts every step that can start now."""
        entry = await self._standing()
        mounts = mine(entry, self._me.worker_id)
        for adapter_id in self._mounter.drain_orders.keys() & mounts.keys():
            self._mounter.drain_orders[adapter_id] = mounts[adapter_id].drain or self._mounter.drain_orders[adapter_id]
        busy = set(self._busy)
        try:
            held = await self._engine.list_adapters()
        except Exception as error:  # noqa: BLE001  a dying engine; its death is noticed elsewhere
            log.error("engine.not_listed", reason=f"{type(error).__name__}: {error}")
            return
        busy |= self._busy  # a step that ended meanwhile may be missing in the list
        for adapter_id in self._service.served_adapters - held - busy:
            log.error("adapter.missing_in_engine", adapter_id=adapter_id)
            await self._mounter.lost(adapter_id)
        for gone in (self._failed.keys() | self._said.keys()) - mounts.keys():
            self._failed.pop(gone, None)
            self._said.pop(gone, None)
        steps = plan(
            mounts,
            held=held,
            proven=self._mounter.mounts.keys(),
            served=self._service.served_adapters,
            busy=busy,
            failed={adapter_id for adapter_id, generation in self._failed.items() if generation > mounts[adapter_id].ordered_after},
            said=self._said_lately(mounts),
        )
        for step in steps:
            self._busy.add(step.adapter_id)
            group.create_task(self._do(step))

    async def _standing(self) -> PoolEntry:
        """The entry, with this incarnation in it (made known again if an operator has removed the worker)."""
        entry = self._entry
        assert entry is not None
        standing = entry.workers.get(self._me.worker_id)
        if standing is None:
            log.warning("worker.unknown_to_pool", generation=self.generation)
            self._accepted_generation = await self._hello()
            await self._read_entry(self._accepted_generation)
            assert self._entry is not None
            return self._entry
        if standing.incarnation != self._me.incarnation:
            raise Conflict(
                f"another process has taken over worker id {self._me.worker_id}; give each worker its own TENANTRY_WORKER_WORKER_ID",
                incarnation=standing.incarnation,
            )
        return entry

    def _said_lately(self, mounts: Mapping[str, Mount]) -> dict[str, Action]:
        """What was acknowledged under the present orders and may still be on its way into the entry."""
        since_s = self._loop.time() - _SAY_AGAIN_S
        return {
            adapter_id: said.action
            for adapter_id, said in self._said.items()
            if said.at_s > since_s and said.generation > mounts[adapter_id].ordered_after
        }

    async def _do(self, step: Step) -> None:
        adapter_id = step.adapter_id
        try:
            said = await self._mounter.do(step, self.generation)
            if said is not None:
                await self._say(said)
        finally:
            self._busy.discard(adapter_id)
            self._wake.set()

    async def _say(self, said: Acknowledgement) -> None:
        """Acknowledges until it is stored: the registry counts on it."""
        if isinstance(said, AdapterFailed):
            self._failed[said.adapter_id] = said.generation
            kind, action = "failed", Action.SAY_FAILED
        elif isinstance(said, AdapterLoaded):
            kind, action = "loaded", Action.SAY_LOADED
        else:
            kind, action = "drained", Action.SAY_DRAINED
        message_id = f"{kind}:{said.adapter_id}:{self._me.incarnation}:{said.generation}"
        while True:
            try:
                await publish_durable(self._bus, ack_subject(kind, self._me.worker_id), encode(said), message_id)
                break
            except BusUnavailable as error:
                log.warning("acknowledgement.not_stored", kind=kind, adapter_id=said.adapter_id, error=error.message)
                await asyncio.sleep(0.5)
        self._said[said.adapter_id] = _Said(action, said.generation, self._loop.time())

    def _changed(self, key: str, entry: Entry | None) -> None:
        if key == self._key and entry is not None:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if entry.revision <= self.generation or entry.revision < self._accepted_generation:
            return
        try:
            self._entry = decode_pool(entry.value)
        except msgspec.MsgspecError as error:
            log.error("pool.malformed", key=self._key, revision=entry.revision, error=type(error).__name__)
            return
        self.generation = entry.revision
        self._wake.set()

    async def _read_entry(self, at_least: int) -> None:
        """Reads the key itself; returns once a revision of at least this one was taken (0: tries once)."""
        while True:
            try:
                entry = await self._bucket.get(self._key)
            except BusUnavailable as error:
                log.warning("pool.not_read", error=error.message)
                entry = None
            if entry is not None:
                self._take(entry)
            if self.generation >= at_least:
                return
            await asyncio.sleep(0.2)

    async def _hear_commands(self) -> None:
        subjects = (load_subject(self._me.worker_id), drain_subject(self._me.worker_id))
        consumer = Consumer(self._bus, COMMANDS_STREAM, f"worker_{self._me.worker_id}", subjects, ack_wait_s=10.0, max_ack_pending=1)
        async for delivery in consumer.messages():
            await self._heed(delivery)

    async def _heed(self, delivery: Delivery) -> None:
        """The command has done its work once the entry was read at its generation: from then on the entry itself drives."""
        try:
            command = decode_command(delivery.data)
        except msgspec.MsgspecError as error:
            log.error("command.malformed", subject=delivery.subject, error=type(error).__name__)
            await delivery.reject()
            return
        log.info(
            "command.heard",
            command=type(command).__name__,
            adapter_id=command.adapter_id,
            generation=command.generation,
            known_generation=self.generation,
            deliveries=delivery.deliveries,
        )
        if command.pool_id == self._me.pool_id:
            if command.generation > self.generation:
                await self._read_entry(0)
            if command.generation > self.generation:
                await delivery.retry(0.5)
                return
            self._said.pop(command.adapter_id, None)  # it is asked again: answer again
            self._wake.set()
        try:
            await delivery.ack()
        except BusUnavailable as error:
            log.info("command.acknowledgement_lost", error=error.message)
