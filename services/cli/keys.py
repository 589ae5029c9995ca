"""`tenantry tenant key`: API keys, told apart by their prefix. `tenantry tenant key sales` is short for `… key add sales`."""

import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from services.cli import access
from services.cli.client import Client
from services.cli.datafolder import DataFolder, SavedKey
from services.cli.output import console, print_json, print_line, table
from shared.contracts.admin import KeyView
from shared.errors import ConfigInvalid

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class _AddByName(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        named = args and not args[0].startswith("-") and args[0] not in self.commands
        return super().resolve_command(ctx, ["add", *args] if named else args)


OwnTenant = Annotated[str, typer.Option("--tenant", help="Only if it is this tenant's alone; for a team with a key of its own.")]

app = typer.Typer(cls=_AddByName, no_args_is_help=True, help="A tenant's API keys.")


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    gateway: Annotated[
        list[str] | None, typer.Option("--gateway", help="Also speaks for this tenant, named by the routing header.")
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", help="infer (alone, if none is named), adapters, admin; repeatable.")
    ] = None,
    label: Annotated[str, typer.Option("--label")] = "",
    save: Annotated[bool, typer.Option("--save", help="Keep it in the data folder for `tenantry ask`.")] = False,
    list_keys: Annotated[bool, typer.Option("--list", hidden=True)] = False,
    revoke: Annotated[str, typer.Option("--revoke", metavar="KEY_ID", hidden=True)] = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Make an API key, shown once."""
    with access.client(url, data) as client:
        if revoke:
            _revoke(client, revoke)
            return
        if list_keys:
            _list(client, name, as_json=as_json)
            return
        made = client.add_key(name, *(gateway or []), gateway=bool(gateway), label=label, scopes=scope or ("infer",))
    if save:
        _save(data, name, made)
    _show(made, as_json=as_json)


@app.command("list")
def list_all(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    own: Annotated[bool, typer.Option("--own", help="Only those that speak for it alone; for a team with a key of its own.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """List a tenant's keys."""
    with access.client(url, data) as client:
        _list(client, name, own=own, as_json=as_json)


@app.command("rotate")
def rotate(
    key_id: Annotated[str, typer.Argument()],
    overlap: Annotated[str, typer.Option("--overlap", help="How long the old secret still works: 90s, 15m, 1h, 7d; 0 revokes it.")] = "1h",
    tenant: OwnTenant = "",
    save: Annotated[str, typer.Option("--save", metavar="TENANT", help="Keep it for `tenantry ask TENANT`.")] = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Make a new secret with the same rights; the old one ends after the overlap."""
    overlap_s = seconds(overlap)
    with access.client(url, data) as client:
        made = client.rotate_key(key_id, overlap_s=overlap_s, tenant=tenant)
    if save:
        _save(data, save, made)
    _show(made, as_json=as_json)
    if not as_json:
        print_line(f"the old key {key_id} {f'works for {overlap} more' if overlap_s else 'is revoked'}")


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument()],
    tenant: OwnTenant = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
) -> None:
    """End a key at once, on every router."""
    with access.client(url, data) as client:
        _revoke(client, key_id, tenant)


def seconds(text: str) -> float:
    """`90s`, `15m`, `1h`, `7d`, or plain seconds.

    :raises ConfigInvalid: none of these.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigInvalid(f"{text[:40]!r} is no span of time: expected e.g. 90s, 15m, 1h, 7d", where="--overlap")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def _revoke(client: Client, key_id: str, tenant: str = "") -> None:
    client.revoke_key(key_id, tenant=tenant)
    print_line(f"key {key_id} revoked")


def _list(client: Client, tenant: str, *, own: bool = False, as_json: bool) -> None:
    views = client.keys(tenant, own=own)
    if as_json:
        print_json(views)
        return
    rows = [
        (view.key_id, view.prefix + "…" if view.prefix else "-", view.label, ", ".join(view.scopes), ", ".join(view.tenants), _state(view))
        for view in views
    ]
    console.print(table(("key", "begins with", "label", "scopes", "tenants", "state"), rows))


def _state(view: KeyView) -> str:
    if view.revoked:
        return "revoked"
    return f"until {view.expires_at[:19]}Z" if view.expires_at else "valid"


def _save(data: Any, tenant: str, made: KeyView) -> None:
    folder = DataFolder(data)
    folder.save_api_keys({**folder.api_keys(), tenant: SavedKey(key_id=made.key_id, secret=made.secret)})


def _show(made: KeyView, *, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print_line(f"key {made.key_id} for {', '.join(made.tenants)}, {', '.join(made.scopes)} (shown once): {made.secret}")
