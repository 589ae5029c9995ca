"""Applies a manifest: reads what stands, plans, executes step by step, and tells each change to the caller."""

from pathlib import Path

import msgspec

from services.cli import manifest as manifests
from services.cli import plan as plans
from services.cli.archive import local_digest
from services.cli.client import Client, ClientError
from services.cli.manifest import AdapterEntry, Manifest
from shared.contracts.admin import AdapterView
from shared.errors import ConfigInvalid, TenantryError


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the outcome. `kind`: added | changed | loaded | unchanged | left_alone | failed."""

    kind: str
    what: str
    detail: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`adapters`: what serves now, in the file's order."""

    changes: tuple[Change, ...]
    adapters: tuple[AdapterView, ...]

    @property
    def failed(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == "failed")

    @property
    def changed(self) -> bool:
        return any(change.kind in {"added", "changed", "loaded"} for change in self.changes)


class Listener:
    """What a caller may follow; the command line shows it as progress bars."""

    def started(self, entry: AdapterEntry, size_bytes: int) -> None: ...

    def sent(self, entry: AdapterEntry, sent_bytes: int, size_bytes: int) -> None: ...

    def ended(self, entry: AdapterEntry, change: Change) -> None: ...


def read(path: Path) -> Manifest:
    return manifests.read(path)


def apply(
    client: Client, manifest: Manifest, folder: Path, *, drain_first: bool = False, wait_s: float = 300.0, listener: Listener | None = None
) -> Outcome:
    """One adapter that is refused does not stop the others: it is a `failed` change.

    `folder`: the file's own, against which paths are read.

    :raises ClientError: the service cannot be reached, or refuses a tenant or the routing.
    """
    listener = listener or Listener()
    steps = plans.plan(
        manifest,
        tenants=client.tenants(),
        adapters=client.adapters(),
        uploaded=client.adapters(all_versions=True),
        routing=client.routing(),
        local={(entry.tenant, entry.name): _local(entry, folder) for entry in manifest.adapters},
    )
    changes: list[Change] = []
    views: list[AdapterView] = []
    for step in steps:
        match step:
            case plans.AddTenant():
                client.add_tenant(
                    step.name,
                    vram_quota_mb=step.vram_quota_mb,
                    upgrade_headroom_mb=step.upgrade_headroom_mb,
                    base_allowed=step.base_allowed,
                    limits=step.limits,
                )
                changes.append(Change(kind="added", what=f"tenant {step.name}", detail=f"VRAM quota {step.vram_quota_mb} MB"))
            case plans.ChangeTenant():
                if f"{step.name}/{step.changes.get('default_adapter')}" in {change.what for change in changes if change.kind == "failed"}:
                    continue
                client.update_tenant(step.name, **step.changes)
                if f"tenant {step.name}" not in {change.what for change in changes if change.kind == "added"}:
                    changes.append(Change(kind="changed", what=f"tenant {step.name}", detail=step.said))
            case plans.ChangeRouting():
                client.set_routing(step.routing.header, step.routing.default)
                detail = f"header {step.routing.header}, without a tenant: {step.routing.default}"
                changes.append(Change(kind="changed", what="routing", detail=detail))
            case plans.LeftAlone():
                detail = "not in the file; `tenantry adapter unload` takes it out"
                changes.append(Change(kind="left_alone", what=f"{step.tenant}/{step.name}", detail=detail))
            case plans.Unchanged():
                change = Change(
                    kind="unchanged", what=f"{step.entry.tenant}/{step.entry.name}", detail=f"version {step.view.version} serves"
                )
                listener.ended(step.entry, change)
                changes.append(change)
                views.append(step.view)
            case plans.Missing():
                change = Change(kind="failed", what=f"{step.entry.tenant}/{step.entry.name}", detail=_missing(step))
                listener.ended(step.entry, change)
                changes.append(change)
            case plans.Upload() | plans.Mount():
                change, view = _bring(client, step, drain_first, wait_s, listener)
                listener.ended(step.entry, change)
                changes.append(change)
                if view is not None:
                    views.append(view)
    return Outcome(changes=tuple(changes), adapters=tuple(views))


def _local(entry: AdapterEntry, folder: Path) -> plans.Local:
    path = folder / (entry.path or f"adapters/{entry.name}")
    if entry.path and not path.exists():
        raise ConfigInvalid(f"adapter {entry.name} of tenant {entry.tenant}: there is no {path}", where=str(path))
    present = path.exists()
    return plans.Local(path=path, present=present, digest=local_digest(path) if present else "")


def _missing(step: plans.Missing) -> str:
    return (
        f"no artifact: tried the folder {step.tried} (not there) and an earlier upload of {step.entry.name} under tenant "
        f"{step.entry.tenant} (none); put the folder there, name it with `path:`, or upload it with `tenantry adapter add`"
    )


def _bring(
    client: Client, step: plans.Upload | plans.Mount, drain_first: bool, wait_s: float, listener: Listener
) -> tuple[Change, AdapterView | None]:
    entry = step.entry
    what = f"{entry.tenant}/{entry.name}"
    try:
        if isinstance(step, plans.Upload):
            view = client.upload(
                entry.tenant, entry.name, step.path, base=entry.base, ceiling_mb=entry.vram_quota_mb, drain_first=drain_first,
                wait_s=wait_s, progress=lambda sent, size: listener.sent(entry, sent, size),
            )  # fmt: skip
        else:
            listener.started(entry, 0)
            view = client.mount(
                entry.tenant, entry.name, base=entry.base, ceiling_mb=entry.vram_quota_mb, drain_first=drain_first,
                wait_s=wait_s,
            )  # fmt: skip
    except ClientError as error:
        if error.status == 0 and error.peer_code == "unreachable":
            raise
        return Change(kind="failed", what=what, detail=_with_hint(error, drain_first)), None
    except TenantryError as error:
        return Change(kind="failed", what=what, detail=error.message), None
    if view.state != "ready":
        reason = view.error.message if view.error else f"it is {view.state}"
        return Change(kind="failed", what=what, detail=reason), view
    return Change(kind="loaded", what=what, detail=f"version {view.version}, rank {view.rank}, {view.load_ms:.0f} ms to load"), view


def _with_hint(error: ClientError, drain_first: bool) -> str:
    if error.peer_code in {"quota_exceeded", "no_free_slot"} and not drain_first and "drain" not in error.message:
        return f"{error.message}; `--drain-first` makes room by taking the old version down first (its alias is down meanwhile)"
    return error.message
