"""Records of the usage stream for tests, and messages that hold them as a server would have stored them."""

import itertools
from typing import Any

from shared.bus import Stored
from shared.contracts.usage import (
    AttemptUsage,
    EngineEnded,
    EngineTime,
    RequestOutcome,
    Residency,
    Usage,
    encode,
    registry_usage_subject,
    router_usage_subject,
    worker_usage_subject,
)

DAY_MS = 86_400_000
NOON_MS = 20_000 * DAY_MS + DAY_MS // 2  # 2024-10-04, 12:00 UTC
GIB = 1 << 30


def attempt(request_id: str = "r1", number: int = 1, checkpoint: int = 1, *, final: bool = True, **changes: Any) -> AttemptUsage:
    fields: dict[str, Any] = {
        "tenant_id": "t_sales",
        "tenant": "sales",
        "adapter_id": "ad_tone_1",
        "alias": "tone",
        "version": 1,
        "digest": "sha256:aa",
        "base": "demo@" + "ab" * 32,
        "pool_id": "main",
        "worker_id": "w0",
        "incarnation": "01A",
        "key_id": "k1",
        "path": "/v1/chat/completions",
        "prompt_tokens": 10,
        "completion_tokens": 4 * checkpoint,
        "cached_tokens": 3,
        "queue_ms": 1.5,
        "first_token_ms": 20.0,
        "total_ms": 50.0 * checkpoint,
        "kv_byte_ms": 1000 * checkpoint,
        "gpu_us": 700 * checkpoint,
        "outcome": "complete" if final else "running",
    } | changes
    return AttemptUsage(request_id=request_id, attempt=number, checkpoint=checkpoint, final=final, **fields)


def outcome(request_id: str = "r1", **changes: Any) -> RequestOutcome:
    fields: dict[str, Any] = {
        "attempts": 1,
        "tenant_id": "t_sales",
        "tenant": "sales",
        "adapter_id": "ad_tone_1",
        "alias": "tone",
        "version": 1,
        "digest": "sha256:aa",
        "base": "demo@" + "ab" * 32,
        "pool_id": "main",
        "router_id": "r_test",
        "key_id": "k1",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "complete",
        "delivered_bytes": 100,
        "delivered_events": 6,
        "first_byte_ms": 25.0,
        "total_ms": 60.0,
    } | changes
    return RequestOutcome(request_id=request_id, **fields)


def residency(since_ms: int, until_ms: int, *, final: bool = False, **changes: Any) -> Residency:
    fields: dict[str, Any] = {
        "pool_id": "main",
        "adapter_id": "ad_tone_1",
        "bytes": GIB,
        "tenant_id": "t_sales",
        "tenant": "sales",
        "worker_id": "w0",
        "alias": "tone",
        "version": 1,
        "digest": "sha256:aa",
        "base": "demo@" + "ab" * 32,
    } | changes
    return Residency(since_ms=since_ms, until_ms=until_ms, final=final, **fields)


def engine(checkpoint: int = 1, **changes: Any) -> EngineTime:
    fields: dict[str, Any] = {
        "worker_id": "w0",
        "incarnation": "01A",
        "pool_id": "main",
        "wall_us": 1_000_000 * checkpoint,
        "busy_us": 600_000 * checkpoint,
        "idle_us": 300_000 * checkpoint,
        "unaccounted_us": 1000 * checkpoint,
        "overhead_us": {"schedule": 99_000 * checkpoint},
        "billed_us": 599_000 * checkpoint,
        "steps": 10 * checkpoint,
    } | changes
    return EngineTime(checkpoint=checkpoint, **fields)


def ended(worker_id: str = "w0", incarnation: str = "01A") -> EngineEnded:
    return EngineEnded(worker_id=worker_id, incarnation=incarnation, reason="replaced")


def subject_of(record: Usage) -> str:
    if isinstance(record, AttemptUsage | EngineTime):
        return worker_usage_subject("w0")
    return router_usage_subject("r_test") if isinstance(record, RequestOutcome) else registry_usage_subject("registry-1")


class Stream:
    """Numbers messages as a server does."""

    def __init__(self) -> None:
        self.messages: list[Stored] = []
        self._sequence = itertools.count(1)

    def add(self, *records: Usage, at_ms: int = NOON_MS, subject: str = "") -> Stored:
        stored = Stored(next(self._sequence), at_ms, subject or subject_of(records[0]), encode(list(records)))
        self.messages.append(stored)
        return stored
