"""Which worker an adapter goes to. Only the pool's entry decides; it knows reservations, not the load of the moment."""

from shared.contracts.adapters import Mount, PoolEntry, PoolWorker


def waits(pool: PoolEntry, mount: Mount) -> bool:
    """Whether the mount still stands behind the one whose room it takes over."""
    return mount.waits_for in pool.mounts


def slots_held(pool: PoolEntry, worker_id: str) -> int:
    """Slots reserved on the worker; a mount that waits for another's room takes that one's slot, not a second."""
    return sum(mount.worker_id == worker_id and not waits(pool, mount) for mount in pool.mounts.values())


def choose_worker(pool: PoolEntry, rank: int) -> PoolWorker | None:
    """The worker with the fewest reserved slots (then the smallest id) that has a free one and runs this rank; None if none has."""
    able = [
        (slots_held(pool, worker.worker_id), worker.worker_id)
        for worker in pool.workers.values()
        if worker.limits.max_rank >= rank and slots_held(pool, worker.worker_id) < worker.limits.slots
    ]
    return pool.workers[min(able)[1]] if able else None
