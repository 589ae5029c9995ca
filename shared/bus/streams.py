"""JetStream streams: made once, published to with an acknowledgement, read by durable pull consumers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from shared.bus.connection import Bus, BusUnavailable

log = structlog.get_logger()


async def ensure_stream(
    bus: Bus,
    name: str,
    subjects: tuple[str, ...],
    *,
    work_queue: bool = False,
    max_age_s: float = 0.0,
    max_per_subject: int = -1,
    max_message_bytes: int = -1,
    max_bytes: int = -1,
    append_only: bool = False,
) -> None:
    """The stream exists with these subjects, on file. `work_queue`: a message is gone once acknowledged.

    `append_only`: nobody can delete a message or purge the stream, not even by its own configuration later.
    `max_per_subject`: the oldest of one subject go first, whatever the others hold (-1: no bound). `max_bytes`: the server sets
    that much of its disk aside, and the oldest go beyond it.

    :raises BusUnavailable: no answer, or the server refuses.
    """
    retention = api.RetentionPolicy.WORK_QUEUE if work_queue else api.RetentionPolicy.LIMITS
    config = api.StreamConfig(
        name=name,
        subjects=list(subjects),
        retention=retention,
        storage=api.StorageType.FILE,
        max_age=max_age_s,
        max_msgs_per_subject=max_per_subject,
        max_msg_size=max_message_bytes,
        max_bytes=max_bytes,
        duplicate_window=min(max_age_s, 120.0) if max_age_s else 120.0,
        discard=api.DiscardPolicy.OLD,
        deny_delete=append_only,
        deny_purge=append_only,
    )
    try:
        try:
            await bus.js.add_stream(config)
        except nats.js.errors.BadRequestError:
            await bus.js.update_stream(config)
    except (nats.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"stream {name} cannot be made: {error}", retry_after_s=1.0) from error


async def publish_durable(bus: Bus, subject: str, data: bytes, message_id: str = "", timeout_s: float = 5.0) -> int:
    """Returns the stream sequence once the server has it on file.

    :raises BusUnavailable: no acknowledgement in timeout_s (it may be stored or not; message_id makes a repeat harmless).
    """
    headers = {"Nats-Msg-Id": message_id} if message_id else None
    try:
        ack = await bus.js.publish(subject, data, timeout=timeout_s, headers=headers)
    except (nats.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"not stored on {subject}: {error}", retry_after_s=1.0) from error
    return ack.seq


class Delivery:
    """One message of a durable consumer; exactly one of ack, retry or reject ends it."""

    def __init__(self, message: Msg) -> None:
        self._message = message
        self.subject = message.subject
        self.data = message.data
        self.sequence = message.metadata.sequence.stream
        self.deliveries = message.metadata.num_delivered or 1

    async def ack(self) -> None:
        """The server has our acknowledgement when this returns.

        :raises BusUnavailable: it has not, so the message will come again.
        """
        try:
            await self._message.ack_sync(timeout=5)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"acknowledgement not confirmed: {error}", retry_after_s=1.0) from error

    async def working(self) -> None:
        """Still at it: the redelivery timer starts again."""
        try:
            await self._message.in_progress()
        except nats.errors.Error as error:
            log.debug("stream.in_progress_failed", error=str(error))

    async def retry(self, delay_s: float) -> None:
        try:
            await self._message.nak(delay=delay_s)
        except nats.errors.Error as error:
            log.debug("stream.nak_failed", error=str(error))

    async def reject(self) -> None:
        """Never deliver again (malformed)."""
        try:
            await self._message.term()
        except nats.errors.Error as error:
            log.debug("stream.term_failed", error=str(error))


class Consumer:
    """A durable pull consumer. `messages` yields for ever and outlives reconnects; fetches are short (facts: they hang)."""

    def __init__(
        self,
        bus: Bus,
        stream: str,
        durable: str,
        subjects: tuple[str, ...],
        *,
        ack_wait_s: float = 10.0,
        max_ack_pending: int = 1,
        batch: int = 1,
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._durable = durable
        self._batch = batch
        self._config = api.ConsumerConfig(
            durable_name=durable,
            filter_subjects=list(subjects) if len(subjects) > 1 else None,
            filter_subject=subjects[0] if len(subjects) == 1 else None,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ack_wait_s,
            max_ack_pending=max_ack_pending,
            deliver_policy=api.DeliverPolicy.ALL,
        )

    async def messages(self) -> AsyncIterator[Delivery]:
        subscription = None
        try:
            while True:
                try:
                    if subscription is None:
                        await self._bus.js.add_consumer(self._stream, self._config)
                        subscription = await self._bus.js.pull_subscribe_bind(durable=self._durable, stream=self._stream)
                    batch = await subscription.fetch(self._batch, timeout=1)
                except (nats.errors.TimeoutError, TimeoutError):
                    continue
                except (nats.errors.Error, nats.js.errors.Error) as error:
                    log.warning("stream.fetch_failed", stream=self._stream, error=str(error) or type(error).__name__)
                    await _leave(subscription)
                    subscription = None
                    await asyncio.sleep(0.2)
                    continue
                for message in batch:
                    yield Delivery(message)
        finally:
            await _leave(subscription)


async def _leave(subscription: JetStreamContext.PullSubscription | None) -> None:
    """What nobody fetches any more would hold up the connection's own drain."""
    if subscription is not None:
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()


async def read_last(bus: Bus, stream: str, subject: str, limit: int) -> list[bytes]:
    """The newest `limit` messages of a subject filter, oldest first; for listings, not for work."""
    found: list[bytes] = []
    try:
        info = await bus.js.stream_info(stream)
        start = max(info.state.first_seq, info.state.last_seq - 10_000)
        config = api.ConsumerConfig(deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=max(start, 1))
        subscription = await bus.js.subscribe(subject, stream=stream, ordered_consumer=True, config=config)
        try:
            consumer = await subscription.consumer_info()
            left = (consumer.num_pending or 0) + (consumer.delivered.consumer_seq if consumer.delivered else 0)
            while left:
                message = await subscription.next_msg(timeout=2)
                found.append(message.data)
                left = message.metadata.num_pending
        finally:
            await subscription.unsubscribe()
    except (nats.errors.TimeoutError, TimeoutError):
        pass
    except (nats.errors.Error, nats.js.errors.Error) as error:
        raise BusUnavailable(f"cannot read {stream}: {error}", retry_after_s=1.0) from error
    return found[-limit:]
