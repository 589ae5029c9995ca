"""Finishes what a registry that died, or a message that was lost, left undone; and keeps the heartbeat by which routers know that
registries live. Every registry runs it: each step is a compare-and-set or harmless when done twice.

Time is only ever how long this registry itself has seen something stand still.
"""

import asyncio
import contextlib

import msgspec
import structlog
from ulid import ULID

from services.registry.guarantees import GuaranteeService
from services.registry.intake import IntakeService
from services.registry.mounting import Mounting
from services.registry.settings import RegistrySettings
from services.registry.standstill import Standstill
from services.registry.store import Store
from services.registry.stored import StoredLedger
from services.registry.uploads import COMING_IN
from shared.contracts import state
from shared.contracts.adapters import STAGING_BUCKET, DrainOrder, Mount, PoolEntry
from shared.contracts.errors import ErrorInfo
from shared.contracts.state import AdapterRecord
from shared.errors import Conflict, TenantryError
from shared.policy.lifecycle import HOLDS_RESERVATION, AdapterState, LifecycleEvent
from shared.policy.mounts import Change, Outcome, order_drain, order_waiting

log = structlog.get_logger()

_HEARTBEAT_SILENCE = 12  # heartbeats not seen back in our own mirror after which it is built anew


class Reconciler:
    def __init__(
        self,
        store: Store,
        mounting: Mounting,
        intake: IntakeService,
        guarantees: GuaranteeService,
        stored: StoredLedger,
        settings: RegistrySettings,
        registry_id: str,
    ) -> None:
        self._store = store
        self._mounting = mounting
        self._intake = intake
        self._guarantees = guarantees
        self._stored = stored
        self._settings = settings
        self._registry_id = registry_id
        self._mounts = Standstill()
        self._records = Standstill()
        self._behind = Standstill()
        self._untold = Standstill()
        self._objects = Standstill()

    async def beat(self) -> None:
        """The heartbeat key, for ever."""
        unseen, last = 0, 0
        while True:
            try:
                value = msgspec.json.encode({"registry": self._registry_id, "beat": str(ULID())})
                last = await self._store.live.put(state.HEARTBEAT_KEY, value)
            except TenantryError as error:
                log.warning("heartbeat.failed", code=error.code, message=error.message)
            mirrored = self._store.live_mirror.entries.get(state.HEARTBEAT_KEY)
            unseen = unseen + 1 if mirrored is None or mirrored.revision + _HEARTBEAT_SILENCE < last else 0
            if unseen > _HEARTBEAT_SILENCE:
                log.warning("mirror.silent", behind=last)
                self._store.live_mirror.rebuild()
                self._store.catalog_mirror.rebuild()
                unseen = 0
            await asyncio.sleep(self._settings.heartbeat_ms / 1000)

    async def run(self) -> None:
        """Every reconcile_s, for ever."""
        loop = asyncio.get_running_loop()
        housekeeping_at = loop.time() + self._settings.housekeeping_s
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    await self._round(loop.time(), group)
                    if loop.time() >= housekeeping_at:
                        await self.clean(loop.time())
                        housekeeping_at = loop.time() + self._settings.housekeeping_s
                except TenantryError as error:
                    log.warning("reconciler.failed", code=error.code, message=error.message)
                except Exception:
                    log.exception("reconciler.failed")
                await asyncio.sleep(self._settings.reconcile_s)

    async def _round(self, now_s: float, group: asyncio.TaskGroup) -> None:
        records = {record.adapter_id: record for record in self._store.records()}
        pools = await self._store.pools()
        for pool_id, (pool, revision) in pools.items():
            await self._guarantees.repair(pool, now_s)
            for mount in pool.mounts.values():
                record = records.get(mount.adapter_id) or await self._store.record(mount.adapter_id)
                if record is None:
                    await self._release(pool_id, mount, now_s)
                else:
                    await self._tend(pool_id, revision, mount, record, now_s)
        mounted = {mount_id for pool, _ in pools.values() for mount_id in pool.mounts}
        for record in records.values():
            await self._tell_again(record, now_s)
            if record.state in COMING_IN:
                self._resume_if_abandoned(record, now_s, group)
            elif record.state in HOLDS_RESERVATION and record.adapter_id not in mounted:
                await self._settle_if_gone(record, now_s)
        self._mounts.keep(mounted)
        self._behind.keep(mounted)
        self._records.keep(set(records))
        self._untold.keep(set(records))

    async def _tend(self, pool_id: str, revision: int, mount: Mount, record: AdapterRecord, now_s: float) -> None:
        """The record follows its mount, and the mount's worker is told again, where either has stood still for too long."""
        if record.state is not mount.state and record.generation < revision:
            behind_s = self._behind.for_s(mount.adapter_id, (record.state, mount.state, mount.ordered_after), now_s)
            if behind_s > self._settings.reconcile_s:
                await self._mounting.record(pool_id, Outcome(mount=mount, state=mount.state), revision)
        if mount.state is AdapterState.READY:
            return
        stood_s = self._mounts.for_s(mount.adapter_id, (mount.state, mount.ordered_after), now_s)
        if stood_s < self._settings.reissue_s:
            return
        self._mounts.again(mount.adapter_id, now_s)
        if mount.state is AdapterState.ADMITTED:
            await self._mounting.change(pool_id, _order_waiting)
            return
        log.info("command.repeated", adapter=mount.adapter_id, state=mount.state, stood_s=round(stood_s, 1))
        await self._mounting.command(pool_id, mount, revision, repeat=f":{ULID()}")

    async def _release(self, pool_id: str, mount: Mount, now_s: float) -> None:
        """A reservation without a record: its worker is told to let go, and its acknowledgement releases it."""
        stood_s = self._mounts.for_s(mount.adapter_id, (mount.state, mount.ordered_after), now_s)
        if mount.state is AdapterState.DRAINING and stood_s < self._settings.reissue_s:
            return
        self._mounts.again(mount.adapter_id, now_s)

        async def drain(pool: PoolEntry, revision: int) -> Change:
            return order_drain(pool, [mount.adapter_id], DrainOrder(), revision)

        log.warning("mount.without_record", adapter=mount.adapter_id, worker=mount.worker_id)
        await self._mounting.change(pool_id, drain)

    async def _tell_again(self, record: AdapterRecord, now_s: float) -> None:
        """Steps that no registry has confirmed as told: it may have died before."""
        if record.steps > record.told and self._untold.for_s(record.adapter_id, record.steps, now_s) >= self._settings.reconcile_s:
            await self._mounting.tell_again(record)

    def _resume_if_abandoned(self, record: AdapterRecord, now_s: float, group: asyncio.TaskGroup) -> None:
        stood_s = self._records.for_s(record.adapter_id, (record.state, record.intake, len(record.history)), now_s)
        if stood_s >= self._settings.abandoned_s and record.adapter_id not in self._intake.at_work:
            self._records.again(record.adapter_id, now_s)
            self._intake.at_work.add(record.adapter_id)
            group.create_task(self._resume(record))

    async def _resume(self, record: AdapterRecord) -> None:
        log.info("intake.resumed", adapter=record.adapter_id, state=record.state, starts=record.intake.starts)
        try:
            taken = await self._intake.take_in(record)
        except TenantryError as error:
            log.info("intake.ended", adapter=record.adapter_id, code=error.code, message=error.message)
        except Exception:
            log.exception("intake.failed", adapter=record.adapter_id)
        else:
            if taken.adapter_id != record.adapter_id:
                await self._mounting.announce(taken, record.request)
        finally:
            self._intake.at_work.discard(record.adapter_id)

    async def _settle_if_gone(self, record: AdapterRecord, now_s: float) -> None:
        """A record that holds a reservation which no pool has: whoever released it died before saying so here."""
        looks = ("gone", record.state, record.generation)
        if self._records.for_s(record.adapter_id, looks, now_s) < self._settings.abandoned_s:
            return
        found = await self._store.pool(record.pool_id)
        if found is not None and record.adapter_id in found[0].mounts:
            return
        generation = found[1] if found else record.generation
        is_draining = record.state is AdapterState.DRAINING
        error = None if is_draining else ErrorInfo(code="load_failed", message="its reservation was released while a registry was away")
        event = LifecycleEvent.DRAINED if is_draining else LifecycleEvent.WORKER_LOST
        settled = await self._mounting.settle(record, event, generation, error)
        if settled is not None:
            log.warning("record.settled", adapter=record.adapter_id, state=settled.state)
            await self._mounting.announce(settled)

    async def clean(self, now_s: float) -> None:
        """Old refusals, artifacts whose record is gone, and staged objects that nobody has asked for in a long time."""
        for record in _old_refusals(self._store.records(), self._settings.refusals_kept):
            with contextlib.suppress(Conflict):  # it is on its way in again
                await self._store.catalog.delete(state.ADAPTER_PREFIX + record.adapter_id, self._store.seen_revision(record.adapter_id))
                log.info("record.deleted", adapter=record.adapter_id, tenant=record.tenant)
        for name in await self._store.artifacts.names():
            if await self._store.record(name.rsplit(".", 1)[-1]) is None:
                log.info("artifact.deleted", artifact=name)
                await self._store.artifacts.delete(name)
        await self._stored.repair()
        coming_in = [record for record in self._store.records() if record.state in COMING_IN]
        wanted = {record.intake.object for record in coming_in if record.intake.bucket == STAGING_BUCKET}
        staged = await self._store.staging.names()
        for name in staged:
            if name not in wanted and self._objects.for_s(name, True, now_s) >= self._settings.staged_max_s:
                log.info("staged_object.deleted", object=name)
                await self._store.staging.delete(name)
        self._objects.keep(set(staged))


def _old_refusals(records: list[AdapterRecord], kept: int) -> list[AdapterRecord]:
    """Each tenant's rejected uploads that never became a version, but for the newest."""
    by_tenant: dict[str, list[AdapterRecord]] = {}
    for record in records:
        if record.state is AdapterState.REJECTED and record.version == 0:
            by_tenant.setdefault(record.tenant_id, []).append(record)
    return [
        record
        for refused in by_tenant.values()
        for record in sorted(refused, key=lambda r: r.history[-1].at)[: max(0, len(refused) - kept)]
    ]


async def _order_waiting(pool: PoolEntry, revision: int) -> Change:
    return order_waiting(pool, revision)
