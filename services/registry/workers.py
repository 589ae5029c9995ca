"""Workers: who says hello is in its pool's entry, with what it can hold; pools as people see them; workers that will not come back."""

import msgspec
import structlog

from services.registry.guarantees import pool_notes
from services.registry.matrix import MatrixService
from services.registry.mounting import Mounting
from services.registry.reports import Reports
from services.registry.shares import SharesService
from services.registry.store import Store
from shared.bus import Entry
from shared.contracts import adapters, admin, state
from shared.contracts.adapters import PoolEntry, PoolWorker
from shared.contracts.subjects import token
from shared.contracts.workers import HelloAccepted, WorkerHello
from shared.errors import InvalidRequest, NotFound, TenantryError
from shared.policy.admission import held_bytes
from shared.policy.guarantees import pool_kv_bytes
from shared.policy.mounts import Change, worker_arrived, worker_removed
from shared.policy.placement import slots_held

log = structlog.get_logger()


class WorkerService:
    def __init__(self, store: Store, mounting: Mounting, matrix: MatrixService, reports: Reports, shares: SharesService) -> None:
        self._store = store
        self._mounting = mounting
        self._matrix = matrix
        self._reports = reports
        self._shares = shares

    async def hello(self, hello: WorkerHello) -> HelloAccepted:
        """The worker stands in its pool's entry (made for the first one) under this incarnation, and has its shares.

        The base's own label becomes an alias for its identity, unless the label has an entry already: that is an operator's.

        :raises BaseMismatch: the pool serves another base.
        :raises Conflict: it offers less than what is mounted on it needs.
        """
        try:
            token(hello.worker_id)
            token(hello.pool_id)
        except ValueError as error:
            raise InvalidRequest(str(error), field="worker_id") from error
        base = hello.base
        await self._store.catalog.put(state.BASE_PREFIX + base.digest, msgspec.json.encode(base))
        await self._matrix.add_label(base.label, base.identity, only_if_new=True)
        worker = PoolWorker(worker_id=hello.worker_id, incarnation=hello.incarnation, limits=hello.limits, engine=hello.engine)
        await self._pool_exists(hello.pool_id, base.identity)

        async def arrive(pool: PoolEntry, revision: int) -> Change | TenantryError:
            return worker_arrived(pool, worker, base.identity, revision)

        done = await self._mounting.change(hello.pool_id, arrive)
        assert done is not None
        await self._shares.settle_pool(hello.pool_id, done[1])
        log.info("worker.arrived", worker=hello.worker_id, incarnation=hello.incarnation, pool=hello.pool_id, base=base.identity)
        return HelloAccepted(generation=done[1])

    async def _pool_exists(self, pool_id: str, base: str) -> None:
        async def make(entry: Entry | None) -> bytes | None:
            return adapters.encode(PoolEntry(pool_id=pool_id, base=base)) if entry is None else None

        await self._store.change(self._store.live, state.POOL_PREFIX + pool_id, make)

    async def remove(self, request: admin.RemoveWorker) -> admin.PoolView:
        """:raises NotFound: no such worker."""

        async def leave(pool: PoolEntry, revision: int) -> Change | TenantryError:
            if request.worker_id not in pool.workers:
                return NotFound(f"pool {request.pool_id} has no worker {request.worker_id}", worker=request.worker_id)
            return worker_removed(pool, request.worker_id, revision)

        done = await self._mounting.change(request.pool_id, leave)
        assert done is not None
        self._reports.forget(request.worker_id)
        await self._shares.settle_pool(request.pool_id, done[1])
        log.warning("worker.removed", worker=request.worker_id, released=len(done[0].outcomes))
        return self._view(done[0].pool, done[1])

    async def list_pools(self, _request: admin.ListPools) -> list[admin.PoolView]:
        return [self._view(pool, revision) for _, (pool, revision) in sorted((await self._store.pools()).items())]

    def _view(self, pool: PoolEntry, revision: int) -> admin.PoolView:
        return admin.PoolView(
            pool_id=pool.pool_id,
            base=pool.base,
            generation=revision,
            workers=tuple(self._worker_view(pool, worker) for _, worker in sorted(pool.workers.items())),
            tenants=tuple(
                admin.PoolTenantView(
                    tenant=tenant.name,
                    vram_held_bytes=held_bytes(pool, tenant.tenant_id),
                    vram_quota_bytes=tenant.vram_quota_bytes,
                    upgrade_headroom_bytes=tenant.upgrade_headroom_bytes,
                )
                for tenant in self._store.tenants()
            ),
            mounts=tuple(mount for _, mount in sorted(pool.mounts.items())),
            aliases=pool.aliases,
            canaries=pool.canaries,
            kv_cache_bytes=pool_kv_bytes(pool),
            kv_guaranteed_bytes=sum(pool.guaranteed.values()),
            notes=tuple(pool_notes(pool)),
        )

    def _worker_view(self, pool: PoolEntry, worker: PoolWorker) -> admin.WorkerView:
        report, age_s = self._reports.last(worker.worker_id)
        return admin.WorkerView(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            engine=worker.engine,
            slots=worker.limits.slots,
            slots_held=slots_held(pool, worker.worker_id),
            max_rank=worker.limits.max_rank,
            bytes_per_rank=worker.limits.bytes_per_rank,
            report=report,
            report_age_s=age_s,
        )
