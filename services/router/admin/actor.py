"""Who asks for what the admin plane is doing now, and from where: set at the door, told to the registry with every operation."""

from contextvars import ContextVar
from typing import Any

import msgspec

from shared.contracts.audit import OPERATOR


class Actor(msgspec.Struct, frozen=True):
    """`who`: operator, or `key <prefix>`."""

    who: str = "unknown"
    address: str = ""


_NOBODY = Actor()
current_actor: ContextVar[Actor] = ContextVar("current_actor", default=_NOBODY)


def operator_of(scope: Any) -> Actor:
    return Actor(OPERATOR, _address(scope))


def key_of(scope: Any, prefix: str) -> Actor:
    """`prefix`: by which people tell the key apart."""
    return Actor(f"key {prefix}", _address(scope))


def _address(scope: Any) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
