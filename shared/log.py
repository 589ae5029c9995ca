"""structlog for every service: JSON lines on stderr (or for people with TENANTRY_LOG_FORMAT=console)."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

_encode = msgspec.json.Encoder(enc_hook=repr).encode


def render(logger: object, method: str, event: MutableMapping[str, Any]) -> bytes:
    """One JSON line: what structlog's own processors for context, level, time, exceptions and JSON give, in one step.

    A router writes a line for every request, and five processors cost it a tenth of its time.
    """
    event["level"] = "error" if method == "exception" else method
    event["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    event = structlog.contextvars.merge_contextvars(logger, method, event)
    if event.get("exc_info"):
        event = structlog.processors.format_exc_info(logger, method, event)
    return _encode(event)


def configure(service: str, env: Mapping[str, str]) -> None:
    """Call once, in __main__. TENANTRY_LOG_LEVEL: debug | info | warning | error."""
    level = getattr(logging, env.get("TENANTRY_LOG_LEVEL", "info").upper(), logging.INFO)
    console = env.get("TENANTRY_LOG_FORMAT", "json") == "console"
    for_people = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.dev.ConsoleRenderer(),
    ]
    structlog.configure(
        processors=for_people if console else [render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr) if console else structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
