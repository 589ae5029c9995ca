"""What registries add to the usage stream, and take from it: ends of engines that are gone, residency, snapshots, and room.

Every registry runs it. Each record is published as often as it takes until this registry has read it back; repeats change nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.registry.reports import Reports
from services.registry.settings import RegistrySettings
from services.registry.standstill import Standstill
from services.registry.store import Store, stamp_ms
from services.registry.usage_book import OpenEngine, UsageBook
from services.registry.usage_service import UsageService
from services.registry.usage_snapshots import Snapshots
from shared.bus import Entry, forget_before, publish_durable, stream_state
from shared.contracts import adapters, state
from shared.contracts.usage import BATCH_LIMIT, USAGE_STREAM, EngineEnded, Residency, Usage, encode, registry_usage_subject
from shared.errors import TenantryError
from shared.policy.residency import ended, held, published

log = structlog.get_logger()

_LOST_WORD_MS = 600_000  # an open attempt this much older than its engine's newest has lost its last word


def _no_failpoint(_name: str) -> None:
    pass


class UsageKeeper:
    def __init__(
        self,
        store: Store,
        service: UsageService,
        snapshots: Snapshots,
        reports: Reports,
        settings: RegistrySettings,
        registry_id: str,
        failpoint: Callable[[str], None] = _no_failpoint,
    ) -> None:
        self._store = store
        self._service = service
        self._snapshots = snapshots
        self._reports = reports
        self._settings = settings
        self._subject = registry_usage_subject(registry_id)
        self._failpoint = failpoint
        self._engines = Standstill()
        self._checkpointed: dict[str, int] = {}  # pool -> until when this registry has told residency

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        snapshots_due_s = loop.time()
        while True:
            try:
                await self.end_engines(loop.time())
                await self.tell_residency()
                if loop.time() >= snapshots_due_s:
                    snapshots_due_s = loop.time() + self._settings.housekeeping_s
                    await self.keep_snapshots()
            except TenantryError as error:
                log.warning("usage.not_kept", code=error.code, message=error.message)
            except Exception:
                log.exception("usage.keeping_failed")
            await asyncio.sleep(self._settings.usage_round_s)

    async def end_engines(self, now_s: float) -> None:
        """Says of every engine with open attempts whether it is gone: replaced in its pool's entry, or silent."""
        engines = await self._service.with_book(UsageBook.open_engines)
        if not engines:
            return
        mirrored = [entry for key, entry in self._store.live_mirror.entries.items() if key.startswith(state.POOL_PREFIX)]
        pools = [adapters.decode_pool(entry.value) for entry in mirrored]
        present = {(worker.worker_id, worker.incarnation) for pool in pools for worker in pool.workers.values()}
        found: list[Usage] = []
        for engine in engines:
            name = f"{engine.worker_id}.{engine.incarnation}"
            stood_s = self._engines.for_s(name, (engine, self._store.bus.disconnects), now_s)
            reason = self._gone(engine, stood_s, is_present=(engine.worker_id, engine.incarnation) in present)
            if reason:
                log.warning("usage.engine_ended", worker=engine.worker_id, incarnation=engine.incarnation, why=reason, open=engine.attempts)
                found.append(EngineEnded(worker_id=engine.worker_id, incarnation=engine.incarnation, reason=reason))
                self._engines.again(name, now_s)
            elif engine.newest_ms - engine.oldest_ms > _LOST_WORD_MS:
                before_ms = engine.newest_ms - _LOST_WORD_MS
                found.append(
                    EngineEnded(worker_id=engine.worker_id, incarnation=engine.incarnation, reason="last word lost", before_ms=before_ms)
                )
        self._engines.keep({f"{engine.worker_id}.{engine.incarnation}" for engine in engines})
        await self._publish(found)

    def _gone(self, engine: OpenEngine, stood_s: float, *, is_present: bool) -> str:
        if not is_present:
            return "replaced" if stood_s >= self._settings.usage_ended_s else ""
        report, age_s = self._reports.last(engine.worker_id)
        is_heard = report is not None and report.incarnation == engine.incarnation and age_s < self._settings.usage_silence_s
        return "" if is_heard or stood_s < self._settings.usage_silence_s else "silent"

    async def tell_residency(self) -> None:
        """Charges that have ended, out of the pools' entries; and now and then how far the present ones have come."""
        beat = self._store.live_mirror.entries.get(state.HEARTBEAT_KEY)
        if beat is None:
            return
        now_ms = stamp_ms(beat.stamp_s)  # before any entry is read: what stands in one then was held now
        known = await self._service.with_book(UsageBook.held_until)
        if known is None:
            return
        for key, mirrored in list(self._store.live_mirror.entries.items()):
            if not key.startswith(state.POOL_PREFIX):
                continue
            pool = adapters.decode_pool(mirrored.value)
            last_ms = max(known.get(pool.pool_id, 0), self._checkpointed.get(pool.pool_id, 0))
            is_due = bool(pool.charges) and now_ms - last_ms >= self._settings.usage_residency_s * 1000
            if is_due or pool.left:
                await self._tell(key, now_ms, checkpoint=is_due)

    async def _tell(self, key: str, now_ms: int, *, checkpoint: bool) -> None:
        entry = await self._store.live.stamped(key)
        if entry is None:
            return
        pool, stored_ms = adapters.decode_pool(entry.value), stamp_ms(entry.stamp_s)
        over = ended(pool, stored_ms)
        records: list[Usage] = [*over]
        if checkpoint:
            records += held(pool, stored_ms, now_ms)
        await self._publish(records)
        self._failpoint("residency published")
        if checkpoint:
            self._checkpointed[pool.pool_id] = now_ms
        if over:
            await self._store.change(self._store.live, key, _without(over))
            self._failpoint("residency taken out")

    async def keep_snapshots(self) -> None:
        """Closed days into the object store; then what they make spare out of the stream."""
        pending = await self._service.with_book(UsageBook.pending)
        if pending is None:
            return
        for each in pending:
            self._failpoint("snapshot due")
            if not await self._snapshots.store(each):
                return
            await self._service.with_book(lambda book, each=each: book.mark_stored(each))
        created = await self._service.with_book(lambda book: book.created)
        if pending and created:
            await self._snapshots.forget_old_states(created)
        stream = await stream_state(self._store.bus, USAGE_STREAM)
        spare_before = await self._service.with_book(lambda book: book.spare_before(self._settings.usage_keep_days))
        if spare_before and spare_before > stream.first:
            await forget_before(self._store.bus, USAGE_STREAM, spare_before)
            log.info("usage.stream_cut", before=spare_before)
            self._failpoint("stream cut")
        most = self._settings.usage_max_bytes
        if stream.size_bytes > self._settings.usage_warn_bytes or (most and stream.size_bytes > 0.8 * most):
            log.warning("usage.stream_large", size_bytes=stream.size_bytes, messages=stream.messages, limit_bytes=most or None)

    async def _publish(self, records: list[Usage]) -> None:
        for start in range(0, len(records), BATCH_LIMIT):
            await publish_durable(self._store.bus, self._subject, encode(records[start : start + BATCH_LIMIT]))


def _without(over: list[Residency]) -> Callable[[Entry | None], Awaitable[bytes | None]]:
    async def decide(entry: Entry | None) -> bytes | None:
        return None if entry is None else adapters.encode(published(adapters.decode_pool(entry.value), over))

    return decide
