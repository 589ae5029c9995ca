"""Errors as clients see them."""

import msgspec
import pytest

from services.router import openai
from shared.errors import (
    _BY_CODE,
    AdapterNotFound,
    AdapterNotReady,
    FieldNotAllowed,
    InternalError,
    Overloaded,
    RoutesStale,
    WorkerLost,
)


def test_every_error_of_the_data_plane_has_a_status_on_purpose() -> None:
    own = {code for code in _BY_CODE if code not in {"internal_error", "bounced", "no_responder", "start_failed"}}
    known_elsewhere = {
        code for code in own - openai.STATUS.keys() if _BY_CODE[code].__module__ not in {"shared.errors", "services.router.openai"}
    }
    assert own - known_elsewhere <= openai.STATUS.keys()


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (AdapterNotFound("x"), 404, ""),
        (Overloaded("x", retry_after_s=0.2), 429, "1"),
        (Overloaded("x", retry_after_s=2.1), 429, "3"),
        (RoutesStale("x"), 503, "1"),
        (AdapterNotReady("x", retry_after_s=5.0), 503, "5"),
        (WorkerLost("x"), 502, ""),
        (InternalError("x", peer_code="newer"), 500, ""),
    ],
)
def test_status_and_retry_after(error: openai.TenantryError, status: int, retry_after: str) -> None:
    assert (openai.status_of(error), openai.retry_after_of(error)) == (status, retry_after)


def test_the_openai_shape_carries_fields_and_names_the_parameter() -> None:
    error = FieldNotAllowed("`cache_salt` is set by the platform", field="cache_salt")
    body = msgspec.json.decode(openai.body_of(error, "/v1/chat/completions", "id"))["error"]
    assert body == {
        "message": "`cache_salt` is set by the platform",
        "type": "invalid_request_error",
        "param": "cache_salt",
        "code": "field_not_allowed",
        "field": "cache_salt",
    }


def test_the_anthropic_shape() -> None:
    body = msgspec.json.decode(openai.body_of(Overloaded("busy", held=3), "/v1/messages", "id"))
    assert body["type"] == "error"
    assert body["request_id"] == "id"
    assert body["error"]["type"] == "rate_limit_error"
    assert body["error"]["held"] == 3


@pytest.mark.parametrize(
    ("path", "start"),
    [("/v1/chat/completions", b'data: {"error"'), ("/v1/messages", b"event: error\ndata: "), ("/v1/responses", b"event: error\ndata: ")],
)
def test_a_stream_is_ended_by_an_event_that_its_clients_read(path: str, start: bytes) -> None:
    event = openai.event_of(WorkerLost("gone"), path, "id")
    assert event.startswith(start)
    assert event.endswith(b"\n\n")
    assert b"worker_lost" in event
