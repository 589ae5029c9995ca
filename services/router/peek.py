"""All that the router reads of a body: what it asks for and how much of it at most. The rest goes to the worker unread."""

import msgspec

from services.router.resolve import Route
from shared.contracts.tenancy import TenantLimits
from shared.errors import InvalidRequest

_BYTES_PER_TOKEN = 4
_ASSUMED_OUTPUT_TOKENS = 256  # where neither the request nor its tenant says; what it takes in the end is settled
_BOUNDS = {"max_tokens": (0, 2**31), "max_completion_tokens": (0, 2**31), "max_output_tokens": (0, 2**31), "n": (1, 16_384)}
_SHOWN = 10**18
_WITHOUT_OUTPUT = frozenset({"/v1/embeddings", "/v1/tokenize"})

Number = int | float | None


class Peek(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_tokens: Number = None
    max_completion_tokens: Number = None
    max_output_tokens: Number = None
    n: Number = None


_decode = msgspec.json.Decoder(Peek).decode


def peek(body: bytes) -> Peek:
    """:raises InvalidRequest: no JSON object, or a field of the wrong kind or out of any bounds: `param`."""
    try:
        found = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        param = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise InvalidRequest(f"the body is not a JSON object of this endpoint: {error}", param=param) from error
    if (
        found.max_tokens is not None
        or found.max_completion_tokens is not None
        or found.max_output_tokens is not None
        or found.n is not None
    ):
        _check(found)
    return found


def _check(found: Peek) -> None:
    for name, (lowest, highest) in _BOUNDS.items():
        value: Number = getattr(found, name)
        if value is not None and not lowest <= value <= highest:
            given = f"{value:g}" if abs(value) < _SHOWN else "out of all bounds"  # a whole number may have thousands of digits
            raise InvalidRequest(f"{name} is {given}: expected {lowest} to {highest}", param=name)


def tokens_asked(found: Peek, path: str, body_bytes: int, limits: TenantLimits, route: Route) -> int:
    """An estimate of all that the request may take: its prompt by its bytes, and as much output as it allows itself."""
    prompt = body_bytes // _BYTES_PER_TOKEN + 1
    if path in _WITHOUT_OUTPUT:
        return prompt
    given = [each for each in (found.max_tokens, found.max_completion_tokens, found.max_output_tokens) if each is not None]
    output = int(max(given)) if given else limits.default_max_tokens or _ASSUMED_OUTPUT_TOKENS
    longest = max((worker.limits.max_model_len for worker in route.workers), default=0)
    if longest:
        output = min(output, longest)
    return prompt + output * max(1, int(found.n or 1))
