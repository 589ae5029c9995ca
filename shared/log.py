"""structlog for every service: JSON lines on stderr (or for people with TENANTRY_LOG_FORMAT=console)."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

_encode = msgspec.json.Encoder(enc_hook=repr).encode


def _json(event: dict[str, Any], **_: Any) -> bytes:
    return _encode(event)


def configure(service: str, env: Mapping[str, str]) -> None:
    """Call once, in __main__. TENANTRY_LOG_LEVEL: debug | info | warning | error."""
    level = getattr(logging, env.get("TENANTRY_LOG_LEVEL", "info").upper(), logging.INFO)
    console = env.get("TENANTRY_LOG_FORMAT", "json") == "console"
    renderer = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(serializer=_json)
    factory = structlog.PrintLoggerFactory(sys.stderr) if console else structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
