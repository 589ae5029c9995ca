"""Workers' acknowledgements: loaded, drained, failed. Each is carried into the pool's entry, or ignored because it is stale."""

import asyncio

import msgspec
import structlog

from services.registry.mounting import Mounting, Told
from services.registry.store import Store
from shared.bus import BusUnavailable, Consumer, Delivery
from shared.contracts import adapters
from shared.contracts.adapters import Acknowledgement, AdapterFailed, AdapterLoaded, PoolEntry
from shared.contracts.subjects import token
from shared.errors import NotFound, TenantryError
from shared.policy.lifecycle import LifecycleEvent
from shared.policy.mounts import Change, acknowledge

log = structlog.get_logger()

_DURABLE = "registry"
_RETRY_S = 1.0
_MAX_DELIVERIES = 100
_RELEASED = (
    "slot_bytes_returned", "host_bytes_freed", "device_free_bytes_before", "device_free_bytes_after", "completed", "aborted",
)  # fmt: skip


async def consume(store: Store, mounting: Mounting) -> None:
    """For ever. One at a time per registry: each is a compare-and-set of a few milliseconds."""
    consumer = Consumer(store.bus, adapters.ACKS_STREAM, _DURABLE, adapters.ACKS_SUBJECTS, ack_wait_s=5.0, max_ack_pending=64)
    async for delivery in consumer.messages():
        try:
            ack = adapters.decode_acknowledgement(delivery.data)
            for named in (ack.pool_id, ack.adapter_id, ack.worker_id):
                token(named)
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("ack.malformed", subject=delivery.subject, error=str(error))
            await delivery.reject()
            continue
        await _take(store, mounting, delivery, ack)


async def _take(store: Store, mounting: Mounting, delivery: Delivery, ack: Acknowledgement) -> None:
    try:
        applied = await apply(mounting, ack)
        if not applied and delivery.deliveries > 1:  # a registry may have died between the entry and what follows from it
            await catch_up(store, mounting, ack)
        await delivery.ack()
    except NotFound as error:  # a pool that is no more
        log.warning("ack.of_nothing", adapter=ack.adapter_id, message=error.message)
        await delivery.reject()
    except TenantryError as error:
        log.warning("ack.not_taken", adapter=ack.adapter_id, code=error.code, message=error.message)
        if isinstance(error, BusUnavailable):
            await asyncio.sleep(_RETRY_S)
        if delivery.deliveries < _MAX_DELIVERIES:
            await delivery.retry(_RETRY_S)
        else:  # the command is repeated while the mount stands still, and acknowledged anew
            await delivery.reject()
    except Exception:
        log.exception("ack.failed", adapter=ack.adapter_id)
        await delivery.reject()


async def catch_up(store: Store, mounting: Mounting, ack: Acknowledgement) -> None:
    """The record and the event of an acknowledgement that the entry has taken already."""
    found, record = await store.pool(ack.pool_id), await store.record(ack.adapter_id)
    if found is None or record is None:
        return
    if ack.adapter_id not in found[0].mounts and not isinstance(ack, AdapterLoaded):
        error = ack.error if isinstance(ack, AdapterFailed) else None
        event = LifecycleEvent.LOAD_FAILED if error is not None else LifecycleEvent.DRAINED
        record = await mounting.settle(record, event, found[1], error) or record
    await mounting.announce(record)


async def apply(mounting: Mounting, ack: Acknowledgement) -> bool:
    """Whether it changed anything.

    :raises TenantryError: it could not be carried out now.
    """

    async def decide(pool: PoolEntry, revision: int) -> Change | None:
        return acknowledge(pool, ack, revision)

    told = _told(ack)
    done = await mounting.change(ack.pool_id, decide, told)
    facts = {"adapter": ack.adapter_id, "worker": ack.worker_id, "generation": ack.generation, "incarnation": ack.incarnation}
    if done is None:
        log.info("ack.ignored", kind=type(ack).__name__, **facts)
        return False
    log.info("ack.taken", kind=type(ack).__name__, **facts, **told.released)
    return True


def _told(ack: Acknowledgement) -> Told:
    if isinstance(ack, AdapterFailed):
        return Told(error=ack.error)
    if isinstance(ack, AdapterLoaded):
        return Told(load_ms=ack.load_ms)
    return Told(released={name: getattr(ack, name) for name in _RELEASED})
