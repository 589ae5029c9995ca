"""All that the registry keeps: buckets and streams opened or made, typed reads, and changes by compare-and-set.

The mirrors are for listings and waiting; whatever decides reads the bucket itself.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import structlog

from services.registry.fence import fence
from shared.bus import (
    Bucket,
    Bus,
    Entry,
    Mirror,
    Objects,
    delete_objects,
    ensure_counters,
    ensure_stream,
    limit_objects,
    open_bucket,
    open_objects,
)
from shared.contracts import adapters, audit, rates, state, usage
from shared.contracts.adapters import PoolEntry
from shared.contracts.base import BaseDescription
from shared.contracts.state import AdapterRecord, ApiKey, Matrix, Tenant
from shared.errors import Conflict, NotFound
from shared.policy.residency import accounted
from shared.runtime import end

log = structlog.get_logger()

T = TypeVar("T")
_ATTEMPTS = 60
_DAY_S = 86_400.0
_EVENTS_PER_TENANT = 10_000
# tenants write these themselves, and no one of them may fill the disk
_ONBOARDINGS_PER_TENANT = 1_000
_ONBOARDING_BYTES = 64 * 1024
_decode_base = msgspec.json.Decoder(BaseDescription).decode


class Changes:
    """Wakes whoever waits for something in the mirrors to come true. `count` grows with all but heartbeats."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def tell(self, key: str, _entry: Entry | None) -> None:
        self.count += key != state.HEARTBEAT_KEY
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, check: Callable[[], Awaitable[T | None]], timeout_s: float) -> T | None:
        """The first value of `check` that is not None, asked again after every change; None after timeout_s."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while True:
            event = self._event
            found = await check()
            left_s = give_up_at - loop.time()
            if found is not None or left_s <= 0:
                return found
            try:
                await asyncio.wait_for(event.wait(), min(left_s, 1.0))
            except TimeoutError:
                continue


class Store:
    """Made by `open_store`."""

    def __init__(self, bus: Bus, live: Bucket, catalog: Bucket, staging: Objects, artifacts: Objects) -> None:
        self.bus = bus
        self.live = live
        self.catalog = catalog
        self.staging = staging
        self.artifacts = artifacts
        self.changes = Changes()
        self.live_mirror = Mirror(bus, live, self.changes.tell)
        self.catalog_mirror = Mirror(bus, catalog, self.changes.tell)
        self._decoded: dict[str, tuple[int, AdapterRecord]] = {}

    # reading

    async def pool(self, pool_id: str) -> tuple[PoolEntry, int] | None:
        found = await self.live.get(state.POOL_PREFIX + pool_id)
        return (adapters.decode_pool(found.value), found.revision) if found else None

    async def pools(self) -> dict[str, tuple[PoolEntry, int]]:
        found: dict[str, tuple[PoolEntry, int]] = {}
        for key in await self.live.keys(state.POOL_PREFIX):
            pool_id = key.removeprefix(state.POOL_PREFIX)
            pool = await self.pool(pool_id)
            if pool is not None:
                found[pool_id] = pool
        return found

    async def the_pool(self, pool_id: str) -> tuple[PoolEntry, int]:
        """The pool of that id; an empty one means the only pool there is.

        :raises NotFound: no such pool, none at all, or several.
        """
        if pool_id:
            found = await self.pool(pool_id)
            if found is None:
                raise NotFound(f"there is no pool {pool_id}", pool=pool_id)
            return found
        pools = await self.pools()
        if len(pools) != 1:
            known = ", ".join(sorted(pools))
            raise NotFound(
                f"name one of the pools: {known}" if pools else "there is no pool yet: no worker has said hello", pools=sorted(pools)
            )
        return next(iter(pools.values()))

    async def tenant(self, name: str) -> Tenant:
        """:raises NotFound: no such tenant."""
        found = await self.live.get(state.TENANT_PREFIX + name) if _is_key(name) else None
        if found is None:
            raise NotFound(f"there is no tenant {name}", tenant=name)
        return state.decode_tenant(found.value)

    async def tenant_of_id(self, tenant_id: str) -> Tenant | None:
        for tenant in self.tenants():
            if tenant.tenant_id == tenant_id:
                return tenant
        for key in await self.live.keys(state.TENANT_PREFIX):  # made a moment ago, perhaps by another registry
            found = await self.live.get(key)
            if found is not None and (tenant := state.decode_tenant(found.value)).tenant_id == tenant_id:
                return tenant
        return None

    def tenants(self) -> list[Tenant]:
        return [state.decode_tenant(entry.value) for entry in _under(self.live_mirror, state.TENANT_PREFIX)]

    def api_keys(self) -> list[tuple[str, ApiKey]]:
        """(KV key, key) of every API key."""
        found = sorted(self.live_mirror.entries.items())
        return [(name, state.decode_key(entry.value)) for name, entry in found if name.startswith(state.KEY_PREFIX)]

    async def record(self, adapter_id: str) -> AdapterRecord | None:
        found = await self.catalog.get(state.ADAPTER_PREFIX + adapter_id)
        return state.decode_record(found.value) if found else None

    def records(self) -> list[AdapterRecord]:
        """Every record as mirrored; decoded once per revision."""
        decoded: dict[str, tuple[int, AdapterRecord]] = {}
        for key, entry in self.catalog_mirror.entries.items():
            if key.startswith(state.ADAPTER_PREFIX):
                known = self._decoded.get(key)
                is_known = known is not None and known[0] == entry.revision
                decoded[key] = known if known and is_known else (entry.revision, state.decode_record(entry.value))
        self._decoded = decoded
        return [decoded[key][1] for key in sorted(decoded)]

    def seen_revision(self, adapter_id: str) -> int:
        """The revision at which the record is mirrored; 0: not at all."""
        entry = self.catalog_mirror.entries.get(state.ADAPTER_PREFIX + adapter_id)
        return entry.revision if entry else 0

    async def records_of(self, tenant_id: str, name: str) -> list[AdapterRecord]:
        """Every version under the name, oldest first, each as it stands now."""
        ids = {claimed async for claimed in self._claimed(tenant_id, name)}
        ids |= {record.adapter_id for record in self.records() if (record.tenant_id, record.name) == (tenant_id, name)}
        found = [record for adapter_id in ids if (record := await self.record(adapter_id)) is not None]
        return sorted(found, key=lambda record: (record.version, record.history[0].at if record.history else ""))

    async def _claimed(self, tenant_id: str, name: str) -> AsyncIterator[str]:
        prefix = f"{state.UPLOAD_PREFIX}{tenant_id}.{name}."
        for key in await self.catalog.keys(prefix):
            found = await self.catalog.get(key)
            if found is not None:
                yield found.value.decode()

    async def base(self, digest: str) -> BaseDescription:
        """:raises NotFound: no worker has described it."""
        found = await self.catalog.get(state.BASE_PREFIX + digest)
        if found is None:
            raise NotFound(f"no worker has described base {digest}", base=digest)
        return _decode_base(found.value)

    async def matrix(self) -> Matrix:
        found = await self.catalog.get(state.MATRIX_KEY)
        return state.decode_matrix(found.value) if found else Matrix()

    # changing

    async def change(self, bucket: Bucket, key: str, decide: Callable[[Entry | None], Awaitable[bytes | None]]) -> int:
        """Writes what `decide` makes of the key's present entry (None: nothing to write), again if somebody was faster.

        Returns the revision that holds then. A pool's entry is written with its charges as they follow from the change, whoever makes it.

        :raises Conflict: somebody was faster every time.
        """
        for attempt in range(_ATTEMPTS):
            found = await bucket.stamped(key)
            value = await decide(found)
            if value is None or (found is not None and value == found.value):
                return found.revision if found else 0
            if bucket is self.live and key.startswith(state.POOL_PREFIX):
                value = _accounted(found, value)
            try:
                return await bucket.update(key, value, found.revision) if found else await bucket.create(key, value)
            except Conflict:
                await asyncio.sleep(random.uniform(0.0, 0.002 * min(attempt + 1, 25)))
        raise Conflict(f"{key} is changed too often by others; try again", key=key, retry_after_s=1.0)

    async def fence_pool(self, pool_id: str) -> None:
        """No change of the pool's entry that was decided before this is written after it. Charges keep the stamps that they have by now."""
        await fence(self.live, state.POOL_PREFIX + pool_id, rewritten=lambda found: _accounted(found, found.value))

    async def change_record(self, adapter_id: str, decide: Callable[[AdapterRecord], AdapterRecord | None]) -> AdapterRecord | None:
        """The record after the change; None if it does not exist, or `decide` declines by None."""
        result: AdapterRecord | None = None

        async def encode(entry: Entry | None) -> bytes | None:
            nonlocal result
            result = decide(state.decode_record(entry.value)) if entry else None
            return state.encode(result) if result is not None else None

        await self.change(self.catalog, state.ADAPTER_PREFIX + adapter_id, encode)
        return result

    async def change_tenant(self, name: str, decide: Callable[[Tenant], Tenant]) -> Tenant:
        """:raises NotFound: no such tenant."""
        result: Tenant | None = None

        async def encode(entry: Entry | None) -> bytes:
            nonlocal result
            if entry is None:
                raise NotFound(f"there is no tenant {name}", tenant=name)
            result = decide(state.decode_tenant(entry.value))
            return state.encode(result)

        await self.change(self.live, state.TENANT_PREFIX + name, encode)
        assert result is not None
        return result

    async def make_uploads(self, tenant_id: str, limit_bytes: int) -> None:
        """The bucket that the tenant's own NATS user writes is there and bounded."""
        bucket = adapters.uploads_bucket(tenant_id)
        await open_objects(self.bus, bucket, create=True)
        await limit_objects(self.bus, bucket, limit_bytes)

    async def delete_uploads(self, tenant_id: str) -> None:
        await delete_objects(self.bus, adapters.uploads_bucket(tenant_id))

    async def objects(self, bucket: str) -> Objects:
        """:raises BusUnavailable: it does not exist."""
        return self.staging if bucket == adapters.STAGING_BUCKET else await open_objects(self.bus, bucket)

    @asynccontextmanager
    async def mirrored(self) -> AsyncGenerator[None]:
        """Mirrors run within; entered once both have their first snapshot."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(mirror.run()) for mirror in (self.live_mirror, self.catalog_mirror)]
            try:
                async with asyncio.timeout(10):
                    await self.live_mirror.synced.wait()
                    await self.catalog_mirror.synced.wait()
                yield
            finally:
                await end(tasks)


def _accounted(found: Entry | None, value: bytes) -> bytes:
    after = adapters.decode_pool(value)
    before = adapters.decode_pool(found.value) if found else PoolEntry(pool_id=after.pool_id, base=after.base)
    return adapters.encode(accounted(before, after, stamp_ms(found.stamp_s) if found else 0))


def stamp_ms(stamp_s: float) -> int:
    return round(stamp_s * 1_000_000) // 1000


def _under(mirror: Mirror, prefix: str) -> list[Entry]:
    return [entry for key, entry in sorted(mirror.entries.items()) if key.startswith(prefix)]


def _is_key(name: str) -> bool:
    return bool(name) and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)


async def open_store(bus: Bus, *, usage_max_bytes: int = 0, usage_max_age_s: float = 0.0, audit_kept_days: int = 400) -> Store:
    """Everything the registry keeps, made where it is missing.

    The usage stream has no bound unless it is given one: its records go once they are in a snapshot (usage_service.py).

    :raises BusUnavailable: no answer.
    """
    await ensure_stream(bus, adapters.COMMANDS_STREAM, adapters.COMMANDS_SUBJECTS, max_age_s=_DAY_S)
    await ensure_stream(bus, adapters.ACKS_STREAM, adapters.ACKS_SUBJECTS, max_age_s=_DAY_S)
    await ensure_stream(bus, adapters.EVENTS_STREAM, adapters.EVENTS_SUBJECTS, max_age_s=30 * _DAY_S, max_per_subject=_EVENTS_PER_TENANT)
    await ensure_stream(
        bus,
        adapters.ONBOARD_STREAM,
        adapters.ONBOARD_SUBJECTS,
        max_age_s=_DAY_S,
        max_per_subject=_ONBOARDINGS_PER_TENANT,
        max_message_bytes=_ONBOARDING_BYTES,
    )
    await ensure_stream(bus, audit.AUDIT_STREAM, audit.AUDIT_SUBJECTS, max_age_s=audit_kept_days * _DAY_S, append_only=True)
    await ensure_counters(bus, rates.RATES_STREAM, rates.RATES_SUBJECTS, rates.KEPT_S)
    await ensure_stream(bus, usage.USAGE_STREAM, usage.USAGE_SUBJECTS, max_age_s=usage_max_age_s, max_bytes=usage_max_bytes or -1)
    return Store(
        bus,
        live=await open_bucket(bus, state.STATE_BUCKET, create=True),
        catalog=await open_bucket(bus, state.CATALOG_BUCKET, create=True),
        staging=await open_objects(bus, adapters.STAGING_BUCKET, create=True),
        artifacts=await open_objects(bus, adapters.ARTIFACTS_BUCKET, create=True),
    )
