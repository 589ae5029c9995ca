"""How a tenant's quotas of a pool are split over its workers: made, cut, acknowledged, moved to where work waits.

`decide` gives the entry as it should stand next, from the entry as read and what workers last reported; whoever writes it, by
compare-and-set, may have read stale reports. In every entry `held >= part`, and the sum of `held` is at most the quota, or
at most what it was before (a quota that was lowered evicts nothing). No part of the KV cache is larger than its worker's cache.
"""

from collections.abc import Mapping

import msgspec

from shared.contracts.tenancy import Share, TenantLimits, TenantShares

UNKNOWN = 1 << 62  # held by a worker that was not limited when it last spoke
_FINE = 16  # a donor's slack below this part of the quota is given whole, else half of it
_UNKNOWN_CACHES: Mapping[str, int] = {}
_Parts = dict[str, int]


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's last report says about the tenant."""

    incarnation: str
    revision: int  # the newest revision of any tenant's shares that it enforces
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0


class _Load(msgspec.Struct, frozen=True):
    used: int  # of the resource
    waiting: int  # requests
    requests: int  # running and waiting
    lacks: int  # of the resource, for what waits; 0: nothing waits for it


def decide(
    entry: TenantShares | None,
    revision: int,
    tenant_id: str,
    tenant: str,
    limits: TenantLimits,
    workers: Mapping[str, str],
    uses: Mapping[str, Use],
    caches: Mapping[str, int] = _UNKNOWN_CACHES,
    assured: Mapping[str, int] = _UNKNOWN_CACHES,
) -> TenantShares:
    """The entry to write; equal to `entry` if nothing is to be done.

    `workers`: incarnations by worker_id as the pool's entry names them; `uses` by worker_id. A report counts only if it is of
    that incarnation and enforces `revision`, the one that `entry` was read at. `caches`: bytes of each worker's KV cache, empty
    where one of them has not said; `assured`: how much of each is the tenant's alone (shared/policy/guarantees.py).
    """
    known = entry.workers if entry is not None else {}
    before = entry.limits if entry is not None else None
    kept = {worker_id: known[worker_id] for worker_id in known if worker_id in workers}
    uses = {worker_id: use for worker_id, use in uses.items() if use.incarnation == workers.get(worker_id)}
    gone = {worker_id for worker_id, share in kept.items() if share.incarnation != workers[worker_id]}
    enforced = {worker_id for worker_id in kept if worker_id in uses and uses[worker_id].revision >= revision} - gone
    kv = _split(
        limits.kv_quota_bytes,
        workers,
        {w: s.kv_bytes for w, s in kept.items()},
        {w: s.held_kv_bytes for w, s in kept.items()},
        {w: _Load(u.kv_bytes, u.waiting, u.running + u.waiting, limits.kv_quota_bytes or 0 if u.waiting else 0) for w, u in uses.items()},
        enforced,
        gone,
        caches if caches.keys() >= workers.keys() else {},
        was_limited=before is None or before.kv_quota_bytes is not None,
    )
    concurrent = _split(
        limits.max_concurrent,
        workers,
        {w: s.concurrent for w, s in kept.items()},
        {w: s.held_concurrent for w, s in kept.items()},
        {w: _Load(u.running, u.waiting, u.running + u.waiting, u.waiting) for w, u in uses.items()},
        enforced,
        gone,
        {},
        was_limited=before is None or before.max_concurrent is not None,
    )
    shares = {
        worker_id: Share(
            incarnation=workers[worker_id],
            kv_bytes=kv[worker_id][0],
            held_kv_bytes=kv[worker_id][1],
            concurrent=concurrent[worker_id][0],
            held_concurrent=concurrent[worker_id][1],
            assured_kv_bytes=assured.get(worker_id, 0) if limits.kv_quota_bytes is not None else None,
        )
        for worker_id in sorted(workers)
    }
    return TenantShares(tenant_id=tenant_id, tenant=tenant, limits=limits, workers=shares)


def _split(
    quota: int | None,
    workers: Mapping[str, str],
    old_parts: Mapping[str, int | None],
    old_held: Mapping[str, int],
    loads: Mapping[str, _Load],
    enforced: set[str],
    gone: set[str],
    caps: Mapping[str, int],
    *,
    was_limited: bool,
) -> dict[str, tuple[int | None, int]]:
    """Part and held of every worker, for one resource. `caps`: what each worker has of it at all; empty: no bound."""
    if quota is None:
        return {worker_id: (None, 0) for worker_id in workers}
    if caps:
        quota = min(quota, sum(caps[worker_id] for worker_id in workers))
    parts = {worker_id: min(old_parts.get(worker_id) or 0, caps.get(worker_id, UNKNOWN)) for worker_id in workers}
    held: _Parts = {}
    for worker_id in workers:
        if worker_id in gone:  # its incarnation is dead, and holds nothing
            held[worker_id] = parts[worker_id]
        elif not was_limited:
            held[worker_id] = UNKNOWN
        else:
            held[worker_id] = max(old_held.get(worker_id, 0), parts[worker_id])
        if worker_id in enforced and was_limited:
            held[worker_id] = min(held[worker_id], max(parts[worker_id], loads[worker_id].used))
    if sum(parts.values()) > quota:
        parts = _scaled(parts, quota)
    elif not was_limited:
        parts = _levelled(parts, quota, caps)
    elif sum(held.values()) < quota:
        _grant(quota - sum(held.values()), parts, held, loads, caps)
    elif held == parts:
        _cut(quota, parts, loads, caps)
    return {worker_id: (parts[worker_id], held[worker_id]) for worker_id in workers}


def _scaled(parts: _Parts, quota: int) -> _Parts:
    """Cut in proportion, to the quota exactly."""
    total = sum(parts.values())
    cut = {worker_id: part * quota // total for worker_id, part in parts.items()}
    for worker_id in sorted(parts, key=lambda w: (-parts[w], w))[: quota - sum(cut.values())]:
        cut[worker_id] += 1
    return cut


def _levelled(parts: _Parts, total: int, caps: Mapping[str, int]) -> _Parts:
    """Raised so that they sum to `total` (or to all caps), the lowest first: in measure of the caps, else evenly."""
    weights = {worker_id: caps.get(worker_id, 1) if caps else 1 for worker_id in parts}
    order = sorted((w for w in parts if weights[w]), key=lambda w: (parts[w] / weights[w], w))
    if caps:
        total = min(total, sum(parts[w] for w in parts if not weights[w]) + sum(weights[w] for w in order))
    left = total - sum(parts.values())
    if left <= 0 or not order:
        return dict(parts)
    level, weight = 0, 0  # what those that are raised sum to, and their weight
    raised: list[str] = []
    for worker_id in order:
        if weight and parts[worker_id] * weight >= (level + left) * weights[worker_id]:
            break
        raised.append(worker_id)
        level += parts[worker_id]
        weight += weights[worker_id]
    after = dict(parts)
    for worker_id in raised:
        after[worker_id] = (level + left) * weights[worker_id] // weight
    for worker_id in raised[: total - sum(after.values())]:
        after[worker_id] += 1
    return after


def _grant(free: int, parts: _Parts, held: _Parts, loads: Mapping[str, _Load], caps: Mapping[str, int]) -> None:
    """What nobody has or may still use: to where work waits, the rest evenly."""
    waiting = {w: load for w, load in loads.items() if load.lacks > 0}
    weight = sum(load.requests for load in waiting.values())
    left = free
    for worker_id, load in sorted(waiting.items()):
        lacks = min(max(0, load.used + load.lacks - parts[worker_id]), caps.get(worker_id, UNKNOWN) - parts[worker_id])
        grant = min(left, lacks, -(-free * load.requests // weight))
        parts[worker_id] += grant
        left -= grant
    settled = {w: part for w, part in parts.items() if held[w] <= part}
    if settled:
        parts.update(_levelled(settled, sum(settled.values()) + left, caps))
    for worker_id in parts:
        held[worker_id] = max(held[worker_id], parts[worker_id])


def _cut(quota: int, parts: _Parts, loads: Mapping[str, _Load], caps: Mapping[str, int]) -> None:
    """Takes room from workers that do not need it, where another lacks some: `parts` shrink, `held` keeps it until they agree."""
    hungry = {w for w, load in loads.items() if load.lacks > 0 and load.used + load.lacks > parts[w]}
    lacking = {w for w in hungry if parts[w] < caps.get(w, UNKNOWN)}
    if lacking:
        fair = _fair(quota, parts, loads)
        for worker_id in parts:
            if worker_id in hungry:
                if any(parts[other] < fair[other] // 2 for other in lacking):
                    parts[worker_id] = min(parts[worker_id], fair[worker_id])
                continue
            used = loads[worker_id].used if worker_id in loads else 0
            slack = max(0, parts[worker_id] - used)
            parts[worker_id] -= slack if slack * _FINE <= quota else (slack + 1) // 2
    elif not hungry:
        even = _levelled(dict.fromkeys(parts, 0), quota, caps)
        if any(part < even[w] // 2 for w, part in parts.items()):  # so that work that comes there need not wait for a move
            for worker_id, part in parts.items():
                used = loads[worker_id].used if worker_id in loads else 0
                parts[worker_id] = min(part, max(even[worker_id], used))


def _fair(quota: int, parts: _Parts, loads: Mapping[str, _Load]) -> _Parts:
    """By running and waiting requests."""
    total = sum(load.requests for load in loads.values())
    return {w: quota * loads[w].requests // total if total and w in loads else 0 for w in parts}
