"""Errors as HTTP: a TenantryError becomes a status, an OpenAI- or Anthropic-shaped body, and an event on a stream that has begun.

HTTP statuses exist here and nowhere else.
"""

from typing import Any

import msgspec

from shared.errors import TenantryError

ANTHROPIC_PATHS = frozenset({"/v1/messages"})

STATUS: dict[str, int] = {
    "invalid_request": 400,
    "field_not_allowed": 400,
    "endpoint_not_supported": 400,
    "tenant_required": 400,
    "adapter_rejected": 400,
    "config_invalid": 400,
    "unsupported": 400,
    "missing_api_key": 401,
    "invalid_api_key": 401,
    "tenant_not_allowed": 403,
    "base_not_allowed": 403,
    "not_permitted": 403,
    "scope_missing": 403,
    "adapter_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "quota_exceeded": 409,
    "host_cache_exceeded": 409,
    "artifact_quota_exceeded": 409,
    "no_free_slot": 409,
    "base_mismatch": 409,
    "base_unknown": 409,
    "incompatible_pair": 409,
    "body_too_large": 413,
    "overloaded": 429,
    "kv_quota_exceeded": 429,
    "concurrency_exceeded": 429,
    "request_rate_exceeded": 429,
    "token_rate_exceeded": 429,
    "queue_full": 429,
    "queue_timeout": 429,
    "body_too_slow": 408,
    "cancelled": 499,
    "handle_mismatch": 500,
    "engine_error": 500,
    "load_failed": 500,
    "empty_answer": 502,
    "worker_lost": 502,
    "stream_gap": 502,
    "answer_too_large": 502,
    "adapter_not_ready": 503,
    "adapter_draining": 503,
    "worker_unavailable": 503,
    "routes_stale": 503,
    "bus_unavailable": 503,
    "registry_unavailable": 503,
    "client_too_slow": 503,
    "deadline_exceeded": 504,
    "bus_timeout": 504,
}

_OPENAI_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPE = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RESERVED = frozenset({"message", "type", "param", "code"})
_encode = msgspec.json.Encoder().encode


class MethodNotAllowed(TenantryError):
    """`allow`: the method that the path takes."""

    code = "method_not_allowed"


class AnswerTooLarge(TenantryError):
    """An answer that is not streamed passed the router's bound: limit_bytes."""

    code = "answer_too_large"


class BodyTooSlow(TenantryError):
    """A request's body did not come whole in time: limit_s."""

    code = "body_too_slow"


class ClientTooSlow(TenantryError):
    """A stream's client did not read, and what waits for it passed the bound: limit_bytes."""

    code = "client_too_slow"


def status_of(error: TenantryError) -> int:
    return STATUS.get(error.code, 500)


def retry_after_of(error: TenantryError) -> str:
    """The Retry-After header's whole seconds, or "" where waiting does not help."""
    status = status_of(error)
    if status not in {429, 503}:
        return ""
    seconds = error.fields.get("retry_after_s", 1.0)
    return str(max(1, -int(-float(seconds) // 1)))


def body_of(error: TenantryError, path: str, request_id: str) -> bytes:
    """The JSON body in the shape that the path's clients read."""
    if path in ANTHROPIC_PATHS:
        return _encode(_anthropic(error, request_id))
    return _encode({"error": _openai(error)})


def event_of(error: TenantryError, path: str, request_id: str) -> bytes:
    """One server-sent event that ends a stream whose status line has gone out already."""
    if path in ANTHROPIC_PATHS:
        return b"event: error\ndata: " + _encode(_anthropic(error, request_id)) + b"\n\n"
    if path == "/v1/responses":
        shown = {"type": "error", "code": error.code, "message": error.message, "param": error.fields.get("field")}
        return b"event: error\ndata: " + _encode(shown) + b"\n\n"
    return b"data: " + _encode({"error": _openai(error)}) + b"\n\n"


def _openai(error: TenantryError) -> dict[str, Any]:
    shown = {
        "message": error.message,
        "type": _OPENAI_TYPE.get(status_of(error), "invalid_request_error" if status_of(error) < 500 else "server_error"),
        "param": error.fields.get("param", error.fields.get("field")),
        "code": error.code,
    }
    return shown | {name: value for name, value in error.fields.items() if name not in _RESERVED}


def _anthropic(error: TenantryError, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPE.get(status_of(error), "invalid_request_error" if status_of(error) < 500 else "api_error")
    shown = {"type": kind, "message": error.message, "code": error.code}
    shown |= {name: value for name, value in error.fields.items() if name not in _RESERVED}
    return {"type": "error", "error": shown, "request_id": request_id}
