"""Small values for tests of the policies about a pool's entry."""

import msgspec

from shared.contracts.adapters import Mount, PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.state import Tenant
from shared.errors import TenantryError
from shared.policy.admission import Ask, Refusal, Reserved, decide
from shared.policy.lifecycle import AdapterState

BASE = "tiny@" + "0" * 64
PER_RANK = 100


def limits(slots: int = 2, max_rank: int = 16, bytes_per_rank: int = PER_RANK) -> EngineLimits:
    return EngineLimits(slots=slots, max_rank=max_rank, bytes_per_rank=bytes_per_rank)


def worker(worker_id: str = "w1", incarnation: str = "i1", slots: int = 2, **changes: int) -> PoolWorker:
    return PoolWorker(worker_id=worker_id, incarnation=incarnation, limits=limits(slots, **changes))


def pool(*workers: PoolWorker) -> PoolEntry:
    return PoolEntry(pool_id="main", base=BASE, workers={w.worker_id: w for w in workers or (worker(),)})


def tenant(name: str = "sales", quota: int = 10_000, headroom: int = 0, **ceilings: int) -> Tenant:
    return Tenant(tenant_id=f"tn_{name}", name=name, vram_quota_bytes=quota, upgrade_headroom_bytes=headroom, adapter_ceilings=ceilings)


def ask(name: str = "tone", adapter_id: str = "", rank: int = 8, drain_first: bool = False, version: int = 0) -> Ask:
    adapter_id = adapter_id or f"ad_{name}"
    return Ask(
        adapter_id=adapter_id,
        name=name,
        version=version,
        digest=f"sha256:{adapter_id}",
        rank=rank,
        true_bytes=1,
        artifact=adapter_id,
        artifact_sha256="",
        artifact_bytes=1,
        drain_first=drain_first,
    )


def reserved(outcome: Reserved | Refusal) -> Reserved:
    assert isinstance(outcome, Reserved), outcome
    return outcome


def admit(entry: PoolEntry, who: Tenant, what: Ask, revision: int = 1) -> PoolEntry:
    return reserved(decide(entry, who, what, revision)).pool


def refused(outcome: Reserved | Refusal) -> TenantryError:
    assert isinstance(outcome, TenantryError), outcome
    return outcome


def ready(entry: PoolEntry, adapter_id: str) -> PoolEntry:
    """The entry with that mount serving its alias."""
    mount = with_state(entry.mounts[adapter_id], AdapterState.READY)
    aliases = {**entry.aliases, mount.tenant: {**entry.aliases.get(mount.tenant, {}), mount.name: adapter_id}}
    return msgspec.structs.replace(entry, mounts={**entry.mounts, adapter_id: mount}, aliases=aliases)


def with_state(mount: Mount, state: AdapterState) -> Mount:
    return msgspec.structs.replace(mount, state=state)
