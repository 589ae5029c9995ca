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


ROUTE = Route(
    handle=Handle(tenant_id="t", tenant="t", pool_id="p", base="b@1"),
    workers=(PoolWorker(worker_id="w", incarnation="i", limits=EngineLimits(slots=1, max_rank=1, bytes_per_rank=1)),),
)


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


COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"


@pytest.mark.parametrize(
    ("prompt", "tokens", "prompts"),
    [
        ("a" * 400, 100, 1),
        (["a" * 400], 100, 1),
        (["a" * 400] * 100, 10_000, 100),
        (["one"] * 1000, 1000, 1000),
        (list(range(5000)), 5000, 1),
        ([7] * 5000, 5000, 1),
        ([[7] * 100] * 30, 3000, 30),
        ([[7]], 1, 1),
        ([["a", "b"], [1, 2, 3]], 5, 2),
        (['say ", " twice'], 5, 1),
        ([], 1, 1),
        (None, 1, 1),
    ],
)
def test_a_prompt_is_charged_for_what_it_holds_and_every_prompt_for_its_own_output(prompt: Any, tokens: int, prompts: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 50, "n": 2}).encode()
    estimate = tokens_asked(peek(body), COMPLETIONS, len(body), TenantLimits(), ROUTE)
    assert tokens + prompts * 2 * 50 <= estimate <= 2 * tokens + 60 + prompts * 2 * 50


@pytest.mark.parametrize(
    ("prompt", "tokens"), [([[[1, 2], [3]], [4]], 4), ([["x"] * 40_000] * 2, 80_000), ([{"a": [1] * 50}], 25), ([None, True, 1.5], 3)]
)
def test_what_no_worker_takes_is_not_charged_for_less_than_it_holds(prompt: Any, tokens: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    assert tokens_asked(peek(body), COMPLETIONS, len(body), TenantLimits(), ROUTE) > tokens


@pytest.mark.parametrize("value", ["a" * 4000, ["a" * 40] * 100, [5] * 1000, [[5] * 10] * 100])
def test_embeddings_are_charged_for_what_their_input_holds_and_for_no_output(value: Any) -> None:
    body = json.dumps({"input": value}).encode()
    assert 1000 <= tokens_asked(peek(body), EMBEDDINGS, len(body), TenantLimits(), ROUTE) <= 1300


def test_a_conversation_and_its_items_are_charged_by_their_bytes_and_as_one_prompt() -> None:
    body = json.dumps({"input": [{"role": "user", "content": "x" * 400}] * 10, "max_output_tokens": 7}).encode()
    assert tokens_asked(peek(body), "/v1/responses", len(body), TenantLimits(), ROUTE) == len(body) // 4 + 1 + 7


@pytest.mark.parametrize("depth", [50, 100_000])
def test_a_prompt_of_lists_in_lists_is_counted_or_refused_and_breaks_nothing(depth: int) -> None:
    body = b'{"prompt": ' + b"[" * depth + b'"x"' + b"]" * depth + b"}"
    try:
        assert tokens_asked(peek(body), COMPLETIONS, len(body), TenantLimits(), ROUTE) > 0
    except InvalidRequest:
        assert depth > 1000
