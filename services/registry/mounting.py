"""Carries a decision out: the pool's entry by compare-and-set, then commands to workers, the adapters' records, and events.

The entry comes first and is what counts. All that follows from it is repeated by whoever finds it missing (reconciler.py),
so a registry may die between any two steps.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from services.registry.audit_log import AuditLog
from services.registry.store import Store
from shared.bus import Entry, publish_durable
from shared.contracts import adapters, state
from shared.contracts.adapters import AdapterEvent, DrainAdapter, LoadAdapter, Mount, PoolEntry
from shared.contracts.audit import REGISTRY, AuditRecord, Phase
from shared.contracts.errors import ErrorInfo
from shared.contracts.state import AdapterRecord, HistoryStep
from shared.errors import NotFound, TenantryError
from shared.policy.lifecycle import AdapterState, IllegalTransition, LifecycleEvent, step
from shared.policy.mounts import Change, Outcome

log = structlog.get_logger()

_HISTORY = 60
_NOTE_LIMIT = 300

Decide = Callable[[PoolEntry, int], Awaitable[Change | TenantryError | None]]


def now() -> str:
    """RFC 3339, UTC, with microseconds, so that steps sort."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What an acknowledgement says besides the new state, for the record and its event. `released`: the figures of a drain."""

    error: ErrorInfo | None = None
    load_ms: float = 0.0
    released: dict[str, int] = {}


_NOTHING = Told()


class Mounting:
    """The one way in which this registry changes pools."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._audit = AuditLog(store.bus)

    async def change(self, pool_id: str, decide: Decide, told: Told = _NOTHING) -> tuple[Change, int] | None:
        """Writes what `decide(entry, revision)` says and does what follows; None if it declines.

        :raises TenantryError: the refusal that `decide` returned; NotFound if there is no such pool.
        """
        result: Change | None = None

        async def encode(entry: Entry | None) -> bytes | None:
            nonlocal result
            if entry is None:
                raise NotFound(f"there is no pool {pool_id}", pool=pool_id)
            decided = await decide(adapters.decode_pool(entry.value), entry.revision)
            if isinstance(decided, TenantryError):
                raise decided
            result = decided
            return adapters.encode(decided.pool) if decided is not None else None

        revision = await self._store.change(self._store.live, state.POOL_PREFIX + pool_id, encode)
        if result is None:
            return None
        await self.follow(pool_id, result, revision, told)
        return result, revision

    async def follow(self, pool_id: str, change: Change, revision: int, told: Told = _NOTHING) -> None:
        """Commands first: they are what a worker waits for."""
        for mount in change.orders:
            await self.command(pool_id, mount, revision)
        for outcome in change.outcomes:
            if not await self.record(pool_id, outcome, revision, told):
                await self._tell_overtaken(outcome, revision)

    async def command(self, pool_id: str, mount: Mount, generation: int, repeat: str = "") -> None:
        """Tells the mount's worker. The server keeps one of several commands with the same message id (within two minutes)."""
        drains = mount.state is AdapterState.DRAINING
        kind = DrainAdapter if drains else LoadAdapter
        subject = adapters.drain_subject(mount.worker_id) if drains else adapters.load_subject(mount.worker_id)
        message_id = f"{mount.adapter_id}:{'drain' if drains else 'load'}:{generation}{repeat}"
        command = kind(pool_id=pool_id, adapter_id=mount.adapter_id, generation=generation)
        await publish_durable(self._store.bus, subject, adapters.encode(command), message_id)
        log.info("adapter.drain_ordered" if drains else "adapter.load_ordered", adapter=mount.adapter_id, worker=mount.worker_id)

    async def record(self, pool_id: str, outcome: Outcome, generation: int, told: Told = _NOTHING) -> bool:
        """The adapter's record follows the entry: the state of the newest generation counts, whoever writes it and when.

        False: the record is already that new.
        """
        mount = outcome.mount

        def follow(record: AdapterRecord) -> AdapterRecord | None:
            if record.generation >= generation:
                return None
            failed = outcome.state is AdapterState.FAILED
            changed = msgspec.structs.replace(
                record,
                pool_id=pool_id,
                version=mount.version,
                worker_id=mount.worker_id,
                rank_class=mount.rank_class,
                slot_bytes=mount.slot_bytes,
                generation=generation,
                load_ms=told.load_ms or record.load_ms,
                released=told.released,
                error=(told.error or ErrorInfo(code="load_failed", message=outcome.note or "it failed")) if failed else None,
            )
            for state_between in outcome.through:
                changed = stepped(changed, state_between)
            return stepped(changed, outcome.state, outcome.note or (told.error.message if failed and told.error else ""), outcome.action)

        changed = await self._store.change_record(mount.adapter_id, follow)
        if changed is not None:
            for steps_ago in range(len(outcome.through), -1, -1):
                await self.announce(changed, steps_ago=steps_ago)
        return changed is not None

    async def _tell_overtaken(self, outcome: Outcome, generation: int) -> None:
        """What followed (a quick acknowledgement) is in the record before this; the audit has this too."""
        record = await self._store.record(outcome.mount.adapter_id)
        if record is not None:
            overtaken = HistoryStep(state=outcome.state, at="", note=outcome.note, action=outcome.action)
            await self._audit.tell(record.tenant_id, _audited(record, overtaken, f"{record.adapter_id}:{outcome.state}:{generation}"))

    async def settle(self, seen: AdapterRecord, event: LifecycleEvent, generation: int, error: ErrorInfo | None) -> AdapterRecord | None:
        """A record whose reservation is gone takes its end; None if it has moved since it was `seen`, or the event cannot happen to it."""

        def end(record: AdapterRecord) -> AdapterRecord | None:
            if (record.state, record.generation) != (seen.state, seen.generation):
                return None
            try:
                new = step(record.state, event)
            except IllegalTransition:
                return None
            changed = msgspec.structs.replace(record, error=error, generation=max(generation, record.generation))
            return stepped(changed, new, error.message if error else "")

        return await self._store.change_record(seen.adapter_id, end)

    async def announce(self, record: AdapterRecord, request: str = "", steps_ago: int = 0) -> None:
        """The record's last step (or an earlier one) in the audit and as an event; told twice it stays one."""
        last = record.history[-1 - steps_ago]
        event = AdapterEvent(
            tenant=record.tenant,
            name=record.name,
            version=record.version,
            adapter_id=record.adapter_id,
            digest=record.digest,
            state=last.state,
            at=last.at,
            error=record.error,
            request=request or record.request,
            detail=_detail(record),
            note=last.note,
        )
        message_id = f"{record.adapter_id}:{last.state}:{last.at}:{request}"
        await self._audit.tell(record.tenant_id, _audited(record, last, f"{record.adapter_id}:{last.state}:{last.at}"))
        await publish_durable(self._store.bus, adapters.event_subject(record.tenant_id), adapters.encode(event), message_id)
        log.info(f"adapter.{last.state}", adapter=record.adapter_id, tenant=record.tenant, name=record.name, version=record.version)

    async def tell_again(self, seen: AdapterRecord) -> None:
        """Whatever of the record's steps a registry may have died before telling; then the record says that all are told."""
        for steps_ago in range(min(seen.steps - seen.told, len(seen.history)) - 1, -1, -1):
            await self.announce(seen, steps_ago=steps_ago)

        def mark(record: AdapterRecord) -> AdapterRecord | None:
            return msgspec.structs.replace(record, told=seen.steps) if record.told < seen.steps else None

        await self._store.change_record(seen.adapter_id, mark)


def stepped(record: AdapterRecord, new: AdapterState, note: str = "", action: str = "") -> AdapterRecord:
    """The record in its new state, with the step in its history."""
    taken = HistoryStep(state=new, at=now(), note=note, action=action)
    return msgspec.structs.replace(record, state=new, history=(*record.history, taken)[-_HISTORY:], steps=record.steps + 1)


def _audited(record: AdapterRecord, taken: HistoryStep, step_id: str) -> AuditRecord:
    what: dict[str, Any] = {"name": record.name, "version": record.version, "adapter_id": record.adapter_id, "digest": record.digest}
    failed = taken.state in (AdapterState.FAILED, AdapterState.REJECTED) and record.error is not None
    return AuditRecord(
        id=step_id,
        action=taken.action or f"adapter.{taken.state}",
        phase=Phase.HAPPENED,
        who=REGISTRY,
        tenant=record.tenant,
        what={name: value for name, value in what.items() if value} | ({"worker": record.worker_id} if record.worker_id else {}),
        error=record.error.code if failed and record.error is not None else "",
        note=taken.note[:_NOTE_LIMIT],
    )


def _detail(record: AdapterRecord) -> dict[str, int | float | str]:
    detail: dict[str, int | float | str] = {"base": record.base} if record.base else {}
    if record.slot_bytes:
        detail |= {"slot_bytes": record.slot_bytes, "true_bytes": record.true_bytes, "rank_class": record.rank_class}
    if record.state is AdapterState.READY:
        detail["load_ms"] = record.load_ms
    if record.state is AdapterState.UNLOADED:
        detail |= record.released
    return detail
