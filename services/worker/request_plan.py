"""How many generations a body asks for, how long, and how urgent: what admission must know before the first of them starts. Pure."""

from collections.abc import Mapping
from typing import Any, cast

import msgspec

_LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_RANKS = {"priority": 0, "flex": 2}
_NORMAL_RANK = 1


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    prompts: int = 1  # each becomes one call of the engine
    beams: int = 0  # width of a beam search; 0: none. It calls the engine once per beam and token
    max_tokens: int | None = None  # as the client asked; None: it did not say
    rank: int = _NORMAL_RANK  # priority class within its tenant, lower first (`service_tier`)


def plan_of(fields: Mapping[str, Any]) -> RequestPlan:
    """Of a parsed body. What the engine's application will refuse anyway may be planned wrongly."""
    beams = _count(fields.get("n")) or 1 if fields.get("use_beam_search") is True else 0
    return RequestPlan(
        prompts=max(_prompts(fields.get("prompt")), _prompts(fields.get("input")) if "messages" not in fields else 1),
        beams=beams,
        max_tokens=next((given for name in _LENGTH_FIELDS if (given := _count(fields.get(name))) is not None), None),
        rank=_RANKS.get(str(fields.get("service_tier")), _NORMAL_RANK),
    )


def of_default_length(body: bytes, plan: RequestPlan, default: tuple[int, int] | None) -> tuple[bytes, RequestPlan]:
    """A beam search that does not say how long, as long as its tenant's default (tokens, the model's length) says.

    The application counts a beam's tokens itself, so it has to be told. Where a prompt of so many bytes may leave less than the default,
    it is left as it is, and reserves what the model's length leaves.
    """
    if not plan.beams or plan.max_tokens is not None or default is None or default[0] > default[1] - len(body):
        return body, plan
    fields = msgspec.json.decode(body)
    fields["max_tokens"] = default[0]
    return msgspec.json.encode(fields), msgspec.structs.replace(plan, max_tokens=default[0])


def _prompts(value: Any) -> int:
    """A list of texts or of token lists has as many prompts as entries; a list of tokens, a text or a conversation is one."""
    if isinstance(value, list):
        entries = cast("list[Any]", value)
        if entries and isinstance(entries[0], str | list):
            return len(entries)
    return 1


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
