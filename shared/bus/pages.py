"""A stream read page by page: for listings that people ask for, bounded in messages and in time."""

import asyncio
import contextlib
import secrets
from datetime import UTC, datetime

import nats.errors
import nats.js.errors
from nats.js import api

from shared.bus.connection import Bus, BusUnavailable
from shared.bus.follow import Stored

_FETCH = 256


async def read_page(
    bus: Bus, stream: str, subject: str, *, after: int = 0, since_s: float = 0.0, count: int, timeout_s: float = 2.0
) -> tuple[list[Stored], bool]:
    """At most `count` messages of the filter, oldest first, and whether more wait.

    They begin after the sequence `after`, else with what was stored at since_s (1970), else with the oldest.

    :raises BusUnavailable: no answer.
    """
    config = api.ConsumerConfig(
        name=f"page_{secrets.token_hex(12)}",
        filter_subject=subject,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=10.0,
        mem_storage=True,
        num_replicas=1,
    )
    if after:
        config.deliver_policy, config.opt_start_seq = api.DeliverPolicy.BY_START_SEQUENCE, after + 1
    elif since_s > 0:
        config.deliver_policy = api.DeliverPolicy.BY_START_TIME
        config.opt_start_time = datetime.fromtimestamp(since_s, UTC)
    found: list[Stored] = []
    try:
        info = await bus.js.add_consumer(stream, config)
        left = info.num_pending or 0
        subscription = await bus.js.pull_subscribe_bind(config.name, stream)
        try:
            async with asyncio.timeout(timeout_s):
                while left and len(found) < count:
                    for message in await subscription.fetch(min(_FETCH, count - len(found)), timeout=timeout_s):
                        metadata = message.metadata
                        stamp_ms = round(metadata.timestamp.timestamp() * 1_000_000) // 1000
                        found.append(Stored(metadata.sequence.stream, stamp_ms, message.subject, message.data))
                        left = metadata.num_pending
        except TimeoutError:
            pass  # what has come is a page too
        finally:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                await subscription.unsubscribe()
                await bus.js.delete_consumer(stream, config.name or "")
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"cannot read {stream}: {error}", retry_after_s=1.0) from error
    return found, bool(left)
