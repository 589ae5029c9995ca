"""A version's way in: uploaded, validating, then rejected with a reason or reserved in the pool's entry and ordered to load.

Every step is in the record before it counts, so that any registry can start a validation over from its stored upload: the
steps are idempotent, and the reservation is one compare-and-set.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from services.registry import artifacts
from services.registry.mounting import Mounting, now
from services.registry.settings import RegistrySettings
from services.registry.store import Store
from services.registry.stored import StoredLedger
from services.registry.uploads import COMING_IN, AnotherRegistry, UploadRecords
from shared.artifacts.bundle import Bundle
from shared.bus import BusUnavailable, Entry, ObjectCorrupt
from shared.contracts import state
from shared.contracts.adapters import Canary, PoolEntry
from shared.contracts.state import AdapterRecord
from shared.errors import BaseMismatch, BodyTooLarge, Conflict, InternalError, NotFound, TenantryError
from shared.policy.admission import Ask, Reserved, decide, rank_class
from shared.policy.canary import said, trial_of
from shared.policy.compatibility import check, resolve_base, same_base
from shared.policy.lifecycle import HOLDS_RESERVATION, AdapterState
from shared.policy.mounts import Change, Outcome
from shared.runtime import end

log = structlog.get_logger()

_BEAT_S = 1.0
_MAX_STARTS = 5  # an upload that cannot be read that often is refused


class IntakeService:
    """Runs at most max_validations at once, one of each tenant; more wait their turn."""

    def __init__(
        self, store: Store, mounting: Mounting, records: UploadRecords, stored: StoredLedger, settings: RegistrySettings, work_dir: Path
    ) -> None:
        self._store = store
        self._mounting = mounting
        self._records = records
        self._stored = stored
        self._settings = settings
        self._work_dir = work_dir
        self._turns = asyncio.Semaphore(settings.max_validations)
        self._lines: dict[str, tuple[asyncio.Lock, int]] = {}  # by tenant_id, with how many use it
        self.at_work: set[str] = set()  # adapter ids

    async def take_in(self, record: AdapterRecord) -> AdapterRecord:
        """From uploaded or validating to reserved and ordered to load; or the earlier version that these bytes already are.

        :raises TenantryError: refused (the record is then rejected and says why), or the bus is away (then it can be started over).
        """
        work = _Work(record)
        self.at_work.add(record.adapter_id)
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat(work))
                try:
                    async with self._turn_of(record.tenant_id), self._turns:
                        outcome = await self._outcome(work)
                finally:
                    await end([beating])
        finally:
            self.at_work.discard(record.adapter_id)
            shutil.rmtree(work.folder(self._work_dir), ignore_errors=True)
        if isinstance(outcome, TenantryError):
            raise outcome
        return outcome

    @asynccontextmanager
    async def _turn_of(self, tenant_id: str) -> AsyncGenerator[None]:
        """One validation of a tenant at a time: its uploads wait behind each other, not in front of others'."""
        lock, users = self._lines.get(tenant_id, (asyncio.Lock(), 0))
        self._lines[tenant_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._lines.pop(tenant_id)
            if users > 1:
                self._lines[tenant_id] = (lock, users - 1)

    async def _outcome(self, work: "_Work") -> AdapterRecord | TenantryError:
        try:
            return await self._run(work)
        except AnotherRegistry:
            return await self._present(work)
        except BusUnavailable as error:
            return await self._reject(work, error) if work.record.intake.starts >= _MAX_STARTS else error
        except ObjectCorrupt as error:
            is_too_big = "limit_bytes" in error.fields
            return await self._reject(work, BodyTooLarge(error.message, **error.fields) if is_too_big else error)
        except TenantryError as error:
            return await self._reject(work, error)
        except Exception:  # a fault of ours or of this machine (its disk is full): told as such, and not tried for ever
            log.exception("intake.failed", adapter=work.record.adapter_id)
            fault = InternalError("the registry could not validate the upload; its log says why")
            return await self._reject(work, fault)

    async def _reject(self, work: "_Work", error: TenantryError) -> TenantryError:
        """Its end; room for files that were not stored is free again."""
        if not work.record.artifact:
            await self._stored.release(work.record.tenant_id, work.record.adapter_id)
        return await self._records.reject(work.record, error)

    async def _run(self, work: "_Work") -> AdapterRecord:
        intake = msgspec.structs.replace(work.record.intake, starts=work.record.intake.starts + 1)
        work.record = record = await self._records.checkpoint(work.record, AdapterState.VALIDATING, intake=intake)
        pool, revision = await self._store.the_pool(record.pool_id)
        if record.adapter_id in pool.mounts:  # reserved by a registry that died before it said so in the record
            mount = pool.mounts[record.adapter_id]
            await self._mounting.record(record.pool_id, Outcome(mount=mount, state=mount.state), revision)
            return await self._present(work)
        if record.intake.bucket:
            folder = work.folder(self._work_dir)
            earlier = await self._examine(work, pool, folder)
            if earlier is not None:
                return earlier
        else:
            await self._check_again(record, pool)
        await self._reserve(work)
        await self._records.discard_upload(work.record)
        return await self._present(work)

    async def _examine(self, work: "_Work", pool: PoolEntry, folder: Path) -> AdapterRecord | None:
        """Fetches, unpacks, validates and stores; gives the earlier version if these bytes are one under way or mounted."""
        intake, limit_bytes = work.record.intake, self._settings.upload_limit_bytes
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
        folder.mkdir(parents=True)
        upload = folder / "upload"
        objects = await self._store.objects(intake.bucket)
        await objects.get_file(intake.object, upload, limit_bytes=limit_bytes)
        bundle = await anyio.to_thread.run_sync(artifacts.unpack, upload, folder, limit_bytes)
        upload.unlink()
        earlier = await self._claim(work, bundle)
        if earlier is not None:
            return earlier
        matrix = await self._store.matrix()
        claim = await anyio.to_thread.run_sync(artifacts.claimed_base, bundle, intake.base, matrix, pool.base)
        base = await self._store.base(pool.base.rsplit("@", 1)[-1])
        limits = artifacts.widest_limits(pool)
        prepared = await anyio.to_thread.run_sync(artifacts.prepare, bundle, claim, base, limits, folder)
        name = f"{work.record.tenant_id}.{work.record.adapter_id}"
        await self._stored.reserve(work.record, prepared.archive_bytes)
        await self._store.artifacts.put_file(name, prepared.archive)
        work.record = await self._records.checkpoint(
            work.record,
            base=pool.base,
            base_label=claim.label,
            provenance=claim.provenance,
            rank=prepared.rank,
            rank_class=rank_class(prepared.rank, limits),
            true_bytes=prepared.true_bytes,
            modules=prepared.modules,
            artifact=name,
            artifact_sha256=prepared.archive_sha256,
            artifact_bytes=prepared.archive_bytes,
        )
        return None

    async def _claim(self, work: "_Work", bundle: Bundle) -> AdapterRecord | None:
        """Makes these bytes this record's, or this work that of the version they already are (None: go on with work.record)."""
        record = work.record
        key = f"{state.UPLOAD_PREFIX}{record.tenant_id}.{record.name}.{bundle.digest.rsplit(':', 1)[-1]}"

        async def mine(entry: Entry | None) -> bytes | None:
            is_held = entry is not None and await self._store.record(entry.value.decode()) is not None
            return None if is_held else record.adapter_id.encode()

        await self._store.change(self._store.catalog, key, mine)
        holder = await self._store.catalog.get(key)
        earlier = await self._store.record(holder.value.decode()) if holder and holder.value.decode() != record.adapter_id else None
        if earlier is None:
            work.record = await self._records.checkpoint(work.record, digest=bundle.digest, size_bytes=bundle.size_bytes)
            return None
        if earlier.state is AdapterState.DRAINING:
            raise Conflict(
                f"{earlier.name} version {earlier.version} is these very bytes and is still draining; add it again when it has drained",
                adapter=earlier.name,
                version=earlier.version,
                state=earlier.state.value,
            )
        if earlier.state in HOLDS_RESERVATION or earlier.state in COMING_IN:
            await self._records.forget(record)
            return earlier
        again = await self._records.remount(earlier, record.intake, record.request)
        await self._records.forget(record, keep_upload=True)
        work.record = again
        return None

    async def _check_again(self, record: AdapterRecord, pool: PoolEntry) -> None:
        """A stored artifact may have been made for another base, or the matrix may have changed since."""
        matrix = await self._store.matrix()
        claim = resolve_base(record.intake.base or None, record.base_label or None, None, matrix)
        check(claim, record.digest, pool.base, matrix)
        if not same_base(record.base, pool.base):
            raise BaseMismatch(
                f"the stored artifact was made for {record.base}, the pool serves {pool.base}; upload it again",
                expected=pool.base,
                got=record.base,
                source="stored artifact",
            )

    async def _reserve(self, work: "_Work") -> None:
        """The one step that takes room; asks the tenant's quota anew with every attempt.

        :raises QuotaExceeded: :raises NoFreeSlot: :raises Conflict:
        """
        record = work.record
        started_at = now()

        async def admit(pool: PoolEntry, revision: int) -> Change | TenantryError:
            if record.adapter_id in pool.mounts:
                return Change(pool=pool)
            tenant = await self._store.tenant(record.tenant)
            if tenant.tenant_id != record.tenant_id:
                return NotFound(f"the tenant {record.tenant} that uploaded this is gone", tenant=record.tenant)
            ask = Ask(
                adapter_id=record.adapter_id,
                name=record.name,
                version=record.version,
                digest=record.digest,
                rank=record.rank,
                true_bytes=record.true_bytes,
                artifact=record.artifact,
                artifact_sha256=record.artifact_sha256,
                artifact_bytes=record.artifact_bytes,
                drain_first=record.intake.drain_first,
                trial=_trial(record, started_at),
            )
            decided = decide(pool, tenant, ask, revision)
            return decided if isinstance(decided, TenantryError) else _follows(decided, pool)

        await self._mounting.change(record.pool_id, admit)

    async def _present(self, work: "_Work") -> AdapterRecord:
        found = await self._store.record(work.record.adapter_id)
        return found if found is not None else work.record

    async def _beat(self, work: "_Work") -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            try:
                await self._records.beat(work.record.adapter_id)
            except TenantryError as error:
                log.warning("intake.beat_failed", adapter=work.record.adapter_id, code=error.code)


class _Work:
    """The record being taken in; becomes the earlier version's record when the bytes turn out to be one at rest."""

    def __init__(self, record: AdapterRecord) -> None:
        self.record = record
        self._folder = record.adapter_id

    def folder(self, work_dir: Path) -> Path:
        return work_dir / self._folder


def _trial(record: AdapterRecord, started_at: str) -> Canary | None:
    terms = record.intake.trial
    if terms is None:
        return None
    return Canary(adapter_id=record.adapter_id, share_ppm=terms.share_ppm, by=terms.by, stop=terms.stop, started_at=started_at)


def _follows(reserved: Reserved, before: PoolEntry) -> Change:
    """The commands and outcomes of a reservation."""
    mount, old = reserved.mount, reserved.drained_first
    orders = [mount] if mount.state is AdapterState.LOADING else []
    through = (AdapterState.ADMITTED,) if mount.state is AdapterState.LOADING else ()
    trial = trial_of(reserved.pool, mount.tenant, mount.name)
    note = f"on trial: {said(trial)}" if mount.on_trial and trial is not None else ""
    outcomes = [Outcome(mount=mount, state=mount.state, through=through, note=note)]
    if old is not None:
        orders.append(old)
        if before.mounts[old.adapter_id].state is not AdapterState.DRAINING:
            outcomes.append(Outcome(mount=old, state=old.state, note=f"makes room for version {mount.version}"))
    return Change(pool=reserved.pool, orders=tuple(orders), outcomes=tuple(outcomes))
