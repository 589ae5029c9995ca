"""Reads a price sheet's file: YAML, or TOML by its suffix. Numbers are taken as they are written."""

import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from shared.errors import ConfigInvalid
from shared.policy.prices import PriceSheet, parse_sheet

_LIMIT_BYTES = 4 << 20


class _Loader(yaml.BaseLoader):
    """Every scalar is text; a name given twice is refused."""


def _unique(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key: str = loader.construct_scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if key in found:
            raise yaml.constructor.ConstructorError(None, None, f"`{key[:64]}` is given twice", key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)  # pyright: ignore[reportUnknownMemberType]
    return found


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique)  # pyright: ignore[reportUnknownMemberType]


def read_prices(path: Path) -> PriceSheet:
    """:raises ConfigInvalid: it cannot be read, or says something that is no price sheet."""
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise ConfigInvalid(f"{path} is larger than any price sheet", where=str(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}", where=str(path)) from error
    try:
        if path.suffix == ".toml":
            raw: Any = tomllib.loads(text, parse_float=Decimal)
        else:
            raw = yaml.load(text, Loader=_Loader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError, ArithmeticError) as error:
        raise ConfigInvalid(f"{path}: {' '.join(str(error).split())[:300]}", where=str(path)) from error
    return parse_sheet(raw)
