"""1,000 tenants with 10 adapters each, as they stand in the STATE bucket."""

import hashlib

from services.router.routes import RouteTable
from shared.bus import Entry
from shared.contracts import adapters, state
from shared.contracts.adapters import Mount, PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.state import Tenant
from shared.contracts.tenancy import TenantLimits
from shared.policy.lifecycle import AdapterState

TENANTS, ADAPTERS = 1000, 10


def secret(number: int) -> str:
    return f"tk_{number:05}"


def configuration(pools: int, tenants: int = TENANTS) -> dict[str, bytes]:
    """STATE keys and values: every tenant with a key and limits, its adapters all in one of the pools."""
    found: dict[str, bytes] = {}
    mounts: list[dict[str, Mount]] = [{} for _ in range(pools)]
    aliases: list[dict[str, dict[str, str]]] = [{} for _ in range(pools)]
    limits = TenantLimits(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrent=8)
    for number in range(tenants):
        name, tenant_id = f"team{number}", f"tn_{number:05}"
        found[state.TENANT_PREFIX + name] = state.encode(Tenant(tenant_id=tenant_id, name=name, limits=limits))
        hashed = hashlib.sha256(secret(number).encode()).hexdigest()
        found[state.KEY_PREFIX + hashed] = state.encode(state.ApiKey(key_id=f"key_{number}", label="", tenants=(name,)))
        for each in range(ADAPTERS):
            mount = Mount(
                adapter_id=f"ad_{number:05}_{each:02}aaaaaaaaaaaaaaaa",
                tenant_id=tenant_id,
                tenant=name,
                name=f"adapter{each}",
                version=1,
                digest=f"sha256:{hashed}",
                worker_id=f"w{each % 8}",
                state=AdapterState.READY,
                rank=16,
                rank_class=16,
                slot_bytes=1 << 20,
                true_bytes=1 << 20,
            )
            mounts[number % pools][mount.adapter_id] = mount
            aliases[number % pools].setdefault(name, {})[mount.name] = mount.adapter_id
    for number in range(pools):
        workers = {
            f"w{each}": PoolWorker(worker_id=f"w{each}", incarnation="i", limits=EngineLimits(slots=4000, max_rank=64, bytes_per_rank=1))
            for each in range(8)
        }
        entry = PoolEntry(
            pool_id=f"pool{number}", base=f"base{number}@{'ab' * 32}", workers=workers, mounts=mounts[number], aliases=aliases[number]
        )
        found[state.POOL_PREFIX + entry.pool_id] = adapters.encode(entry)
    return found


def table_of(values: dict[str, bytes]) -> RouteTable:
    table = RouteTable()
    for revision, (key, value) in enumerate(values.items(), 1):
        table.apply(key, Entry(value, revision))
    return table
