"""What the registry keeps, written once: a tenant, its key, and a pool whose adapters lie where the worker's cache would put them.

Uploading, validating and copying gigabytes is not on a request's path and is left out; everything that a router and a worker read or
write on the bus is real.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Mapping

import msgspec

from shared.bus import Bucket, Bus, Message, ensure_stream, open_bucket, open_objects
from shared.contracts import adapters, admin, state, usage, workers
from shared.contracts.adapters import AdapterLoaded, Mount, PoolEntry, PoolWorker
from shared.contracts.workers import HelloAccepted
from shared.errors import Conflict
from shared.policy.lifecycle import AdapterState

POOL, TENANT, WORKER = "main", "bench", "w0"
_BEAT_S = 0.25


class StandIn:
    """`folders`: the name of each adapter's folder in the worker's cache, by adapter_id."""

    def __init__(self, bus: Bus, folders: Mapping[str, str], rank: int, key: str) -> None:
        self._bus = bus
        self._mounts = {adapter_id: _mount(adapter_id, folder, rank) for adapter_id, folder in folders.items()}
        self._key = key
        self._bucket: Bucket | None = None
        self.all_ready = asyncio.Event()

    async def start(self) -> None:
        bucket = self._bucket = await open_bucket(self._bus, state.STATE_BUCKET, create=True)
        await open_objects(self._bus, adapters.ARTIFACTS_BUCKET, create=True)
        await ensure_stream(self._bus, adapters.COMMANDS_STREAM, adapters.COMMANDS_SUBJECTS)
        await ensure_stream(self._bus, adapters.ACKS_STREAM, adapters.ACKS_SUBJECTS)
        await ensure_stream(self._bus, usage.USAGE_STREAM, usage.USAGE_SUBJECTS)
        key = state.ApiKey(key_id="bench", label="benchmark", tenants=(TENANT,))
        await bucket.put(state.KEY_PREFIX + hashlib.sha256(self._key.encode()).hexdigest(), state.encode(key))
        await bucket.put(state.TENANT_PREFIX + TENANT, state.encode(state.Tenant(tenant_id="t_bench", name=TENANT)))
        await bucket.put(state.ROUTING_KEY, state.encode(state.Routing()))
        await self._bus.subscribe(workers.HELLO_SUBJECT, self._on_hello)
        for subject in adapters.ACKS_SUBJECTS:
            await self._bus.subscribe(subject, self._on_ack)
        await self._bus.flush()

    async def beat(self) -> None:
        """Runs until cancelled: routers believe a table whose heartbeat moves."""
        assert self._bucket is not None
        for count in itertools.count():
            await self._bucket.put(state.HEARTBEAT_KEY, str(count).encode())
            await asyncio.sleep(_BEAT_S)

    async def _on_hello(self, message: Message) -> None:
        hello = workers.decode_hello(message.data)
        worker = PoolWorker(worker_id=hello.worker_id, incarnation=hello.incarnation, limits=hello.limits, engine=hello.engine)
        entry = PoolEntry(pool_id=POOL, base=hello.base.identity, workers={hello.worker_id: worker}, mounts=self._mounts)
        assert self._bucket is not None
        generation = await self._bucket.put(state.POOL_PREFIX + POOL, adapters.encode(entry))
        result = msgspec.to_builtins(HelloAccepted(generation=generation))
        await self._bus.publish(message.reply, admin.encode(admin.Reply(result=result)))

    async def _on_ack(self, message: Message) -> None:
        """:raises AssertionError: an adapter failed to load."""
        ack = adapters.decode_acknowledgement(message.data)
        assert isinstance(ack, AdapterLoaded), ack
        assert self._bucket is not None
        key = state.POOL_PREFIX + POOL
        while True:
            found = await self._bucket.get(key)
            assert found is not None
            entry = adapters.decode_pool(found.value)
            mounts = {**entry.mounts, ack.adapter_id: msgspec.structs.replace(entry.mounts[ack.adapter_id], state=AdapterState.READY)}
            aliases = {TENANT: {mount.name: mount.adapter_id for mount in mounts.values() if mount.state is AdapterState.READY}}
            try:
                await self._bucket.update(
                    key, adapters.encode(msgspec.structs.replace(entry, mounts=mounts, aliases=aliases)), found.revision
                )
            except Conflict:
                continue
            if len(aliases[TENANT]) == len(mounts):
                self.all_ready.set()
            return


def _mount(adapter_id: str, folder: str, rank: int) -> Mount:
    return Mount(
        adapter_id=adapter_id,
        tenant_id="t_bench",
        tenant=TENANT,
        name=adapter_id,
        version=1,
        digest="sha256:" + folder,
        worker_id=WORKER,
        state=AdapterState.LOADING,
        rank=rank,
        rank_class=rank,
        slot_bytes=1,
        true_bytes=1,
        artifact=f"a/{folder}",
        artifact_sha256=folder,
        artifact_bytes=1,
    )
