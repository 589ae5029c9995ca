"""What the ledger charges each mount, since when, exactly: kept in the pool's entry by the same compare-and-set that changes it.

An entry cannot hold the stamp of its own writing, so what begins or ends with a change says 0 and gets the stamp with the next one,
which reads it. A charge that ended stays in `left` until it has been published: a registry that dies in between loses nothing.
"""

import msgspec

from shared.contracts.adapters import Charge, Left, Mount, PoolEntry
from shared.contracts.usage import Residency
from shared.policy.admission import charged_bytes


def accounted(before: PoolEntry, after: PoolEntry, stored_ms: int) -> PoolEntry:
    """`after` with its charges; stored_ms is the stamp at which `before` was stored."""
    left = [_until(gone, stored_ms) for gone in after.left]
    charges: dict[str, Charge] = {}
    for adapter_id, charge in before.charges.items():
        known = msgspec.structs.replace(charge, since_ms=charge.since_ms or stored_ms)
        mount = after.mounts.get(adapter_id)
        if mount is not None and charged_bytes(after, mount) == known.bytes:
            charges[adapter_id] = known
        elif adapter_id in before.mounts:
            left.append(_left(before.mounts[adapter_id], known))
    for adapter_id, mount in after.mounts.items():
        size_bytes = charged_bytes(after, mount)
        if adapter_id not in charges and size_bytes:
            charges[adapter_id] = Charge(bytes=size_bytes)
    return msgspec.structs.replace(after, charges=charges, left=tuple(left))


def held(pool: PoolEntry, stored_ms: int, now_ms: int) -> list[Residency]:
    """Every present charge up to now_ms, which is a moment before the entry was read; stored_ms is its own stamp."""
    found = [
        _residency(pool, pool.mounts[adapter_id], charge.bytes, charge.since_ms or stored_ms, now_ms, final=False)
        for adapter_id, charge in pool.charges.items()
        if adapter_id in pool.mounts
    ]
    return [record for record in found if record.until_ms > record.since_ms]


def ended(pool: PoolEntry, stored_ms: int) -> list[Residency]:
    """Every charge that has ended and was not published yet."""
    return [
        _residency(pool, gone, gone.bytes, gone.since_ms, max(gone.since_ms, gone.until_ms or stored_ms), final=True) for gone in pool.left
    ]


def published(pool: PoolEntry, records: list[Residency]) -> PoolEntry:
    """The entry without the ended charges that these records tell."""
    told = {(record.adapter_id, record.since_ms) for record in records}
    return msgspec.structs.replace(pool, left=tuple(gone for gone in pool.left if (gone.adapter_id, gone.since_ms) not in told))


def _until(gone: Left, stored_ms: int) -> Left:
    return gone if gone.until_ms else msgspec.structs.replace(gone, until_ms=max(gone.since_ms, stored_ms))


def _left(mount: Mount, charge: Charge) -> Left:
    return Left(
        adapter_id=mount.adapter_id,
        tenant_id=mount.tenant_id,
        tenant=mount.tenant,
        name=mount.name,
        version=mount.version,
        digest=mount.digest,
        worker_id=mount.worker_id,
        bytes=charge.bytes,
        since_ms=charge.since_ms,
    )


def _residency(pool: PoolEntry, of: Mount | Left, size_bytes: int, since_ms: int, until_ms: int, *, final: bool) -> Residency:
    return Residency(
        pool_id=pool.pool_id,
        adapter_id=of.adapter_id,
        since_ms=since_ms,
        until_ms=until_ms,
        final=final,
        bytes=size_bytes,
        tenant_id=of.tenant_id,
        tenant=of.tenant,
        worker_id=of.worker_id,
        alias=of.name,
        version=of.version,
        digest=of.digest,
        base=pool.base,
    )
