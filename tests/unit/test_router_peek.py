"""What the router reads of a body, and how many tokens it takes a request to ask for."""

import json
from typing import Any

import msgspec
import pytest

from services.router.peek import peek, tokens_asked
from services.router.resolve import Route
from shared.contracts.adapters import PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.inference import Handle
from shared.contracts.tenancy import TenantLimits
from shared.errors import InvalidRequest

CHAT = "/v1/chat/completions"


def asked(path: str = CHAT, *, default: int | None = None, longest: int = 0, **fields: Any) -> int:
    limits = EngineLimits(slots=1, max_rank=1, bytes_per_rank=1, max_model_len=longest)
    route = Route(
        handle=Handle(tenant_id="t", tenant="t", pool_id="p", base="b@1"),
        workers=(PoolWorker(worker_id="w", incarnation="i", limits=limits),),
    )
    return tokens_asked(peek(json.dumps(fields).encode()), path, 400, TenantLimits(default_max_tokens=default), route)


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (101 + 7, {"max_tokens": 7}),
        (101 + 7, {"max_completion_tokens": 7}),
        (101 + 9, {"max_tokens": 7, "max_completion_tokens": 9}),
        (101 + 7, {"max_output_tokens": 7, "path": "/v1/responses"}),
        (101 + 21, {"max_tokens": 7, "n": 3}),
        (101 + 7, {"max_tokens": 7.0}),
        (101, {"max_tokens": 0}),
        (101 + 50, {"default": 50}),
        (101 + 7, {"default": 50, "max_tokens": 7}),
        (101 + 30, {"max_tokens": 10**9, "longest": 30}),
        (101 + 30, {"default": 50, "longest": 30}),
        (101, {"path": "/v1/embeddings", "max_tokens": 7}),
        (101, {"path": "/v1/tokenize"}),
        (101 + 256, {}),
    ],
)
def test_the_estimate_is_the_bodys_bytes_by_four_and_as_much_output_as_is_asked_for(expected: int, options: dict[str, Any]) -> None:
    assert asked(**options) == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"", None),
        (b'{"max_tokens": -1}', "max_tokens"),
        (b'{"max_tokens": "1"}', "max_tokens"),
        (b'{"n": 1e400}', "n"),
        (b'{"n": {}}', "n"),
        (b'{"n": 0}', "n"),
        (b'{"n": 1000000000}', "n"),
        (b'{"model": []}', "model"),
        (b'{"max_completion_tokens": 9999999999999999999999}', "max_completion_tokens"),
        (b'{"n": ' + b"9" * 4000 + b"}", "n"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        peek(body)
    assert caught.value.fields["param"] == param


def test_everything_else_in_a_body_is_not_looked_at() -> None:
    found = peek(msgspec.json.encode({"model": "m", "stream": True, "messages": [{"max_tokens": -1}], "seed": 1e300}))
    assert (found.model, found.stream, found.max_tokens) == ("m", True, None)
