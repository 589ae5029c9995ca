"""Reads the file of `tenantry apply -f`: the YAML form with adapters, tenants and routing. Pure: text in, Manifest out.

Every error names the file, the line and the key.
"""

import re
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import yaml
from msgspec import UNSET, UnsetType

from services.cli import limits
from shared.contracts.state import NAME_PATTERN, Routing, RoutingDefault
from shared.errors import ConfigInvalid

T = TypeVar("T", bound=msgspec.Struct)

MB = 1024 * 1024  # as GPU tools count


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tenant: str
    vram_quota_mb: int  # this adapter's own ceiling, and its part of the tenant's quota
    path: str = ""  # beside the file; empty: adapters/<name>/, else what was uploaded before
    base: str = ""  # a base identity; empty: what the artifact names
    default: bool = False  # serves the tenant's requests that name no model


class TenantEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Of limits, what is not written stays; null takes one away."""

    name: str
    upgrade_headroom_mb: int = 0  # room for the second version while an alias is switched
    base_allowed: bool = True
    kv_quota_mb: int | UnsetType | None = UNSET
    max_concurrent: int | UnsetType | None = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    host_cache_mb: int | UnsetType | None = UNSET
    artifact_mb: int | UnsetType | None = UNSET
    burst: bool | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    default_max_tokens: int | UnsetType | None = UNSET
    queue_limit: int | UnsetType = UNSET
    queue_deadline_s: float | UnsetType = UNSET
    cache_group: str | UnsetType | None = UNSET

    @property
    def limits(self) -> dict[str, Any]:
        """Fields of TenantLimits.

        :raises ConfigInvalid: one is out of bounds.
        """
        written = {name: getattr(self, name) for name in limits.NAMES}
        return limits.of_written({name: value for name, value in written.items() if value is not UNSET})


class RoutingEntry(msgspec.Struct, frozen=True, kw_only=True):
    header: str = "x-tenant"
    default: RoutingDefault = RoutingDefault.REJECT


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`routing` None: the file does not say, so it stays."""

    adapters: tuple[AdapterEntry, ...] = ()
    tenants: tuple[TenantEntry, ...] = ()
    routing: Routing | None = None

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """In the file's order."""
        return tuple(dict.fromkeys([*(entry.name for entry in self.tenants), *(entry.tenant for entry in self.adapters)]))

    def quota_bytes(self, tenant: str) -> int:
        """The sum of its entries' quotas."""
        return sum(entry.vram_quota_mb for entry in self.adapters if entry.tenant == tenant) * MB

    def ceilings(self, tenant: str) -> dict[str, int]:
        return {entry.name: entry.vram_quota_mb * MB for entry in self.adapters if entry.tenant == tenant}

    def default_adapter(self, tenant: str) -> str:
        return next((entry.name for entry in self.adapters if entry.tenant == tenant and entry.default), "")


def read(path: Path) -> Manifest:
    """:raises ConfigInvalid: the file cannot be read or does not have the form."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path}: cannot be read: {error}", where=str(path)) from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Manifest:
    """`where` stands before the line numbers in errors.

    :raises ConfigInvalid: unknown, missing, repeated or wrong keys or values.
    """
    try:
        composed = yaml.compose(text, Loader=yaml.SafeLoader)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        root = cast("yaml.Node | None", composed)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigInvalid(f"{where}:{line}: not YAML: {error.problem}", where=f"{where}:{line}") from error
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"{where}: not YAML: {error}", where=where) from error
    if root is None:
        raise ConfigInvalid(f"{where}:1: the file is empty; it needs `adapters:`", where=f"{where}:1")
    form = _Form(where)
    top = form.mapping(root, "the file", {"adapters", "tenants", "routing"})
    adapters = tuple(form.entry(node, f"adapters[{i}]", AdapterEntry) for i, node in enumerate(form.items(top.get("adapters"), "adapters")))
    tenants = tuple(form.entry(node, f"tenants[{i}]", TenantEntry) for i, node in enumerate(form.items(top.get("tenants"), "tenants")))
    routing = None
    if "routing" in top:
        entry = form.entry(top["routing"], "routing", RoutingEntry)
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", entry.header):
            form.fail(top["routing"], f"routing.header {entry.header!r} is no HTTP header name")
        routing = Routing(header=entry.header.lower(), default=entry.default)
    for i, node in enumerate(form.items(top.get("adapters"), "adapters")):
        form.check_adapter(node, i, adapters)
    for i, node in enumerate(form.items(top.get("tenants"), "tenants")):
        form.check_tenant(node, i, tenants)
    return Manifest(adapters=adapters, tenants=tenants, routing=routing)


class _Form:
    """Turns YAML nodes into Structs, so that an error can name its line."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, node: yaml.Node, problem: str) -> NoReturn:
        where = f"{self._where}:{node.start_mark.line + 1}"
        raise ConfigInvalid(f"{where}: {problem}", where=where)

    def mapping(self, node: yaml.Node, name: str, known: set[str]) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            self.fail(node, f"{name} must hold keys ({', '.join(sorted(known))})")
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            if key not in known:
                self.fail(key_node, f"unknown key `{key}` in {name}; known are {', '.join(sorted(known))}")
            if key in found:
                self.fail(key_node, f"`{key}` stands twice in {name}")
            found[key] = value
        return found

    def items(self, node: yaml.Node | None, name: str) -> list[yaml.Node]:
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null")):
            return []
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node, f"{name} must be a list")
        return list(node.value)

    def entry(self, node: yaml.Node, name: str, kind: type[T]) -> T:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for key, value in self.mapping(node, name, set(fields)).items():
            plain = _plain(value)
            try:
                values[key] = msgspec.convert(plain, fields[key].type)
            except msgspec.ValidationError as error:
                self.fail(value, f"{name}.{key} is {plain!r}: {str(error)[:1].lower()}{str(error)[1:]}")
        for key, field in fields.items():
            if field.required and key not in values:
                self.fail(node, f"{name} lacks `{key}`")
        return kind(**values)

    def check_adapter(self, node: yaml.Node, index: int, adapters: tuple[AdapterEntry, ...]) -> None:
        entry = adapters[index]
        self._check_name(node, f"adapters[{index}].name", entry.name)
        self._check_name(node, f"adapters[{index}].tenant", entry.tenant)
        if entry.vram_quota_mb <= 0:
            self.fail(node, f"adapters[{index}].vram_quota_mb is {entry.vram_quota_mb}: it must be above 0")
        before = adapters[:index]
        if any((other.tenant, other.name) == (entry.tenant, entry.name) for other in before):
            self.fail(node, f"adapter {entry.name} of tenant {entry.tenant} stands twice")
        if entry.default and any(other.tenant == entry.tenant and other.default for other in before):
            self.fail(node, f"tenant {entry.tenant} has two adapters with `default: true`")

    def check_tenant(self, node: yaml.Node, index: int, tenants: tuple[TenantEntry, ...]) -> None:
        entry = tenants[index]
        self._check_name(node, f"tenants[{index}].name", entry.name)
        if entry.upgrade_headroom_mb < 0:
            self.fail(node, f"tenants[{index}].upgrade_headroom_mb is {entry.upgrade_headroom_mb}: it must be 0 or more")
        try:
            _ = entry.limits
        except ConfigInvalid as error:
            self.fail(node, f"tenants[{index}].{error.message}")
        if any(other.name == entry.name for other in tenants[:index]):
            self.fail(node, f"tenant {entry.name} stands twice")

    def _check_name(self, node: yaml.Node, what: str, name: str) -> None:
        if not re.fullmatch(NAME_PATTERN, name):
            self.fail(node, f"{what} is {name!r}: lower-case letters, digits, _ and - only, at most 63, a letter or digit first")


def _plain(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    finally:
        loader.dispose()
