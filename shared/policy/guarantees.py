"""What a pool's KV cache may guarantee to tenants in sum, and how much of it each worker holds ready for one of them.

Every worker assures a tenant the same fraction of its own cache, so what a worker assures in sum fits it whenever the pool's sum fits
the pool, whatever tenants' parts do. A pool that has shrunk below its guarantees assures the fraction of each that it can.
"""

from collections.abc import Mapping

import msgspec

from shared.contracts.adapters import PoolEntry
from shared.errors import QuotaExceeded


def kv_caches(pool: PoolEntry) -> dict[str, int]:
    """Bytes by worker_id; empty while one of them has not said how much it has."""
    caches = {worker_id: worker.limits.kv_blocks * worker.limits.kv_block_bytes for worker_id, worker in pool.workers.items()}
    return caches if all(caches.values()) else {}


def silent_workers(pool: PoolEntry) -> list[str]:
    """Those that have not said how much KV cache they have, so that no quota of it can be kept there."""
    return sorted(w for w, worker in pool.workers.items() if not worker.limits.kv_blocks * worker.limits.kv_block_bytes)


def pool_kv_bytes(pool: PoolEntry) -> int | None:
    """KV cache of all of a pool's workers; None without workers or while one of them has not said how much it has."""
    return sum(kv_caches(pool).values()) or None


def assured_bytes(caches: Mapping[str, int], guaranteed: Mapping[str, int], tenant_id: str) -> dict[str, int]:
    """The tenant's part of each worker's cache that nobody else can draw on; of all tenants no more than the cache."""
    mine = guaranteed.get(tenant_id, 0)
    if not mine:
        return dict.fromkeys(caches, 0)
    whole = max(sum(caches.values()), sum(guaranteed.values()))
    return {worker_id: mine * size // whole for worker_id, size in caches.items()}


def overcommitted_bytes(pool: PoolEntry) -> int:
    """By how much the guarantees of a pool pass the cache of its present workers."""
    limit = pool_kv_bytes(pool)
    return max(0, sum(pool.guaranteed.values()) - limit) if limit is not None else 0


def guarantee(pool: PoolEntry, tenant_id: str, kv_bytes: int | None) -> PoolEntry | QuotaExceeded:
    """The entry with this much KV cache guaranteed to the tenant (None: nothing), or why it cannot be. Less than before always can."""
    others = {known: size for known, size in pool.guaranteed.items() if known != tenant_id}
    if kv_bytes and kv_bytes > pool.guaranteed.get(tenant_id, 0):
        limit = pool_kv_bytes(pool)
        held = sum(others.values())
        silent = silent_workers(pool)
        if silent:
            return _refused(
                f"worker {silent[0]} of pool {pool.pool_id} has not said how large its KV cache is: a KV quota could not be kept there",
                pool,
                kv_bytes,
                held,
                0,
            )
        if limit is not None and held + kv_bytes > limit:
            return _refused(
                f"pool {pool.pool_id} has {limit} bytes of KV cache, of which {held} are guaranteed to other tenants; {kv_bytes} do not"
                " fit",
                pool,
                kv_bytes,
                held,
                limit,
            )
    return msgspec.structs.replace(pool, guaranteed={**others, tenant_id: kv_bytes} if kv_bytes else others)


def _refused(message: str, pool: PoolEntry, asked: int, held: int, limit: int) -> QuotaExceeded:
    return QuotaExceeded(
        message,
        scope="pool_kv",
        field="limits.kv_quota_bytes",
        pool=pool.pool_id,
        asked_bytes=asked,
        held_bytes=held,
        limit_bytes=limit,
    )
