"""How records of the usage stream become amounts of a quarter of an hour: what an attempt, an outcome and a residency come to, and when.

Everything follows from the stream's order and its server's stamps alone, so whoever reads the same stream comes to the same amounts.
All amounts are integers.
"""

import math

import msgspec

from shared.contracts.usage import AttemptUsage, EngineTime, RequestOutcome, Residency, Usage

QUARTER_MS = 900_000  # every time zone's days begin at one
DAY_MS = 86_400_000
QUARTERS = DAY_MS // QUARTER_MS
GRACE_MS = 3_600_000  # a day (UTC) is closed this long after its end: what comes later goes to the next open one
REMEMBERED_CLOSINGS = 2  # a request is known for this many closings of days after it ended; a repeat after that would count again

_MOST = 1 << 48  # so that sums of thousands fit 64 bits; of what has wide columns more
_MOST_BYTE_MS = 1 << 60
_PIECES_ARE_TOKENS = frozenset({"/v1/chat/completions", "/v1/completions"})


class Dimensions(msgspec.Struct, frozen=True, array_like=True):
    """Whose, and of what. Empty fields: the base itself, or refused before it was known."""

    tenant_id: str
    pool_id: str = ""
    base: str = ""
    adapter_id: str = ""
    alias: str = ""
    version: int = 0
    digest: str = ""
    key_id: str = ""


class Amounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums. `requests` and what follows it come from routers' outcomes, the rest from workers' attempts and the ledger."""

    requests: int = 0
    request_us: int = 0  # from the request's head to its end
    first_bytes: int = 0  # how many requests `first_byte_us` is the sum of
    first_byte_us: int = 0
    delivered_bytes: int = 0
    attempts: int = 0
    partial: int = 0  # attempts that were closed without their worker's last word
    prompt_tokens: int = 0  # cached ones included
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_us: int = 0
    first_tokens: int = 0
    first_token_us: int = 0
    attempt_us: int = 0
    gpu_us: int = 0
    kv_byte_ms: int = 0
    adapter_byte_ms: int = 0


AMOUNTS = Amounts.__struct_fields__


def plus(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(**{name: getattr(one, name) + getattr(other, name) for name in AMOUNTS})


def minus(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(**{name: getattr(one, name) - getattr(other, name) for name in AMOUNTS})


def dimensions_of(record: AttemptUsage | RequestOutcome | Residency) -> Dimensions:
    return Dimensions(
        tenant_id=record.tenant_id,
        pool_id=record.pool_id,
        base=record.base,
        adapter_id=record.adapter_id,
        alias=record.alias,
        version=record.version,
        digest=record.digest,
        key_id="" if isinstance(record, Residency) else record.key_id,
    )


def amounts_of_attempt(usage: AttemptUsage, outcome: RequestOutcome | None, *, partial: bool) -> Amounts:
    """What the attempt is billed. A partial one by its last checkpoint, and at least the tokens that the router handed to the client."""
    completion_tokens = usage.completion_tokens
    if partial and outcome is not None and outcome.attempts == usage.attempt:
        completion_tokens = max(completion_tokens, _delivered_tokens(outcome))
    return Amounts(
        attempts=1,
        partial=int(partial),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=completion_tokens,
        queue_us=_us(usage.queue_ms),
        first_tokens=int(usage.first_token_ms > 0),
        first_token_us=_us(usage.first_token_ms),
        attempt_us=_us(usage.total_ms),
        gpu_us=usage.gpu_us,
        kv_byte_ms=usage.kv_byte_ms,
    )


def _delivered_tokens(outcome: RequestOutcome) -> int:
    """At least so many: of a stream each piece after the first holds one or more tokens."""
    return max(0, outcome.delivered_events - 1) if outcome.path in _PIECES_ARE_TOKENS and outcome.status == 200 else 0


def amounts_of_outcome(outcome: RequestOutcome) -> Amounts:
    return Amounts(
        requests=1,
        request_us=_us(outcome.total_ms),
        first_bytes=int(outcome.first_byte_ms > 0),
        first_byte_us=_us(outcome.first_byte_ms),
        delivered_bytes=outcome.delivered_bytes,
    )


def residency_parts(from_ms: int, until_ms: int, size_bytes: int, open_day: int) -> list[tuple[int, int]]:
    """(quarter, byte-milliseconds) of size_bytes held in [from_ms, until_ms); what lies before the open days goes to their first quarter.

    The parts' sum is exactly size_bytes * (until_ms - from_ms).
    """
    first = open_day * QUARTERS
    parts: dict[int, int] = {}
    at_ms = from_ms
    while at_ms < until_ms:
        quarter = at_ms // QUARTER_MS
        end_ms = min(until_ms, max(quarter + 1, first) * QUARTER_MS)
        parts[max(quarter, first)] = parts.get(max(quarter, first), 0) + size_bytes * (end_ms - at_ms)
        at_ms = end_ms
    return sorted(parts.items())


def quarter_of(stamp_ms: int, open_day: int) -> int:
    """Where something stored at stamp_ms counts: never in a closed day, whatever the server's clock does."""
    return max(stamp_ms // QUARTER_MS, open_day * QUARTERS)


def open_day_at(stamp_ms: int) -> int:
    """The first day (since 1970, UTC) that is still open once a message of this stamp has come."""
    return (stamp_ms - GRACE_MS) // DAY_MS


def problem(record: Usage, subject: str, stamp_ms: int) -> str:
    """Why the record cannot count; "" if it can: of the wrong sender, negative, no number, or larger than anything real."""
    sender = subject.split(".")[-2]
    expected = "worker" if isinstance(record, AttemptUsage | EngineTime) else "router" if isinstance(record, RequestOutcome) else "registry"
    if sender != expected:
        return f"a {type(record).__name__} from a {sender}"
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float) and not (math.isfinite(value) and 0 <= value < _MOST / 1000):
            return f"{name} is {value}"
        most = _MOST_BYTE_MS if name == "kv_byte_ms" else _MOST
        if isinstance(value, int) and not 0 <= value < most and name != "unaccounted_us":
            return f"{name} is {value}"
    if isinstance(record, Residency) and record.until_ms < record.since_ms:
        return "it ends before it begins"
    if isinstance(record, Residency) and record.until_ms > stamp_ms + DAY_MS:
        return f"until_ms is {record.until_ms}, a day or more after it was stored"
    return ""


def _us(ms: float) -> int:
    return round(ms * 1000)
