"""How large a body's structure may be. Pure. The engine's application checks every element against every form it might have, in the
loop that all tenants' streams share: eight megabytes of `[]` would stop it for minutes and take tens of gigabytes.
"""

from typing import Any, cast

from shared.errors import InvalidRequest

MAX_DEPTH = 100
MAX_ENTRIES = 4_096  # of one list or object
MAX_ELEMENTS = 32_768  # entries of all lists and objects, token ids apart
MAX_CHOSEN_TOKENS = 262_144
_TOKENS = {"prompt": None, "input": None, "allowed_token_ids": MAX_CHOSEN_TOKENS, "stop_token_ids": MAX_CHOSEN_TOKENS}
"""Fields whose lists of integers may be longer (None: as long as the body): they are cheap, and the engine has its own bound."""


def check_shape(fields: dict[str, Any]) -> None:
    """:raises InvalidRequest: nested deeper than MAX_DEPTH, a list or object too long, or too much in all of them."""
    level: list[Any] = [fields]
    tokens = {id(value): _TOKENS[name] for name, value in fields.items() if name in _TOKENS}
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list) and len(cast("list[Any]", value)) <= MAX_ENTRIES:
            tokens |= {id(one): None for one in cast("list[Any]", value)}
    elements = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for node in level:
            if id(node) in tokens and _are_token_ids(node):
                _check_length(node, tokens[id(node)] or len(node))
                continue
            _check_length(node, MAX_ENTRIES)
            elements += len(node)
            if elements > MAX_ELEMENTS:
                raise InvalidRequest(f"the body has more than {MAX_ELEMENTS} elements", allowed=MAX_ELEMENTS)
            children = cast("dict[str, Any]", node).values() if isinstance(node, dict) else cast("list[Any]", node)
            deeper += [child for child in children if isinstance(child, dict | list)]
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def check_numbers(fields: dict[str, Any]) -> None:
    """:raises InvalidRequest: a whole number that does not fit 64 bits; nothing behind us can carry it."""
    for name, value in fields.items():
        level: list[Any] = [value]
        while level:
            node = level.pop()
            if isinstance(node, dict):
                level += cast("dict[str, Any]", node).values()
            elif isinstance(node, list):
                level += cast("list[Any]", node)
            elif isinstance(node, int) and not -(1 << 63) <= node < 1 << 63:
                raise InvalidRequest(f"{name} has a whole number of more than 64 bits", field=name)


def _are_token_ids(node: Any) -> bool:
    return isinstance(node, list) and all(type(item) is int for item in cast("list[Any]", node))


def _check_length(node: Any, limit: int) -> None:
    if len(node) > limit:
        raise InvalidRequest(f"a list or object of {len(node)} entries; up to {limit} are allowed", asked=len(node), allowed=limit)
