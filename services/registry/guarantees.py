"""KV cache that tenants are guaranteed, in every pool's entry: changed with a tenant's limits, and made to agree with them again."""

import structlog

from services.registry.mounting import Mounting
from services.registry.standstill import Standstill
from services.registry.store import Store
from shared.contracts.adapters import PoolEntry
from shared.contracts.state import Tenant
from shared.errors import QuotaExceeded, TenantryError
from shared.policy.guarantees import guarantee, overcommitted_bytes, pool_kv_bytes, silent_workers
from shared.policy.mounts import Change

log = structlog.get_logger()


class GuaranteeService:
    def __init__(self, store: Store, mounting: Mounting, abandoned_s: float) -> None:
        self._store = store
        self._mounting = mounting
        self._abandoned_s = abandoned_s
        self._surplus = Standstill()
        self._overcommitted: dict[str, int] = {}  # by pool: as told last

    async def raise_to(self, tenant_id: str, kv_bytes: int | None) -> None:
        """At least this much in every pool, or nothing changed.

        :raises QuotaExceeded: a pool cannot guarantee it.
        """
        done: list[tuple[str, int | None]] = []
        for pool_id, (pool, _) in (await self._store.pools()).items():
            before = pool.guaranteed.get(tenant_id)
            if (kv_bytes or 0) <= (before or 0):
                continue
            try:
                await self._set(pool_id, tenant_id, kv_bytes)
            except QuotaExceeded:
                for done_id, earlier in done:
                    await self._set(done_id, tenant_id, earlier)
                raise
            done.append((pool_id, before))

    async def lower_to(self, tenant_id: str, kv_bytes: int | None) -> None:
        for pool_id, (pool, _) in (await self._store.pools()).items():
            if pool.guaranteed.get(tenant_id, 0) > (kv_bytes or 0):
                await self._set(pool_id, tenant_id, kv_bytes)

    async def _set(self, pool_id: str, tenant_id: str, kv_bytes: int | None) -> None:
        async def change(pool: PoolEntry, _revision: int) -> Change | TenantryError:
            changed = guarantee(pool, tenant_id, kv_bytes)
            return changed if isinstance(changed, TenantryError) else Change(pool=changed)

        await self._mounting.change(pool_id, change)

    async def repair(self, pool: PoolEntry, now_s: float) -> None:
        """What tenants' limits say and the pool has room for; a surplus only after it has stood for a while (it may be on its way up)."""
        over = overcommitted_bytes(pool)
        if over != self._overcommitted.get(pool.pool_id, 0):
            self._overcommitted[pool.pool_id] = over
            (log.warning if over else log.info)("pool.overcommitted", pool=pool.pool_id, over_bytes=over)
        tenants = {tenant.tenant_id: tenant for tenant in self._store.tenants()}
        for tenant_id, tenant in tenants.items():
            asked = tenant.limits.kv_quota_bytes or 0
            if asked > pool.guaranteed.get(tenant_id, 0) and not isinstance(guarantee(pool, tenant_id, asked), QuotaExceeded):
                await self._set(pool.pool_id, tenant_id, asked)
        for tenant_id, size in pool.guaranteed.items():
            tenant = tenants.get(tenant_id)
            asked = (tenant.limits.kv_quota_bytes or 0) if tenant is not None else 0
            name = f"{pool.pool_id}.{tenant_id}"
            if size > asked and self._surplus.for_s(name, (size, asked), now_s) >= self._abandoned_s:
                log.warning("guarantee.lowered", pool=pool.pool_id, tenant_id=tenant_id, was_bytes=size, is_bytes=asked)
                await self._set(pool.pool_id, tenant_id, asked)


def guarantee_notes(pool: PoolEntry, tenant: Tenant) -> list[str]:
    """What cannot be promised of the tenant's KV quota in this pool, and why."""
    asked = tenant.limits.kv_quota_bytes
    if not asked:
        return []
    notes = [
        f"pool {pool.pool_id}: worker {worker_id} has not said how large its KV cache is, and serves no tenant with a KV quota"
        for worker_id in silent_workers(pool)
    ]
    if pool.guaranteed.get(tenant.tenant_id, 0) < asked:
        notes.append(f"pool {pool.pool_id}: its KV cache has no room to guarantee {asked} bytes beside what others are guaranteed")
    return notes + pool_notes(pool)


def pool_notes(pool: PoolEntry) -> list[str]:
    """A pool that has shrunk below what it guarantees."""
    if not overcommitted_bytes(pool):
        return []
    limit, given = pool_kv_bytes(pool) or 0, sum(pool.guaranteed.values())
    return [
        f"pool {pool.pool_id} is overcommitted: {given} bytes of KV cache are guaranteed, its workers have {limit}; each guarantee counts"
        f" for {limit / given:.0%} until a worker comes back or quotas are lowered"
    ]
