"""How large a body's structure may be. Pure. The engine's application checks every element against every form it might have, in the
loop that all tenants' streams share: eight megabytes of `[]` would stop it for minutes and take tens of gigabytes.
"""

from typing import Any, cast

from shared.errors import InvalidRequest

MAX_DEPTH = 100
MAX_ENTRIES = 4_096  # of one list or object
MAX_CONTAINERS = 16_384  # lists and objects in all
MAX_CHOSEN_TOKENS = 262_144
_TOKENS = {"prompt": None, "input": None, "allowed_token_ids": MAX_CHOSEN_TOKENS, "stop_token_ids": MAX_CHOSEN_TOKENS}
"""Fields whose lists of integers may be longer (None: as long as the body): they are cheap, and the engine has its own bound."""


def check_shape(fields: dict[str, Any]) -> None:
    """:raises InvalidRequest: nested deeper than MAX_DEPTH, a list or object too long, or too many of them."""
    level: list[Any] = [fields]
    tokens = {id(value): _TOKENS[name] for name, value in fields.items() if name in _TOKENS}
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list) and len(cast("list[Any]", value)) <= MAX_ENTRIES:
            tokens |= {id(one): None for one in cast("list[Any]", value)}
    containers = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for node in level:
            if len(node) > MAX_ENTRIES:
                _check_tokens(node, tokens)
                continue
            children = cast("dict[str, Any]", node).values() if isinstance(node, dict) else cast("list[Any]", node)
            deeper += [child for child in children if isinstance(child, dict | list)]
        containers += len(deeper)
        if containers > MAX_CONTAINERS:
            raise InvalidRequest(f"the body has more than {MAX_CONTAINERS} lists and objects", allowed=MAX_CONTAINERS)
        if not deeper:
            return
        level = deeper
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_tokens(node: dict[str, Any] | list[Any], tokens: dict[int, int | None]) -> None:
    """A container with more than MAX_ENTRIES."""
    limit = MAX_ENTRIES
    if isinstance(node, list) and id(node) in tokens and all(type(item) is int for item in node):
        limit = tokens[id(node)] or len(node)
    if len(node) > limit:
        raise InvalidRequest(f"a list or object of {len(node)} entries; up to {limit} are allowed", asked=len(node), allowed=limit)
