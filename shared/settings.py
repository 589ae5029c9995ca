"""Settings: one frozen Struct per service, read once from the environment; unknown keys of its prefix are refused."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigInvalid

T = TypeVar("T", bound=msgspec.Struct)


def read(kind: type[T], prefix: str, env: Mapping[str, str]) -> T:
    """`kind` from the variables `<prefix><FIELD>`, e.g. prefix "TENANTRY_ROUTER_" and field `port`.

    :raises ConfigInvalid: an unknown variable of the prefix, a missing one, or a value of the wrong type.
    """
    fields = {prefix + field.encode_name.upper(): field for field in msgspec.structs.fields(kind)}
    unknown = sorted(name for name in env if name.startswith(prefix) and name not in fields)
    if unknown:
        raise ConfigInvalid(f"unknown setting {unknown[0]}; known are: {', '.join(sorted(fields))}", where=unknown[0])
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in env:
            try:
                values[field.encode_name] = msgspec.convert(env[name], field.type, strict=False)
            except msgspec.ValidationError as error:
                raise ConfigInvalid(f"{name}={env[name]!r}: {error}", where=name) from error
        elif field.required:
            raise ConfigInvalid(f"{name} is not set and has no default", where=name)
    return kind(**values)


def describe(kind: type[msgspec.Struct], prefix: str) -> str:
    """One line per setting, for --help."""
    rows: list[str] = []
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else f"default {field.default!r}"
        type_name = getattr(field.type, "__name__", str(field.type))
        rows.append(f"  {prefix}{field.encode_name.upper():<32} {type_name}, {default}")
    return "\n".join(rows)
