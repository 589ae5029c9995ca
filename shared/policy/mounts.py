"""What happens to a pool's entry when something happens to a mount: orders, acknowledgements, workers that come and go.

Every function takes the entry as read (and the revision it was read at) and gives the entry to write, the commands that
follow from it, and which adapters changed. An acknowledgement that is not about the present order changes nothing.
"""

from collections.abc import Iterable

import msgspec

from shared.contracts.adapters import (
    Acknowledgement,
    AdapterDrained,
    AdapterFailed,
    AdapterLoaded,
    DrainOrder,
    Mount,
    PoolEntry,
    PoolWorker,
)
from shared.errors import BaseMismatch, Conflict
from shared.policy.admission import without_alias, without_trial
from shared.policy.compatibility import same_base
from shared.policy.lifecycle import AdapterState, IllegalTransition, LifecycleEvent, step


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's new state and why; `mount` is its mount after, or as it was when it left the entry.

    `through`: states that it passed on the way, in the same change. `action`: what happened to it, where its state stayed.
    """

    mount: Mount
    state: AdapterState
    through: tuple[AdapterState, ...] = ()
    note: str = ""
    action: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """`orders`: mounts whose worker must be told to load (LOADING) or drain (DRAINING)."""

    pool: PoolEntry
    orders: tuple[Mount, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


class Draft:
    """One entry being changed; collects what follows."""

    def __init__(self, pool: PoolEntry, revision: int) -> None:
        self._pool = pool
        self._revision = revision
        self.mounts = dict(pool.mounts)
        self.aliases = pool.aliases
        self.canaries = pool.canaries
        self.workers = pool.workers
        self._orders: list[str] = []
        self._outcomes: list[Outcome] = []

    def move(self, mount: Mount, event: LifecycleEvent, note: str = "", **changes: object) -> Mount:
        """:raises IllegalTransition: nothing has changed."""
        state = step(mount.state, event)
        moved = msgspec.structs.replace(mount, state=state, ordered_after=self._revision, **changes)
        self.mounts[mount.adapter_id] = moved
        if state is not mount.state:
            self._outcomes.append(Outcome(mount=moved, state=state, note=note))
        return moved

    def note(self, mount: Mount, action: str, note: str) -> None:
        """Something else than its state has changed."""
        self._outcomes.append(Outcome(mount=mount, state=mount.state, action=action, note=note))

    def order(self, mount: Mount) -> None:
        self._orders.append(mount.adapter_id)

    def drain(self, mount: Mount, drain: DrainOrder, note: str = "") -> None:
        """Out of the routes, then told to its worker; one that drains already only gets the new deadline."""
        if mount.state is AdapterState.DRAINING:
            self.mounts[mount.adapter_id] = mount = msgspec.structs.replace(mount, drain=drain)
        else:
            mount = self.move(mount, LifecycleEvent.DRAIN_ORDERED, note, drain=drain)
        self._leaves_routes(mount)
        self.order(mount)

    def remove(self, mount: Mount, event: LifecycleEvent, note: str = "") -> None:
        """Out of the entry: the reservation is released, and who waited for the room has it."""
        state = step(mount.state, event)
        del self.mounts[mount.adapter_id]
        self._leaves_routes(mount)
        self._outcomes.append(Outcome(mount=msgspec.structs.replace(mount, state=state), state=state, note=note))
        for other in [other for other in self.mounts.values() if other.waits_for == mount.adapter_id]:
            heir = msgspec.structs.replace(other, waits_for=mount.waits_for)  # usually nobody: then it waits no more
            self.mounts[other.adapter_id] = heir
            if heir.waits_for not in self.mounts and heir.state is AdapterState.ADMITTED:
                self.order(self.move(heir, LifecycleEvent.LOAD_ORDERED, waits_for=""))

    def _leaves_routes(self, mount: Mount) -> None:
        """Whatever it was: the alias's version, or the one on trial, whose trial is then over."""
        self.aliases = without_alias(self.aliases, mount.tenant, mount.name, mount.adapter_id)
        self.canaries = without_trial(self.canaries, mount.tenant, mount.name, mount.adapter_id)

    def done(self) -> Change:
        pool = msgspec.structs.replace(self._pool, mounts=self.mounts, aliases=self.aliases, canaries=self.canaries, workers=self.workers)
        orders = tuple(self.mounts[adapter_id] for adapter_id in dict.fromkeys(self._orders) if adapter_id in self.mounts)
        return Change(pool=pool, orders=orders, outcomes=tuple(self._outcomes))


def order_drain(pool: PoolEntry, adapter_ids: Iterable[str], drain: DrainOrder, revision: int) -> Change:
    """These mounts leave the routes and drain; those not in the entry are passed over."""
    draft = Draft(pool, revision)
    for adapter_id in adapter_ids:
        if adapter_id in draft.mounts:
            draft.drain(draft.mounts[adapter_id], drain)
    return draft.done()


def order_waiting(pool: PoolEntry, revision: int) -> Change:
    """Loads what was admitted and waits for nothing."""
    draft = Draft(pool, revision)
    for mount in pool.mounts.values():
        if mount.state is AdapterState.ADMITTED and mount.waits_for not in pool.mounts:
            draft.order(draft.move(mount, LifecycleEvent.LOAD_ORDERED, waits_for=""))
    return draft.done()


def is_current(pool: PoolEntry, ack: Acknowledgement) -> bool:
    """Whether it comes from the incarnation that stands in the entry, about the mount's present order and not an earlier one."""
    mount, worker = pool.mounts.get(ack.adapter_id), pool.workers.get(ack.worker_id)
    return (
        mount is not None
        and worker is not None
        and mount.worker_id == ack.worker_id
        and worker.incarnation == ack.incarnation
        and ack.generation > mount.ordered_after
    )


def acknowledge(pool: PoolEntry, ack: Acknowledgement, revision: int) -> Change | None:
    """What the acknowledgement changes; None if it is stale, or cannot happen in the mount's state.

    Loaded: ready; unless it is on trial, the alias switches to it and the version that served before drains. Drained, failed: the
    reservation is released.
    """
    if not is_current(pool, ack):
        return None
    draft = Draft(pool, revision)
    mount = pool.mounts[ack.adapter_id]
    try:
        match ack:
            case AdapterLoaded():
                _loaded(draft, mount)
            case AdapterDrained():
                draft.remove(mount, LifecycleEvent.DRAINED)
            case AdapterFailed():
                draft.remove(mount, LifecycleEvent.LOAD_FAILED)
    except IllegalTransition:
        return None
    return draft.done()


def _loaded(draft: Draft, mount: Mount) -> None:
    mount = draft.move(mount, LifecycleEvent.LOADED)
    if mount.on_trial:
        return
    before = draft.aliases.get(mount.tenant, {}).get(mount.name, "")
    draft.aliases = {**draft.aliases, mount.tenant: {**draft.aliases.get(mount.tenant, {}), mount.name: mount.adapter_id}}
    if before != mount.adapter_id and before in draft.mounts:
        draft.drain(draft.mounts[before], DrainOrder(), f"version {mount.version} serves now")


def worker_arrived(pool: PoolEntry, worker: PoolWorker, base: str, revision: int) -> Change | BaseMismatch | Conflict:
    """The entry with this worker in it. A new incarnation holds nothing yet: its mounts load again, its drains are ordered again."""
    if not same_base(pool.base, base):
        return BaseMismatch(
            f"pool {pool.pool_id} serves {pool.base}; worker {worker.worker_id} has {base}",
            expected=pool.base,
            got=base,
            source=f"worker {worker.worker_id}",
        )
    known = pool.workers.get(worker.worker_id)
    if known == worker:
        return Change(pool=pool)
    mounts = [mount for mount in pool.mounts.values() if mount.worker_id == worker.worker_id]
    refusal = _too_small(pool, worker, mounts)
    if refusal is not None:
        return refusal
    draft = Draft(pool, revision)
    draft.workers = {**pool.workers, worker.worker_id: worker}
    if known is not None and known.incarnation != worker.incarnation:
        for mount in mounts:
            moved = draft.move(mount, LifecycleEvent.WORKER_RESTARTED, "its worker started anew")
            if moved.state is not AdapterState.ADMITTED:
                draft.order(moved)
    return draft.done()


def _too_small(pool: PoolEntry, worker: PoolWorker, mounts: list[Mount]) -> Conflict | None:
    slots = sum(mount.waits_for not in pool.mounts for mount in mounts)
    rank = max((mount.rank for mount in mounts), default=0)
    if slots > worker.limits.slots:
        what, asked, limit = "slots", slots, worker.limits.slots
    elif rank > worker.limits.max_rank:
        what, asked, limit = "max_rank", rank, worker.limits.max_rank
    else:
        return None
    return Conflict(
        f"worker {worker.worker_id} offers {what} {limit}, and what is mounted on it needs {asked}: start it with at least that,"
        " or remove the worker, which releases its adapters",
        field=what,
        asked=asked,
        allowed=limit,
    )


def worker_removed(pool: PoolEntry, worker_id: str, revision: int) -> Change:
    """The entry without this worker and all that was on it."""
    draft = Draft(pool, revision)
    draft.workers = {known: worker for known, worker in pool.workers.items() if known != worker_id}
    gone = sorted((m for m in pool.mounts.values() if m.worker_id == worker_id), key=lambda m: m.waits_for == "")
    for mount in gone:  # those that wait first, so that nothing is ordered on a worker that is gone
        draft.remove(mount, LifecycleEvent.WORKER_LOST, f"worker {worker_id} was removed")
    return draft.done()
