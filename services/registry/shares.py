"""Keeps every tenant's shares of every pool as shared/policy/shares.py decides: at once where a tenant or a worker changes, and
every round where work waits or a worker has agreed to a cut. Any registry may act; each write is one compare-and-set.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec
import structlog

from services.registry.reports import Reports
from services.registry.standstill import Standstill
from services.registry.store import Store
from shared.bus import Entry
from shared.contracts import adapters, state, tenancy
from shared.contracts.adapters import PoolEntry
from shared.contracts.state import Tenant
from shared.contracts.tenancy import TenantShares
from shared.errors import Conflict, TenantryError
from shared.policy.guarantees import assured_bytes, kv_caches
from shared.policy.shares import decide

log = structlog.get_logger()

T = TypeVar("T")
_AT_ONCE = 16  # writes under way
_SETTLED_WITHIN_S = 8.0
_GATEWAY = Tenant(tenant_id=tenancy.GATEWAY_TENANT, name=tenancy.GATEWAY_TENANT)


class Decoded(Generic[T]):
    """Values by key, decoded once per revision."""

    def __init__(self, decode: Callable[[bytes], T]) -> None:
        self._decode = decode
        self._known: dict[str, tuple[int, T]] = {}

    def of(self, entries: dict[str, Entry], prefix: str) -> dict[str, tuple[int, T]]:
        """Revision and value of every key that begins with `prefix`."""
        found: dict[str, tuple[int, T]] = {}
        for key, entry in entries.items():
            if key.startswith(prefix):
                known = self._known.get(key)
                found[key] = known if known and known[0] == entry.revision else (entry.revision, self._decode(entry.value))
        self._known = found
        return found


class _Write(msgspec.Struct, frozen=True):
    """`revision` 0: the key is not there."""

    key: str
    value: bytes
    revision: int


class SharesService:
    def __init__(self, store: Store, reports: Reports, abandoned_s: float) -> None:
        self._store = store
        self._reports = reports
        self._abandoned_s = abandoned_s
        self._orphans = Standstill()
        self._pools = Decoded(adapters.decode_pool)
        self._tenants = Decoded(state.decode_tenant)
        self._shares = Decoded(tenancy.decode_shares)
        self._settled: dict[str, tuple[object, ...]] = {}  # by key: what an entry that needed no change was decided from
        self._moving = False  # a cut waits for its worker to agree
        self._quiet_since = -1  # count of changes at which there was nothing to do

    async def settle(self, tenant: Tenant, pool_ids: Iterable[str]) -> None:
        """The tenant's entries of these pools stand, under its present limits."""
        for pool_id in pool_ids:
            await self._settle(pool_id, tenant)

    async def settle_pool(self, pool_id: str, revision: int) -> None:
        """Every tenant's entry names the pool's workers as of `revision`: before one that said hello is told that it may serve."""
        key = state.POOL_PREFIX + pool_id

        async def settled() -> bool | None:
            entry = self._store.live_mirror.entries.get(key)
            if entry is None or entry.revision < revision:
                return None
            writes = self._writes({key})
            for start in range(0, len(writes), _AT_ONCE):
                async with asyncio.TaskGroup() as group:
                    for write in writes[start : start + _AT_ONCE]:
                        group.create_task(self._write(write))
            return None if writes else True

        if await self._store.changes.until(settled, _SETTLED_WITHIN_S) is None:
            log.warning("shares.not_settled", pool=pool_id)

    async def _settle(self, pool_id: str, tenant: Tenant) -> None:
        async def write(entry: Entry | None) -> bytes | None:
            # read after the entry: never an older incarnation than the entry names, nor limits that somebody has changed since
            found = await self._store.pool(pool_id)
            present = await self._present(tenant)
            return tenancy.encode(self._decided(entry, found[0], present)) if found is not None else None

        await self._store.change(self._store.live, tenancy.shares_key(pool_id, tenant.tenant_id), write)

    async def _present(self, tenant: Tenant) -> Tenant:
        """As its record stands now; one that is being made has none yet."""
        entry = await self._store.live.get(state.TENANT_PREFIX + tenant.name)
        present = state.decode_tenant(entry.value) if entry is not None else tenant
        return present if present.tenant_id == tenant.tenant_id else tenant

    def _decided(self, entry: Entry | None, pool: PoolEntry, tenant: Tenant) -> TenantShares:
        workers = {worker_id: worker.incarnation for worker_id, worker in pool.workers.items()}
        known = tenancy.decode_shares(entry.value) if entry is not None else None
        uses = self._reports.uses(pool).of(tenant.tenant_id)
        caches = kv_caches(pool)
        assured = assured_bytes(caches, pool.guaranteed, tenant.tenant_id)
        return decide(known, entry.revision if entry else 0, tenant.tenant_id, tenant.name, tenant.limits, workers, uses, caches, assured)

    async def forget(self, tenant_id: str) -> None:
        for key in await self._store.live.keys(tenancy.SHARES_PREFIX):
            if key.endswith(f".{tenant_id}"):
                await self._store.live.delete(key)

    async def run(self, every_s: float) -> None:
        """For ever."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self.round(loop.time())
            except TenantryError as error:
                log.warning("shares.failed", code=error.code, message=error.message)
            except Exception:
                log.exception("shares.failed")
            await asyncio.sleep(every_s)

    async def round(self, now_s: float) -> None:
        """One attempt at every entry that is to change; whoever was faster did it."""
        count = self._store.changes.count
        if count == self._quiet_since and not self._reports.busy:
            return
        writes = self._writes(None)
        for write in writes:
            await self._write(write)
        is_quiet = not writes and not self._moving and not await self._delete_orphans(now_s)
        self._quiet_since = count if is_quiet else -1

    def _writes(self, pool_keys: set[str] | None) -> list[_Write]:
        """What the mirror shows is to be written, of these pools or of all. It shows the bucket as it was at one moment."""
        entries = self._store.live_mirror.entries
        pools, tenants = self._pools.of(entries, state.POOL_PREFIX), self._tenants.of(entries, state.TENANT_PREFIX)
        shares = self._shares.of(entries, tenancy.SHARES_PREFIX)
        writes: list[_Write] = []
        self._moving = False
        for pool_key, (_, pool) in pools.items():
            if pool_keys is not None and pool_key not in pool_keys:
                continue
            workers = {worker_id: worker.incarnation for worker_id, worker in pool.workers.items()}
            standing, caches = tuple(workers.items()), kv_caches(pool)
            uses = self._reports.uses(pool)
            for tenant_revision, tenant in [(0, _GATEWAY), *tenants.values()]:
                key = tenancy.shares_key(pool.pool_id, tenant.tenant_id)
                revision, known = shares.get(key, (0, None))
                assured = assured_bytes(caches, pool.guaranteed, tenant.tenant_id)
                looks = (revision, tenant_revision, standing, tuple(assured.values()))
                if self._settled.get(key) == looks and not uses.busy(tenant.tenant_id):
                    continue
                used = uses.of(tenant.tenant_id)
                after = decide(known, revision, tenant.tenant_id, tenant.name, tenant.limits, workers, used, caches, assured)
                if after != known:
                    writes.append(_Write(key, tenancy.encode(after), revision))
                elif _is_at_rest(after):
                    self._settled[key] = looks
                else:
                    self._moving = True
        return writes

    async def _write(self, write: _Write) -> None:
        """Unless somebody was faster."""
        with contextlib.suppress(Conflict):
            if write.revision:
                await self._store.live.update(write.key, write.value, write.revision)
            else:
                await self._store.live.create(write.key, write.value)

    async def _delete_orphans(self, now_s: float) -> bool:
        """Of tenants that are gone; one that is being made has its shares before it is there. Whether there are any."""
        entries = self._store.live_mirror.entries
        tenant_ids = {tenant.tenant_id for _, tenant in self._tenants.of(entries, state.TENANT_PREFIX).values()} | {_GATEWAY.tenant_id}
        orphans = [key for key in entries if key.startswith(tenancy.SHARES_PREFIX) and key.rpartition(".")[2] not in tenant_ids]
        for key in orphans:
            self._settled.pop(key, None)
            if self._orphans.for_s(key, True, now_s) >= self._abandoned_s:
                log.info("shares.deleted", key=key)
                await self._store.live.delete(key)
        self._orphans.keep(set(orphans))
        return bool(orphans)


def _is_at_rest(shares: TenantShares) -> bool:
    """No cut is waiting for its worker to agree."""
    return all(
        share.held_kv_bytes == (share.kv_bytes or 0) and share.held_concurrent == (share.concurrent or 0)
        for share in shares.workers.values()
    )
