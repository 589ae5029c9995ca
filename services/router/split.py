"""What of a request says to which of an alias's two versions it goes, while one is on trial. Looked at only then.

The rule itself is shared/policy/canary_split.py.
"""

from typing import Any, Protocol

import msgspec

from shared.contracts.adapters import Canary, CanaryBy
from shared.policy.canary_split import goes_on_trial

_CANARY_HEADER = b"x-tenantry-canary"
_SESSION_HEADER = b"x-tenantry-session"


class Asked(Protocol):
    """A request as its client sent it, under the id that this router gave it."""

    @property
    def request_id(self) -> str: ...

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...

    @property
    def body(self) -> bytes: ...


class _Named(msgspec.Struct, gc=False):
    """Whom a body says it is for, as OpenAI's clients and as Anthropic's say it; the engine judges the fields themselves."""

    user: Any = None
    metadata: Any = None


_decode = msgspec.json.Decoder(_Named).decode


def is_for_trial(canary: Canary, asked: Asked) -> bool:
    """The same for every attempt of one request."""
    session = session_of(asked) if canary.by is not CanaryBy.REQUEST else ""
    return goes_on_trial(canary, asked.request_id, session, _header(asked, _CANARY_HEADER).strip().lower())


def session_of(asked: Asked) -> str:
    """The session header's value, else the body's `user` or `metadata.user_id`; empty: none of them."""
    session = _header(asked, _SESSION_HEADER)
    if session or not asked.body:
        return session
    try:
        named = _decode(asked.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    found = named.user if named.user is not None else named.metadata
    if isinstance(found, dict):
        found = found.get("user_id")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return found if isinstance(found, str) else ""


def _header(asked: Asked, name: bytes) -> str:
    return next((value.decode("latin-1") for known, value in asked.headers if known == name), "")
