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
_LOOKED_AT_ONE_BY_ONE = 65_536  # entries; no worker takes as many prompts
_NOTHING = msgspec.Raw(b"")

Number = int | float | None


class Peek(msgspec.Struct, gc=False):
    model: str | None = None
    stream: bool | None = None
    max_tokens: Number = None
    max_completion_tokens: Number = None
    max_output_tokens: Number = None
    n: Number = None
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING


_entries = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode = msgspec.json.Decoder(Peek).decode


def peek(body: bytes) -> Peek:
    """:raises InvalidRequest: no JSON object, or a field of the wrong kind or out of any bounds: `param`."""
    try:
        found = _decode(body)
    except RecursionError:
        raise InvalidRequest("the body has lists or objects within each other deeper than anything that is served", param=None) from None
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
    """An estimate of all that the request may take: text by its bytes, token ids by their number, and as much output as it allows itself
    for every prompt and sample.
    """
    content = found.prompt if path == "/v1/completions" else found.input if path == "/v1/embeddings" else _NOTHING
    tokens, prompts = _held(bytes(content)) if content else (0, 1)
    prompt = (body_bytes - len(bytes(content))) // _BYTES_PER_TOKEN + 1 + tokens
    if path in _WITHOUT_OUTPUT:
        return prompt
    given = [each for each in (found.max_tokens, found.max_completion_tokens, found.max_output_tokens) if each is not None]
    output = int(max(given)) if given else limits.default_max_tokens or _ASSUMED_OUTPUT_TOKENS
    longest = max((worker.limits.max_model_len for worker in route.workers), default=0)
    if longest:
        output = min(output, longest)
    return prompt + output * prompts * max(1, int(found.n or 1))


def _held(content: bytes) -> tuple[int, int]:
    """Tokens and prompts of a JSON text, list of texts, list of token ids, or list of such lists."""
    if not content.startswith(b"["):
        return len(content) // _BYTES_PER_TOKEN + 1, 1
    commas = content.count(b",")
    if b'"' not in content:
        return commas + 1, max(1, content.count(b"[") - 1)
    if commas > _LOOKED_AT_ONE_BY_ONE:
        return max(commas + 1, len(content) // _BYTES_PER_TOKEN), content.count(b'",') + 1
    tokens, prompts = 0, 0
    for entry in map(bytes, _entries(content)):
        if entry.startswith(b"["):
            tokens += max(entry.count(b",") + 1, 0 if b'"' not in entry else len(entry) // _BYTES_PER_TOKEN)
            prompts += 1
        else:
            tokens += len(entry) // _BYTES_PER_TOKEN + 1
            prompts += entry.startswith(b'"')
    return tokens, max(1, prompts)
