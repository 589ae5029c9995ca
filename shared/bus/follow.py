"""A whole stream read in order by one reader that keeps its own place: every message once, from any sequence on, whatever breaks.

No durable consumer: the place is the caller's, stored together with what it made of the messages.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator

import msgspec
import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from shared.bus.connection import Bus, BusUnavailable

log = structlog.get_logger()

_LINGER_S = 30.0
_AGAIN_S = 0.2


class Stored(msgspec.Struct, frozen=True):
    """`stamp_ms`: when the server stored it, by the server's clock, since 1970."""

    sequence: int
    stamp_ms: int
    subject: str
    data: bytes


class StreamState(msgspec.Struct, frozen=True):
    """`created`: tells a stream from another one made later under its name. `first` > `last`: it is empty."""

    created: str
    first: int
    last: int
    messages: int
    size_bytes: int


async def stream_state(bus: Bus, stream: str) -> StreamState:
    """:raises BusUnavailable: no answer, or no such stream."""
    try:
        info = await bus.js.stream_info(stream)
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"stream {stream} cannot be looked at: {error}", retry_after_s=1.0) from error
    state = info.state
    created = info.created.isoformat() if info.created else ""
    return StreamState(created, state.first_seq, state.last_seq, state.messages, state.bytes)


async def forget_before(bus: Bus, stream: str, sequence: int) -> None:
    """Removes every message older than `sequence`.

    :raises BusUnavailable: no answer.
    """
    try:
        await bus.js.purge_stream(stream, seq=sequence)
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"stream {stream} cannot be cut: {error}", retry_after_s=1.0) from error


async def follow(bus: Bus, stream: str, after: int, *, batch: int = 256) -> AsyncGenerator[list[Stored]]:
    """Messages after the sequence `after` in order, for ever, in batches as they come.

    A message that is no longer in the stream is passed over: the caller sees the step in the sequences.
    """
    subscription: JetStreamContext.PullSubscription | None = None
    name, seen = "", 0
    try:
        while True:
            try:
                if subscription is None:
                    name, seen = f"follow_{secrets.token_hex(12)}", 0
                    subscription = await _begin(bus, stream, name, after)
                messages = await subscription.fetch(batch, timeout=1)
            except (nats.errors.TimeoutError, TimeoutError):
                if not await _is_there(bus, stream, name):
                    await _leave(bus, stream, name, subscription)
                    subscription = None
                continue
            except (nats.errors.Error, nats.js.errors.Error) as error:
                log.warning("follow.fetch_failed", stream=stream, error=str(error) or type(error).__name__)
                await _leave(bus, stream, name, subscription)
                subscription = None
                await asyncio.sleep(_AGAIN_S)
                continue
            found, whole = _in_order(messages, seen)
            seen += len(found)
            if found:
                after = found[-1].sequence
                yield found
            if not whole:  # lost on the way: what is acknowledged by nobody is not sent again
                log.info("follow.gap", stream=stream, after=after)
                await _leave(bus, stream, name, subscription)
                subscription = None
    finally:
        await _leave(bus, stream, name, subscription)


async def _begin(bus: Bus, stream: str, name: str, after: int) -> JetStreamContext.PullSubscription:
    config = api.ConsumerConfig(
        name=name,
        deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=after + 1,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=_LINGER_S,
        mem_storage=True,
        num_replicas=1,
    )
    await bus.js.add_consumer(stream, config)
    return await bus.js.pull_subscribe_bind(name, stream)


def _in_order(messages: list[Msg], seen: int) -> tuple[list[Stored], bool]:
    """What continues the consumer's own count without a gap, and whether that is all."""
    found: list[Stored] = []
    for message in messages:
        metadata = message.metadata
        if metadata.sequence.consumer != seen + len(found) + 1:
            return found, False
        stamp_ms = round(metadata.timestamp.timestamp() * 1_000_000) // 1000
        found.append(Stored(metadata.sequence.stream, stamp_ms, message.subject, message.data))
    return found, True


async def _is_there(bus: Bus, stream: str, name: str) -> bool:
    """Whether the server still knows the consumer; true while it cannot be asked."""
    try:
        await bus.js.consumer_info(stream, name)
    except nats.js.errors.NotFoundError:
        return False
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
        return True
    return True


async def _leave(bus: Bus, stream: str, name: str, subscription: JetStreamContext.PullSubscription | None) -> None:
    if subscription is not None:
        with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
            await subscription.unsubscribe()
            await bus.js.delete_consumer(stream, name)
