"""One adapter into the engine and out of it: fetch, load, prove, serve; stop serving, wait, release, verify, delete.

A step either succeeds whole or leaves nothing behind; either way it ends with what is to be acknowledged.
"""

import asyncio
from pathlib import Path

import structlog

from services.worker.artifacts import ArtifactCache
from services.worker.engine import Engine, LoadProof, ReleaseProof
from services.worker.governor import Governor
from services.worker.identity import Identity
from services.worker.mounts import Action, Step
from services.worker.service import Service
from shared.bus import BusUnavailable
from shared.contracts.adapters import Acknowledgement, AdapterDrained, AdapterFailed, AdapterLoaded, DrainOrder, Mount, OnDeadline
from shared.contracts.errors import ErrorInfo, to_info
from shared.errors import Draining, EngineError, LoadFailed, TenantryError

log = structlog.get_logger()

_LOOK_S = 0.25  # how often a waiting drain looks at its order, which may change
_ABORT_WAIT_S = 10.0  # an aborted attempt that has not ended by then is a fault of the engine
_FETCH_PATIENCE_S = 120.0
_ORPHAN_ORDER = DrainOrder(deadline_s=30.0)


class Mounter:
    """Steps of different adapters may run at once; engine operations run one after another."""

    def __init__(
        self,
        *,
        engine: Engine,
        service: Service,
        governor: Governor,
        cache: ArtifactCache,
        me: Identity,
    ) -> None:
        self.mounts: dict[str, Mount] = {}  # loaded by us and proven
        self.drain_orders: dict[str, DrainOrder] = {}  # of drains under way; may be replaced while they wait
        self._engine = engine
        self._service = service
        self._governor = governor
        self._me = me
        self._cache = cache
        self._engine_turn = asyncio.Lock()
        self._loaded: dict[str, tuple[LoadProof, float]] = {}
        self._drained: dict[str, AdapterDrained] = {}
        self._failures: dict[str, ErrorInfo] = {}
        self._loop = asyncio.get_running_loop()

    async def do(self, step: Step, generation: int) -> Acknowledgement | None:
        """Takes the step; what to acknowledge, if anything."""
        mount = step.mount
        if step.action is Action.REMOVE or mount is None:
            await self._remove_orphan(step.adapter_id)
            return None
        if step.action is Action.LOAD:
            return await self._load(mount, generation)
        if step.action is Action.DRAIN:
            return await self._drain(mount, generation)
        if step.action is Action.SAY_DRAINED:
            return self._say_drained(mount, generation)
        if step.action is Action.SAY_FAILED:
            return self._say_failed(mount, generation)
        if step.action is Action.SERVE:
            await self._service.open(step.adapter_id)
        return self._say_loaded(mount, generation)

    async def lost(self, adapter_id: str) -> None:
        """The engine no longer holds what it should: nothing of it is served until it was loaded and proven again."""
        await self._service.close(adapter_id)
        self._service.abort(EngineError("the engine lost the adapter"), adapter_id)
        self.mounts.pop(adapter_id, None)
        self._loaded.pop(adapter_id, None)
        await self._cache.release(adapter_id)

    async def _load(self, mount: Mount, generation: int) -> Acknowledgement:
        adapter_id = mount.adapter_id
        log.info("adapter.loading", adapter_id=adapter_id, tenant=mount.tenant, name=mount.name, version=mount.version)
        started_s = self._loop.time()
        try:
            folder = self._cache.path(mount.artifact_sha256)
            if not self._engine.is_staged(folder):
                folder = await self._fetch(mount)
            fetch_ms = (self._loop.time() - started_s) * 1000.0
            async with self._engine_turn:
                proof = await self._engine.add_adapter(adapter_id, folder, mount.rank)
        except Exception as error:  # noqa: BLE001  whatever goes wrong with one adapter ends this load alone
            return await self._load_failed(mount, generation, error)
        self._loaded[adapter_id] = (proof, fetch_ms)
        self._drained.pop(adapter_id, None)
        self._failures.pop(adapter_id, None)
        self.mounts[adapter_id] = mount
        await self._service.open(adapter_id)
        log.info("adapter.loaded", adapter_id=adapter_id, name=mount.name, fetch_ms=round(fetch_ms, 1), load_ms=round(proof.load_ms, 1))
        return self._say_loaded(mount, generation)

    async def _load_failed(self, mount: Mount, generation: int, error: Exception) -> AdapterFailed:
        await self._cache.release(mount.adapter_id)
        if not isinstance(error, TenantryError):
            error = LoadFailed(f"the adapter could not be loaded: {type(error).__name__}: {error}", reason=type(error).__name__)
        log.error(
            "adapter.load_failed", adapter_id=mount.adapter_id, tenant=mount.tenant, name=mount.name, code=error.code, reason=error.message
        )
        self._failures[mount.adapter_id] = to_info(error)
        return self._say_failed(mount, generation)

    async def _fetch(self, mount: Mount) -> Path:
        give_up_at_s = self._loop.time() + _FETCH_PATIENCE_S
        while True:
            try:
                folder = await self._cache.fetch(mount.adapter_id, mount.artifact, mount.artifact_sha256, mount.artifact_bytes)
                await self._cache.evict()
                return folder
            except BusUnavailable:
                if self._loop.time() >= give_up_at_s:
                    raise
                await asyncio.sleep(0.5)

    async def _drain(self, mount: Mount, generation: int) -> AdapterDrained | None:
        adapter_id = mount.adapter_id
        running = self._governor.in_flight(adapter_id)
        log.info("adapter.draining", adapter_id=adapter_id, tenant=mount.tenant, name=mount.name, in_flight=running)
        aborted = await self._empty(adapter_id, mount.drain or DrainOrder())
        released = await self._release(adapter_id)
        if released is None:
            return None
        proof, host_bytes_freed = released
        drained = AdapterDrained(
            pool_id=self._me.pool_id,
            adapter_id=adapter_id,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            generation=generation,
            slot_bytes_returned=proof.slot_bytes_returned,
            host_bytes_freed=host_bytes_freed,
            device_free_bytes_before=proof.device_free_bytes_before,
            device_free_bytes_after=proof.device_free_bytes_after,
            completed=running - aborted,
            aborted=aborted,
        )
        self._drained[adapter_id] = drained
        log.info("adapter.drained", adapter_id=adapter_id, name=mount.name, completed=drained.completed, aborted=aborted)
        return drained

    async def _empty(self, adapter_id: str, order: DrainOrder) -> int:
        """Returns once nothing of the adapter is in flight; how many attempts the deadline ended."""
        started_s = self._loop.time()
        self.drain_orders[adapter_id] = order
        aborted = 0
        try:
            await self._service.close(adapter_id)
            while not await self._idle_soon(adapter_id):
                order = self.drain_orders[adapter_id]  # may have been changed meanwhile
                waited_s = self._loop.time() - started_s
                if waited_s < order.deadline_s or order.on_deadline is OnDeadline.WAIT:
                    continue
                in_flight = self._governor.in_flight(adapter_id)
                if aborted == 0:
                    log.warning("adapter.drain_deadline", adapter_id=adapter_id, deadline_s=order.deadline_s, in_flight=in_flight)
                    why = Draining("the adapter is being unloaded and its drain's deadline has passed")
                    aborted = self._service.abort(why, adapter_id)
                elif waited_s > order.deadline_s + _ABORT_WAIT_S:
                    # Never released under a running request: its answer could come from other weights.
                    log.error("adapter.stuck_requests", adapter_id=adapter_id, in_flight=in_flight)
                    started_s = self._loop.time() - order.deadline_s
        finally:
            del self.drain_orders[adapter_id]
        return aborted

    async def _idle_soon(self, adapter_id: str) -> bool:
        try:
            async with asyncio.timeout(_LOOK_S):
                await self._governor.wait_idle(adapter_id)
        except TimeoutError:
            return False
        return True

    async def _release(self, adapter_id: str) -> tuple[ReleaseProof, int] | None:
        """None if the engine did not let go: the next reconciliation tries again."""
        async with self._engine_turn:
            try:
                proof = await self._engine.remove_adapter(adapter_id)
                if adapter_id in await self._engine.list_adapters():
                    raise LoadFailed("the engine still lists the adapter after its removal", reason="still_listed")
            except Exception as error:  # noqa: BLE001  the engine may be dying; the files stay until it has let go
                log.error("adapter.not_released", adapter_id=adapter_id, reason=f"{type(error).__name__}: {error}")
                return None
        self.mounts.pop(adapter_id, None)
        self._loaded.pop(adapter_id, None)
        return proof, await self._cache.release(adapter_id)

    async def _remove_orphan(self, adapter_id: str) -> None:
        log.warning("adapter.not_wanted", adapter_id=adapter_id)
        await self._empty(adapter_id, _ORPHAN_ORDER)
        await self._release(adapter_id)

    def _say_loaded(self, mount: Mount, generation: int) -> AdapterLoaded:
        proof, fetch_ms = self._loaded[mount.adapter_id]
        return AdapterLoaded(
            pool_id=self._me.pool_id,
            adapter_id=mount.adapter_id,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            generation=generation,
            modules_matched=proof.modules_matched,
            probe_difference=proof.probe_difference,
            fetch_ms=fetch_ms,
            load_ms=proof.load_ms,
            bytes_loaded=proof.bytes_loaded,
        )

    def _say_failed(self, mount: Mount, generation: int) -> AdapterFailed:
        return AdapterFailed(
            pool_id=self._me.pool_id,
            adapter_id=mount.adapter_id,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            generation=generation,
            error=self._failures[mount.adapter_id],
        )

    def _say_drained(self, mount: Mount, generation: int) -> AdapterDrained:
        """What was measured when it drained; zeros if this incarnation never held it."""
        known = self._drained.get(mount.adapter_id)
        return AdapterDrained(
            pool_id=self._me.pool_id,
            adapter_id=mount.adapter_id,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            generation=generation,
            slot_bytes_returned=known.slot_bytes_returned if known else 0,
            host_bytes_freed=known.host_bytes_freed if known else 0,
            device_free_bytes_before=known.device_free_bytes_before if known else 0,
            device_free_bytes_after=known.device_free_bytes_after if known else 0,
            completed=known.completed if known else 0,
            aborted=known.aborted if known else 0,
        )
