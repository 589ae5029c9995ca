"""What a client is told when its request is not let in: asked, held and allowed, in bytes and requests, never in blocks. Pure."""

from shared.errors import ConcurrencyExceeded, KvQuotaExceeded, QueueFull, QueueTimeout, TenantryError
from shared.policy.asks import Limit, Short

_NAMES = {
    Limit.KV: "its share of the KV cache",
    Limit.ROOM: "room in the engine's KV cache",
    Limit.CONCURRENT: "one of its tenant's concurrent requests to end",
    Limit.SEATS: "a seat in the engine",
    Limit.PREFILL: "other prompts to be read",
    Limit.QUEUE: "those before it",
}


def refusal(short: Short, block_bytes: int, retry_after_s: float) -> TenantryError:
    """A request that never fits, or that finds its tenant's queue full."""
    if short.limit is Limit.KV:
        return KvQuotaExceeded(
            f"the request needs {short.asked * block_bytes} bytes of KV cache for its prompt and max_tokens over all samples; the tenant "
            f"may hold {short.allowed * block_bytes} of this worker and holds {short.held * block_bytes}: ask for fewer tokens",
            asked_bytes=short.asked * block_bytes,
            held_bytes=short.held * block_bytes,
            limit_bytes=short.allowed * block_bytes,
        )
    if short.limit is Limit.CONCURRENT:
        return ConcurrencyExceeded(
            "the tenant may run no requests",
            asked=short.asked,
            held=short.held,
            limit=short.allowed,
            retry_after_s=retry_after_s,
        )
    if short.limit is Limit.SEATS:
        return ConcurrencyExceeded(
            f"{short.asked} samples at once; the engine runs {short.allowed} of one request: ask for a smaller n",
            asked=short.asked,
            held=short.held,
            limit=short.allowed,
            field="n",
        )
    assert short.limit is Limit.QUEUE
    return QueueFull(
        f"{short.held} of the tenant's requests wait on this worker already",
        asked=short.asked,
        held=short.held,
        limit=short.allowed,
        retry_after_s=retry_after_s,
    )


def timed_out(short: Short, block_bytes: int, waited_ms: float, retry_after_s: float) -> QueueTimeout:
    """A request that waited in its tenant's queue until the deadline."""
    unit = block_bytes if short.limit in (Limit.KV, Limit.ROOM) else 1
    return QueueTimeout(
        f"the request waited {waited_ms:.0f} ms in its tenant's queue, for {_NAMES[short.limit]}",
        waited_ms=round(waited_ms),
        waited_for=short.limit.value,
        asked=short.asked * unit,
        held=short.held * unit,
        limit=short.allowed * unit,
        retry_after_s=retry_after_s,
    )
