"""`tenantry tenant`: tenants and their keys."""

from typing import Annotated

import typer

from services.cli import access
from services.cli.datafolder import DataFolder, SavedKey
from services.cli.output import console, megabytes, print_json, print_line, table

app = typer.Typer(no_args_is_help=True, help="Tenants and their API keys.")


@app.command("add")
def add(
    name: Annotated[str, typer.Argument()],
    quota_mb: Annotated[int, typer.Option("--quota-mb", min=0, help="VRAM that its adapters may hold.")] = 0,
    headroom_mb: Annotated[int, typer.Option("--headroom-mb", min=0, help="Room for a second version while an alias is switched.")] = 0,
    base: Annotated[bool, typer.Option("--base/--no-base", help="May it use the bare base model?")] = True,
    nats_user: Annotated[bool, typer.Option("--nats-user", help="Make a NATS user, to onboard adapters by event.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Add a tenant."""
    with access.client(url, data) as client:
        view = client.add_tenant(
            name, vram_quota_mb=quota_mb, upgrade_headroom_mb=headroom_mb, base_allowed=base, nats_user=nats_user
        )  # fmt: skip
    if as_json:
        print_json(view)
        return
    print_line(f"tenant {view.name} added: VRAM quota {megabytes(view.vram_quota_bytes)}")
    if view.nats_password:
        print_line(f"NATS user {view.nats_user or view.tenant_id}, password (shown once): {view.nats_password}")


@app.command("set")
def change(
    name: Annotated[str, typer.Argument()],
    quota_mb: Annotated[int | None, typer.Option("--quota-mb", min=0)] = None,
    headroom_mb: Annotated[int | None, typer.Option("--headroom-mb", min=0)] = None,
    base: Annotated[bool | None, typer.Option("--base/--no-base")] = None,
    default_adapter: Annotated[str | None, typer.Option("--default-adapter")] = None,
    nats_user: Annotated[bool, typer.Option("--nats-user", help="Make a NATS user, or a new password for it.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Change a tenant; what is not named stays."""
    wanted = {
        "vram_quota_bytes": None if quota_mb is None else quota_mb * 1024 * 1024,
        "upgrade_headroom_bytes": None if headroom_mb is None else headroom_mb * 1024 * 1024,
        "base_allowed": base,
        "default_adapter": default_adapter,
        "nats_password": nats_user or None,
    }
    with access.client(url, data) as client:
        view = client.update_tenant(name, **{field: value for field, value in wanted.items() if value is not None})
    if as_json:
        print_json(view)
        return
    print_line(f"tenant {view.name} changed")
    if view.nats_password:
        print_line(f"NATS user {view.nats_user or view.tenant_id}, password (shown once): {view.nats_password}")


@app.command("list")
def list_all(data: access.DataOption = access.DATA, url: access.UrlOption = "", as_json: access.JsonOption = False) -> None:
    """List tenants with what they hold and may hold."""
    with access.client(url, data) as client:
        views = client.tenants()
    if as_json:
        print_json(views)
        return
    rows = [
        (
            view.name,
            str(view.adapters),
            f"{megabytes(view.vram_held_bytes)} / {megabytes(view.vram_quota_bytes)}",
            megabytes(view.upgrade_headroom_bytes),
            "yes" if view.base_allowed else "no",
            view.default_adapter or "-",
            view.nats_user or "-",
        )
        for view in views
    ]
    columns = ("tenant", "adapters", "VRAM held / quota", "headroom", "base", "default", "NATS user")
    console.print(table(columns, rows, right=("adapters", "VRAM held / quota", "headroom")))


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument()],
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
) -> None:
    """Remove a tenant that holds no adapters; its keys are revoked."""
    with access.client(url, data) as client:
        client.delete_tenant(name)
    print_line(f"tenant {name} removed")


@app.command("key")
def key(
    name: Annotated[str, typer.Argument(help="The tenant.")],
    gateway: Annotated[
        list[str] | None, typer.Option("--gateway", help="Also speaks for this tenant, named by the routing header.")
    ] = None,
    label: Annotated[str, typer.Option("--label")] = "",
    save: Annotated[bool, typer.Option("--save", help="Keep it in the data folder for `tenantry ask`.")] = False,
    list_keys: Annotated[bool, typer.Option("--list", help="List the tenant's keys instead.")] = False,
    revoke: Annotated[str, typer.Option("--revoke", metavar="KEY_ID", help="Revoke a key instead.")] = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Make an API key (shown once), or list or revoke a tenant's keys."""
    with access.client(url, data) as client:
        if revoke:
            client.revoke_key(revoke)
            print_line(f"key {revoke} revoked")
            return
        if list_keys:
            views = client.keys(name)
            if as_json:
                print_json(views)
                return
            rows = [
                (view.key_id, view.label, ", ".join(view.tenants), "revoked" if view.revoked else "valid", view.created_at)
                for view in views
            ]  # fmt: skip
            console.print(table(("key", "label", "tenants", "state", "made"), rows))
            return
        made = client.add_key(name, *(gateway or []), gateway=bool(gateway), label=label)
    if save:
        folder = DataFolder(data)
        folder.save_api_keys({**folder.api_keys(), name: SavedKey(key_id=made.key_id, secret=made.secret)})
    if as_json:
        print_json(made)
        return
    print_line(f"key {made.key_id} for {', '.join(made.tenants)} (shown once): {made.secret}")
