"""Workers that enforce their parts of tenants' quotas and hold nothing else, and attempts on them that are counted."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import msgspec
from ulid import ULID

from shared.bus import Bus, Entry, Mirror, open_bucket
from shared.contracts import admin, state, tenancy, workers
from shared.contracts.errors import to_error
from shared.contracts.tenancy import Share, TenantShares
from shared.runtime import end
from tests.integration.registry_rig import BASE, LIMITS, POOL

_REPORT_S = 0.03
_LIMITS = msgspec.structs.replace(LIMITS, kv_blocks=1000, kv_block_bytes=1)


class ShareWorker:
    """Admits while its part has room; what does not fit is counted as waiting in its next report."""

    def __init__(self, bus: Bus, worker_id: str, tenant_id: str) -> None:
        self.bus = bus
        self.worker_id = worker_id
        self.tenant_id = tenant_id
        self.incarnation = str(ULID())
        self.revision = 0
        self.share: Share | None = None
        self.running = 0
        self.kv_bytes = 0
        self.waiting = 0

    async def hello(self) -> None:
        hello = workers.WorkerHello(
            worker_id=self.worker_id, incarnation=self.incarnation, pool_id=POOL, base=BASE, limits=_LIMITS, engine="shares"
        )  # fmt: skip
        reply = admin.decode_reply(await self.bus.request(workers.HELLO_SUBJECT, workers.encode(hello), 20.0))
        if reply.error is not None:
            raise to_error(reply.error)

    async def run(self) -> None:
        """Watches and reports until cancelled."""
        mirror = Mirror(self.bus, await open_bucket(self.bus, state.STATE_BUCKET), self._changed, f"{tenancy.SHARES_PREFIX}{POOL}.*")
        async with asyncio.TaskGroup() as group:
            group.create_task(mirror.run())
            while True:
                await self._report()
                await asyncio.sleep(_REPORT_S)

    def _changed(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            return
        self.revision = max(self.revision, entry.revision)
        if key == tenancy.shares_key(POOL, self.tenant_id):
            share = tenancy.decode_shares(entry.value).workers.get(self.worker_id)
            self.share = share if share is not None and share.incarnation == self.incarnation else None

    async def _report(self) -> None:
        use = workers.TenantUse(tenant_id=self.tenant_id, running=self.running, waiting=self.waiting, kv_bytes=self.kv_bytes)
        report = workers.WorkerReport(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            pool_id=POOL,
            generation=0,
            state="ready",
            in_flight=self.running,
            waiting=self.waiting,
            capacity=64,
            base=workers.AdapterUse(adapter_id="", residency="device"),
            tenants=(use,),
            shares_revision=self.revision,
        )
        self.waiting = 0
        await self.bus.publish(workers.report_subject(self.worker_id), workers.encode(report))

    def admit(self, kv_bytes: int) -> bool:
        share = self.share
        if share is None or self.running >= (share.concurrent or 0) or self.kv_bytes + kv_bytes > (share.kv_bytes or 0):
            self.waiting += 1
            return False
        self.running += 1
        self.kv_bytes += kv_bytes
        return True

    def leave(self, kv_bytes: int) -> None:
        self.running -= 1
        self.kv_bytes -= kv_bytes


class Tally:
    """`overdrafts`: moments at which the pool had more of the tenant's than its quota, in use or in an entry."""

    def __init__(self, kv_quota_bytes: int, max_concurrent: int) -> None:
        self.kv_quota_bytes = kv_quota_bytes
        self.max_concurrent = max_concurrent
        self.attempts = 0
        self.admitted: dict[str, int] = {}
        self.entries = 0
        self.overdrafts = 0

    def look(self, pool: Sequence[ShareWorker]) -> None:
        running, kv_bytes = sum(worker.running for worker in pool), sum(worker.kv_bytes for worker in pool)
        self.overdrafts += running > self.max_concurrent or kv_bytes > self.kv_quota_bytes

    def look_at(self, entry: TenantShares) -> None:
        self.entries += 1
        shares = entry.workers.values()
        held, held_kv = sum(share.held_concurrent for share in shares), sum(share.held_kv_bytes for share in shares)
        self.overdrafts += held > self.max_concurrent or held_kv > self.kv_quota_bytes


@contextlib.asynccontextmanager
async def watching(bus: Bus, tenant_id: str, tally: Tally) -> AsyncIterator[None]:
    """Every revision of the tenant's entry is looked at."""

    def seen(key: str, entry: Entry | None) -> None:
        if entry is not None and key == tenancy.shares_key(POOL, tenant_id):
            tally.look_at(tenancy.decode_shares(entry.value))

    mirror = Mirror(bus, await open_bucket(bus, state.STATE_BUCKET), seen, f"{tenancy.SHARES_PREFIX}{POOL}.*")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(mirror.run())
        await mirror.synced.wait()
        yield
        await end([task])


async def route(pool: Sequence[ShareWorker], tally: Tally, attempts: int, chance: random.Random, favourite_every: int = 60) -> None:
    """One router's traffic: bursts that prefer now one worker and now another, each request short."""
    async with asyncio.TaskGroup() as group:
        for number in range(attempts):
            favourite = pool[(number // favourite_every) % len(pool)]
            worker = favourite if chance.random() < 0.9 else chance.choice(pool)
            kv_bytes = chance.randint(1, max(1, tally.kv_quota_bytes // 8))
            tally.attempts += 1
            if worker.admit(kv_bytes):
                tally.admitted[worker.worker_id] = tally.admitted.get(worker.worker_id, 0) + 1
                tally.look(pool)
                group.create_task(_serve(worker, kv_bytes, chance.uniform(0.0, 0.05)))
            await asyncio.sleep(0.004)


async def _serve(worker: ShareWorker, kv_bytes: int, seconds: float) -> None:
    await asyncio.sleep(seconds)
    worker.leave(kv_bytes)
