"""`python -m benchmarks.tenancy_control.reserving`: one registry of several that reserve in one pool's entry, all at once.

Slots, VRAM and KV guarantees. Prints a tally with every step that it took. With `--careless` entries are written over whatever stands
there, as without compare-and-set: the steps must then show overdrafts.
"""

import argparse
import asyncio
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from services.registry.guarantees import GuaranteeService
from services.registry.mounting import Mounting
from services.registry.store import Store, open_store
from shared.bus import Bus, BusSettings, Entry, connect
from shared.contracts import adapters, state
from shared.contracts.adapters import PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.state import Tenant
from shared.errors import QuotaExceeded, TenantryError
from shared.policy.admission import Ask, decide
from shared.policy.mounts import Change

POOL = "bench"
TENANTS = tuple(Tenant(tenant_id=f"tn_{number}", name=f"team{number}", vram_quota_bytes=24) for number in range(6))
_LIMITS = EngineLimits(slots=8, max_rank=8, bytes_per_rank=1, kv_blocks=100, kv_block_bytes=10)
_WORKERS = ("w1", "w2")
_LANES = 2
_SEEN = 64  # revisions; each lane writes the one that it read last
_IDS = tuple(tenant.tenant_id for tenant in TENANTS)


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One write of the entry: what whoever wrote it took and gave back, as it has been told."""

    revision: int
    taken: dict[str, tuple[str, str, int]]  # adapter_id: tenant_id, worker_id, bytes
    left: tuple[str, ...]
    guaranteed: dict[str, int]  # tenant_id: KV bytes from now on


class Tally(msgspec.Struct, kw_only=True):
    attempts: int = 0
    reserved: int = 0
    refused: int = 0
    steps: list[Step] = []


async def make_pool(bus: Bus) -> None:
    store = await open_store(bus)
    workers = {name: PoolWorker(worker_id=name, incarnation="i", limits=_LIMITS) for name in _WORKERS}
    await store.live.put(state.POOL_PREFIX + POOL, adapters.encode(PoolEntry(pool_id=POOL, base="b@1", workers=workers)))


def overdrafts(steps: list[Step]) -> int:
    """Moments at which more was given out than there is, replayed in the order of writing: of KV guarantees, of tenants' VRAM, of slots.

    What counts is what takers were told, not what the entry says: an entry that was written over has forgotten some of it.
    """
    kv_bytes = len(_WORKERS) * _LIMITS.kv_blocks * _LIMITS.kv_block_bytes
    held: dict[str, tuple[str, str, int]] = {}
    guaranteed: dict[str, int] = {}
    found = 0
    for step in sorted(steps, key=lambda step: step.revision):
        held |= step.taken
        for adapter_id in step.left:
            held.pop(adapter_id, None)
        guaranteed |= step.guaranteed
        vram, slots = Counter[str](), Counter[str]()
        for tenant_id, worker_id, size in held.values():
            vram[tenant_id] += size
            slots[worker_id] += 1
        found += sum(guaranteed.values()) > kv_bytes
        found += any(vram[tenant.tenant_id] > tenant.vram_quota_bytes for tenant in TENANTS)
        found += any(count > _LIMITS.slots for count in slots.values())
    return found


def watch(store: Store, tally: Tally, *, careless: bool) -> None:
    """Whatever this store writes from now on is noted."""
    read, write, put = store.live.stamped, store.live.update, store.live.put
    seen: dict[int, PoolEntry] = {}

    async def stamped(key: str) -> Entry | None:
        entry = await read(key)
        if entry is not None:
            seen[entry.revision] = adapters.decode_pool(entry.value)
            if len(seen) > _SEEN:
                del seen[next(iter(seen))]
        if careless:
            await asyncio.sleep(0.002)
        return entry

    async def update(key: str, value: bytes, revision: int) -> int:
        before, after = seen[revision], adapters.decode_pool(value)
        written = await (put(key, value) if careless else write(key, value, revision))
        tally.steps.append(
            Step(
                written,
                {a: (m.tenant_id, m.worker_id, m.slot_bytes) for a, m in after.mounts.items() if a not in before.mounts},
                tuple(before.mounts.keys() - after.mounts.keys()),
                {t: size for t in _IDS if (size := after.guaranteed.get(t, 0)) != before.guaranteed.get(t, 0)},
            )
        )
        return written

    store.live.stamped, store.live.update = stamped, update


async def _reserve(store: Store, tally: Tally, attempts: int, chance: random.Random) -> None:
    mounting = Mounting(store)
    guarantees = GuaranteeService(store, mounting, 1.0)
    for number in range(attempts):
        tenant = chance.choice(TENANTS)
        tally.attempts += 1
        doing: Callable[[], Awaitable[Any]]
        if chance.random() < 0.3:
            size = chance.choice([0, 200, 700, 1500])
            doing = lambda t=tenant, s=size: guarantees.raise_to(t.tenant_id, s)  # noqa: E731
            if chance.random() < 0.5:
                doing = lambda t=tenant, s=size: guarantees.lower_to(t.tenant_id, s)  # noqa: E731
        else:
            doing = lambda t=tenant, n=number: _mount_or_leave(mounting, t, f"ad_{chance.getrandbits(40):x}", n, chance)  # noqa: E731
        try:
            await doing()
            tally.reserved += 1
        except (QuotaExceeded, TenantryError):
            tally.refused += 1


async def _mount_or_leave(mounting: Mounting, tenant: Tenant, adapter_id: str, number: int, chance: random.Random) -> None:
    name = f"a{number}_{adapter_id}"
    ask = Ask(adapter_id=adapter_id, name=name, digest="d", rank=8, true_bytes=8, artifact="", artifact_sha256="", artifact_bytes=0)

    async def change(pool: PoolEntry, revision: int) -> Change | TenantryError:
        if len(pool.mounts) > chance.randint(4, 16):
            left = dict(pool.mounts)
            del left[chance.choice(list(left))]
            return Change(pool=msgspec.structs.replace(pool, mounts=left))
        decided = decide(pool, tenant, ask, revision)
        return decided if isinstance(decided, TenantryError) else Change(pool=decided.pool)

    await mounting.change(POOL, change)


async def reserve(url: str, number: int, attempts: int, *, careless: bool) -> Tally:
    bus = await connect(BusSettings(url=url, name=f"registry{number}"))
    tally = Tally()
    try:
        store = await open_store(bus)
        watch(store, tally, careless=careless)
        async with asyncio.TaskGroup() as group:
            for lane in range(_LANES):
                group.create_task(_reserve(store, tally, attempts // _LANES, random.Random(number * 10 + lane)))
    finally:
        await bus.close()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--attempts", type=int, required=True)
    parser.add_argument("--careless", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    tally = asyncio.run(reserve(args.url, args.number, args.attempts, careless=args.careless))
    sys.stdout.buffer.write(msgspec.json.encode(tally))


if __name__ == "__main__":
    main()
