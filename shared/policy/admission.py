"""Whether an adapter version may be mounted: slots of a worker, bytes of its tenant, its own ceiling. Decides and reserves in one value.

Bytes are those of the slot (rank class times bytes per rank), whatever the tensors need. The rules, per tenant and pool:
the largest version of every name fits the quota; all versions together fit the quota and the upgrade headroom. With one
version per name the two are the same, so the headroom is used only while a name is being switched. What a worker keeps of
adapters in host memory is their packed files' bytes.
"""

import msgspec

from shared.contracts.adapters import Canary, DrainOrder, Mount, PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.state import Tenant
from shared.errors import Conflict, HostCacheExceeded, NoFreeSlot, QuotaExceeded
from shared.policy.lifecycle import AdapterState, LifecycleEvent, step
from shared.policy.placement import choose_worker, slots_held, waits

Refusal = QuotaExceeded | HostCacheExceeded | NoFreeSlot | Conflict


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A validated version that wants a mount. `version` 0: the name's next one is given out."""

    adapter_id: str
    name: str
    version: int = 0
    digest: str
    rank: int
    true_bytes: int
    artifact: str
    artifact_sha256: str
    artifact_bytes: int
    drain_first: bool = False  # take the room of the version that serves now; the alias is down in between
    trial: Canary | None = None  # it is mounted beside the version that serves, and answers only this part of the alias's requests


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """The entry with the reservation in it. `mount` is LOADING, or ADMITTED where it waits; `drained_first` is what has to go first."""

    pool: PoolEntry
    mount: Mount
    drained_first: Mount | None = None


def rank_class(rank: int, limits: EngineLimits) -> int:
    """The smallest class that holds `rank`; the engine's own maximum is always one."""
    classes = {limits.max_rank, *(known for known in limits.rank_classes if known <= limits.max_rank)}
    return min(known for known in classes if known >= rank)


def slot_bytes(rank: int, limits: EngineLimits) -> int:
    return rank_class(rank, limits) * limits.bytes_per_rank


def charged_bytes(pool: PoolEntry, mount: Mount) -> int:
    """What the mount adds to its tenant's account: behind another, only what it needs beyond that one's room."""
    if waits(pool, mount):
        return max(0, mount.slot_bytes - pool.mounts[mount.waits_for].slot_bytes)
    return mount.slot_bytes


def held_bytes(pool: PoolEntry, tenant_id: str, name: str | None = None) -> int:
    """All that the tenant's mounts (of one name, if given) are charged."""
    return sum(charged_bytes(pool, mount) for mount in pool.mounts.values() if mount.tenant_id == tenant_id and name in (None, mount.name))


def largest_versions_bytes(pool: PoolEntry, tenant_id: str) -> int:
    """The largest version of every name of the tenant, summed."""
    largest: dict[str, int] = {}
    for mount in pool.mounts.values():
        if mount.tenant_id == tenant_id:
            largest[mount.name] = max(largest.get(mount.name, 0), mount.slot_bytes)
    return sum(largest.values())


def decide(pool: PoolEntry, tenant: Tenant, ask: Ask, revision: int) -> Reserved | Refusal:
    """The reservation, or why not; `revision` is the one that `pool` was read at."""
    others = [m for m in pool.mounts.values() if m.tenant_id == tenant.tenant_id and m.name == ask.name]
    serving = pool.aliases.get(tenant.name, {}).get(ask.name, "")
    refusal = _no_trial(pool, tenant, ask, serving)
    if refusal is not None:
        return refusal
    coming = next((m for m in others if m.state in (AdapterState.ADMITTED, AdapterState.LOADING) and m.adapter_id != serving), None)
    if coming is not None:
        return Conflict(
            f"version {coming.version} of {ask.name} is still {coming.state}; wait until it is ready, or unload it first",
            adapter=ask.name,
            version=coming.version,
            state=coming.state.value,
        )
    predecessor = _predecessor(pool, serving, others) if ask.drain_first else None
    worker = pool.workers.get(predecessor.worker_id) if predecessor is not None else choose_worker(pool, ask.rank)
    if worker is None or worker.limits.max_rank < ask.rank:
        return _no_slot(pool, ask)
    mount = _mount(pool, tenant, ask, worker, revision, predecessor)
    reserved = _with(pool, tenant, mount, predecessor, revision, ask.trial)
    return _over_limits(pool, reserved.pool, tenant, mount, others) or _over_host_cache(pool, tenant, mount) or reserved


def _no_trial(pool: PoolEntry, tenant: Tenant, ask: Ask, serving: str) -> Conflict | None:
    """One trial at a time, and none of a name that nothing serves; a name with a trial gets no third version."""
    trial = pool.canaries.get(tenant.name, {}).get(ask.name)
    if trial is not None:
        version = pool.mounts[trial.adapter_id].version
        return Conflict(f"version {version} of {ask.name} is on trial: promote it or roll it back first", adapter=ask.name, version=version)
    if ask.trial is not None and serving not in pool.mounts:
        return Conflict(f"nothing serves {ask.name} yet that a version on trial could be compared with: add it", adapter=ask.name)
    return None


def _predecessor(pool: PoolEntry, serving: str, others: list[Mount]) -> Mount | None:
    """The version whose room passes on: the one that serves, else one that is draining already and that nobody waits for."""
    taken = {mount.waits_for for mount in pool.mounts.values()}
    free = [mount for mount in others if mount.adapter_id not in taken]
    return next((m for m in free if m.adapter_id == serving), None) or max(free, key=lambda m: m.version, default=None)


def _mount(pool: PoolEntry, tenant: Tenant, ask: Ask, worker: PoolWorker, revision: int, predecessor: Mount | None) -> Mount:
    state = step(AdapterState.VALIDATING, LifecycleEvent.RESERVED)
    return Mount(
        adapter_id=ask.adapter_id,
        tenant_id=tenant.tenant_id,
        tenant=tenant.name,
        name=ask.name,
        version=ask.version or pool.versions.get(tenant.name, {}).get(ask.name, 0) + 1,
        digest=ask.digest,
        worker_id=worker.worker_id,
        state=state if predecessor is not None else step(state, LifecycleEvent.LOAD_ORDERED),
        rank=ask.rank,
        rank_class=rank_class(ask.rank, worker.limits),
        slot_bytes=slot_bytes(ask.rank, worker.limits),
        true_bytes=ask.true_bytes,
        artifact=ask.artifact,
        artifact_sha256=ask.artifact_sha256,
        artifact_bytes=ask.artifact_bytes,
        ordered_after=revision,
        waits_for=predecessor.adapter_id if predecessor is not None else "",
        on_trial=ask.trial is not None,
    )


def _with(pool: PoolEntry, tenant: Tenant, mount: Mount, predecessor: Mount | None, revision: int, trial: Canary | None) -> Reserved:
    mounts, aliases = dict(pool.mounts), pool.aliases
    if predecessor is not None:
        if predecessor.state is not AdapterState.DRAINING:
            state = step(predecessor.state, LifecycleEvent.DRAIN_ORDERED)
            predecessor = msgspec.structs.replace(predecessor, state=state, drain=DrainOrder(), ordered_after=revision)
            mounts[predecessor.adapter_id] = predecessor
        aliases = without_alias(aliases, tenant.name, mount.name, predecessor.adapter_id)
    mounts[mount.adapter_id] = mount
    versions = {**pool.versions, tenant.name: dict(pool.versions.get(tenant.name, {}))}
    versions[tenant.name][mount.name] = max(mount.version, versions[tenant.name].get(mount.name, 0))
    canaries = pool.canaries
    if trial is not None:
        canaries = {**canaries, tenant.name: {**canaries.get(tenant.name, {}), mount.name: trial}}
    after = msgspec.structs.replace(pool, mounts=mounts, aliases=aliases, versions=versions, canaries=canaries)
    return Reserved(pool=after, mount=mount, drained_first=predecessor)


def without_alias(aliases: dict[str, dict[str, str]], tenant: str, name: str, adapter_id: str) -> dict[str, dict[str, str]]:
    """The aliases with tenant's `name` gone, if it stands for adapter_id."""
    if aliases.get(tenant, {}).get(name) != adapter_id:
        return aliases
    return {**aliases, tenant: {alias: target for alias, target in aliases[tenant].items() if alias != name}}


def without_trial(canaries: dict[str, dict[str, Canary]], tenant: str, name: str, adapter_id: str) -> dict[str, dict[str, Canary]]:
    """The trials with that of tenant's `name` gone, if it is this version's."""
    trial = canaries.get(tenant, {}).get(name)
    if trial is None or trial.adapter_id != adapter_id:
        return canaries
    left = {alias: other for alias, other in canaries[tenant].items() if alias != name}
    others = {owner: trials for owner, trials in canaries.items() if owner != tenant}
    return {**others, tenant: left} if left else others


def _over_limits(before: PoolEntry, after: PoolEntry, tenant: Tenant, mount: Mount, others: list[Mount]) -> QuotaExceeded | None:
    headroom = tenant.upgrade_headroom_bytes if others else 0
    hint = ""
    if others and mount.on_trial:
        hint = "; a version on trial is held beside the one that serves: grant upgrade headroom"
    elif others and not mount.waits_for:
        hint = (
            "; the version mounted now keeps its room until it has drained: grant upgrade headroom, or use --drain-first, which gives"
            " the new version the old one's room (the alias is down in between)"
        )
    limit = tenant.vram_quota_bytes + headroom
    held = held_bytes(before, tenant.tenant_id)
    is_over = largest_versions_bytes(after, tenant.tenant_id) > tenant.vram_quota_bytes
    if is_over or held_bytes(after, tenant.tenant_id) > limit:
        return _exceeded("tenant", tenant.name, mount, held, tenant.vram_quota_bytes if is_over else limit, hint)
    ceiling = tenant.adapter_ceilings.get(mount.name)
    if ceiling is not None:
        held = held_bytes(before, tenant.tenant_id, mount.name)
        is_over = mount.slot_bytes > ceiling
        if is_over or held_bytes(after, tenant.tenant_id, mount.name) > ceiling + headroom:
            return _exceeded("adapter", mount.name, mount, held, ceiling if is_over else ceiling + headroom, hint)
    return None


def host_bytes(pool: PoolEntry, tenant_id: str, worker_id: str) -> int:
    """What the tenant's adapters on a worker take of its host memory; one that waits takes what it inherits room from leaves."""
    mine = [mount for mount in pool.mounts.values() if (mount.tenant_id, mount.worker_id) == (tenant_id, worker_id)]
    return sum(max(0, mount.artifact_bytes - (pool.mounts[mount.waits_for].artifact_bytes if waits(pool, mount) else 0)) for mount in mine)


def _over_host_cache(before: PoolEntry, tenant: Tenant, mount: Mount) -> HostCacheExceeded | None:
    limit = tenant.limits.host_cache_bytes
    held = host_bytes(before, tenant.tenant_id, mount.worker_id)
    freed = before.mounts[mount.waits_for].artifact_bytes if mount.waits_for in before.mounts else 0
    if limit is None or held + max(0, mount.artifact_bytes - freed) <= limit:
        return None
    return HostCacheExceeded(
        f"{mount.name} takes {mount.artifact_bytes} bytes of worker {mount.worker_id}'s host memory; tenant {tenant.name} holds {held}"
        f" there and is allowed {limit}",
        asked_bytes=mount.artifact_bytes,
        held_bytes=held,
        limit_bytes=limit,
        worker=mount.worker_id,
    )


def _exceeded(scope: str, whose: str, mount: Mount, held: int, limit: int, hint: str) -> QuotaExceeded:
    return QuotaExceeded(
        f"{mount.name} asks for {mount.slot_bytes} bytes (rank class {mount.rank_class}); {scope} {whose} holds {held} and is allowed"
        f" {limit}{hint}",
        scope=scope,
        asked_bytes=mount.slot_bytes,
        held_bytes=held,
        limit_bytes=limit,
        drain_first_helps=bool(hint) and not mount.on_trial,
    )


def _no_slot(pool: PoolEntry, ask: Ask) -> NoFreeSlot:
    able = [worker for worker in pool.workers.values() if worker.limits.max_rank >= ask.rank]
    held, limit = sum(slots_held(pool, w.worker_id) for w in able), sum(w.limits.slots for w in able)
    if not pool.workers:
        message = f"pool {pool.pool_id} has no worker"
    elif not able:
        largest = max(worker.limits.max_rank for worker in pool.workers.values())
        message = f"no worker of pool {pool.pool_id} runs rank {ask.rank}; the largest is {largest}"
    else:
        message = f"all {limit} adapter slots of pool {pool.pool_id} are held ({held}); unload an adapter or add a worker"
    return NoFreeSlot(message, asked_slots=1, held_slots=held, limit_slots=limit)
