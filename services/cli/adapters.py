"""`tenantry adapter`: one team's adapters, from upload to release."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from services.cli import access
from services.cli.client import ClientError
from services.cli.output import adapters_table, console, facts, megabytes, print_json, print_line, state_text, table
from services.cli.progress import upload_progress
from shared.contracts.admin import AdapterView

app = typer.Typer(no_args_is_help=True, help="Adapters: upload, look, take out.")

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
OfTenant = Annotated[str, typer.Option("--tenant", help="Needed only where several tenants have an adapter of this name.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0, help="Seconds that running requests get.")]
OnDeadline = Annotated[str, typer.Option("--on-deadline", help="abort (with an error) or wait.")]


@app.command("add")
def add(
    tenant: Annotated[str, typer.Argument()],
    name: Name,
    path: Annotated[Path | None, typer.Argument(help="Folder or archive; left out: what was uploaded before.")] = None,
    base: Annotated[str, typer.Option("--base", help="A base identity, where the artifact names none or a wrong one.")] = "",
    ceiling_mb: Annotated[int | None, typer.Option("--ceiling-mb", min=1, help="This adapter's own VRAM ceiling.")] = None,
    drain_first: Annotated[
        bool, typer.Option("--drain-first", help="Take the old version down first; the alias is down meanwhile.")
    ] = False,
    default: Annotated[bool, typer.Option("--default", help="Serve the tenant's requests that name no model.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it serves.")] = 300.0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Upload an adapter, or a new version of it, and wait until it serves."""
    with access.client(url, data) as client:
        if path is None:
            view = client.mount(
                tenant, name, base=base, ceiling_mb=ceiling_mb, drain_first=drain_first, make_default=default, wait_s=wait_s
            )  # fmt: skip
        else:
            if not path.exists():
                raise ClientError(f"there is no {path}", peer_code="not_found")
            with upload_progress(f"{tenant}/{name}", shown=not as_json) as progress:
                view = client.upload(
                    tenant, name, path, base=base, ceiling_mb=ceiling_mb, drain_first=drain_first, make_default=default,
                    wait_s=wait_s, progress=progress,
                )  # fmt: skip
    if as_json:
        print_json(view)
    else:
        console.print(adapters_table([view]))
    if view.state != "ready":
        raise ClientError(
            view.error.message if view.error else f"{name} is {view.state}", peer_code=view.error.code if view.error else "not_ready"
        )


@app.command("list")
def list_all(
    tenant: Annotated[str, typer.Option("--tenant")] = "",
    every: Annotated[bool, typer.Option("--all", help="Also versions that are unloaded, rejected or failed.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """List adapters; the version that an alias points at is marked with *."""
    with access.client(url, data) as client:
        views = client.adapters(tenant, all_versions=every)
    if as_json:
        print_json(views)
    else:
        console.print(adapters_table(views))


@app.command("show")
def show(
    name: Name,
    tenant: OfTenant = "",
    version: Annotated[int, typer.Option("--version", min=0, help="0: the one that serves, else the newest.")] = 0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Show one version: identity, base and where it comes from, sizes, history."""
    with access.client(url, data) as client:
        view = client.show(name, tenant or None, version=version)
    if as_json:
        print_json(view)
        return
    _describe(view)


@app.command("drain")
def drain(
    name: Name,
    tenant: OfTenant = "",
    deadline_s: Deadline = 300.0,
    on_deadline: OnDeadline = "abort",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Take an adapter out and wait until its memory is released: `unload --mode draining --wait`."""
    unload(name, tenant, "draining", deadline_s, on_deadline, True, data, url, as_json)


@app.command("unload")
def unload(
    name: Name,
    tenant: OfTenant = "",
    mode: Annotated[str, typer.Option("--mode", help="draining: running requests end first.")] = "draining",
    deadline_s: Deadline = 300.0,
    on_deadline: OnDeadline = "abort",
    wait: Annotated[bool, typer.Option("--wait", help="Until it is released.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Take an adapter out: no new requests at once, running ones end, then its memory is released."""
    with access.client(url, data) as client:
        owner = tenant or client.owner_of(name)
        with console.status(f"draining {owner}/{name}") if wait and not as_json else contextlib.nullcontext():
            result = client.unload(name, owner, mode=mode, deadline_s=deadline_s, on_deadline=on_deadline, wait=wait)
    if as_json:
        print_json(result)
    else:
        print_line(f"{owner}/{name} " + ("is released" if wait else "is draining; `tenantry adapter list` shows when it is gone"))


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument()],
    tenant: Annotated[str, typer.Option("--tenant", help="Needed where several tenants have an adapter of this name.")] = "",
    version: Annotated[int, typer.Option("--version", min=0, help="Only this one; default: all.")] = 0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Forget versions that are not mounted, and their stored files."""
    with access.client(url, data) as client:
        views = client.remove(name, tenant or None, version=version)
    if as_json:
        print_json(views)
    else:
        print_line(f"{name}: {len(views)} version{'s' if len(views) != 1 else ''} and their files removed")


@app.command("events")
def events(
    name: Annotated[str, typer.Argument()] = "",
    tenant: Annotated[str, typer.Option("--tenant")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1)] = 50,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """What happened to adapters, oldest first."""
    with access.client(url, data) as client:
        found = client.events(tenant, name, limit=limit)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            event.at[:19].replace("T", " "),
            event.tenant,
            f"{event.name}@{event.version}" if event.version else event.name,
            state_text(event.state),
            event.error.message if event.error else "",
        )
        for event in found
    ]
    console.print(table(("at (UTC)", "tenant", "adapter", "state", "reason"), rows))


def _describe(view: AdapterView) -> None:
    rows = [
        ("adapter", f"{view.name}@{view.version} of {view.tenant}" + (", serving" if view.serving else "")),
        ("state", state_text(view.state)),
        ("digest", view.digest),
        ("base", view.base or "-"),
        ("named by", f"{view.base_label or '-'} ({view.provenance or 'not resolved'})"),
        ("worker", view.worker_id or "-"),
        ("rank", f"{view.rank} (charged as {view.rank_class})"),
        ("VRAM", f"{megabytes(view.slot_bytes)} charged, {megabytes(view.true_bytes)} its tensors"),
        ("files", megabytes(view.size_bytes)),
        ("modules", str(view.modules)),
    ]
    if view.error is not None:
        rows.append(("reason", f"{view.error.message} [{view.error.code}]"))
    console.print(facts(rows))
    steps = [
        (str(step.get("at", ""))[:19].replace("T", " "), state_text(str(step.get("state", ""))), str(step.get("note", "")))
        for step in view.history
    ]
    if steps:
        console.print()
        console.print(table(("at (UTC)", "state", "detail"), steps))
