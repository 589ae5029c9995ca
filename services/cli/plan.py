"""What has to be done so that the registry holds what a manifest says. Pure: manifest and present state in, steps out.

Nothing that the manifest does not name is touched; what stands already makes no step, so applying twice changes nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.cli import limits
from services.cli.manifest import MB, AdapterEntry, Manifest
from shared.contracts.admin import AdapterView, TenantView
from shared.contracts.state import Routing
from shared.contracts.tenancy import TenantLimits

_SERVING = {"ready"}


class AddTenant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    vram_quota_mb: int
    upgrade_headroom_mb: int
    base_allowed: bool
    limits: dict[str, Any] = {}


class ChangeTenant(msgspec.Struct, frozen=True, kw_only=True):
    """`changes`: fields of contracts.admin.UpdateTenant; `said`: the same for people."""

    name: str
    changes: dict[str, Any]
    said: str


class ChangeRouting(msgspec.Struct, frozen=True, kw_only=True):
    routing: Routing
    before: Routing


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    entry: AdapterEntry
    path: Path


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """Mount what was uploaded before."""

    entry: AdapterEntry


class Unchanged(msgspec.Struct, frozen=True, kw_only=True):
    entry: AdapterEntry
    view: AdapterView


class LeftAlone(msgspec.Struct, frozen=True, kw_only=True):
    """In the registry and not in the file."""

    tenant: str
    name: str


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Neither a folder beside the file nor an earlier upload."""

    entry: AdapterEntry
    tried: Path


Step = AddTenant | ChangeTenant | ChangeRouting | Upload | Mount | Unchanged | LeftAlone | Missing


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """What lies on this side for one entry: the path, whether it is there, and the digest of its files ("" if unknown)."""

    path: Path
    present: bool
    digest: str = ""


def plan(
    manifest: Manifest,
    *,
    tenants: Sequence[TenantView],
    adapters: Sequence[AdapterView],
    uploaded: Sequence[AdapterView],
    routing: Routing,
    local: Mapping[tuple[str, str], Local],
) -> list[Step]:
    """In the order to do them: tenants, routing, adapters, then which adapter is a tenant's default.

    `adapters`: what is mounted or under way; `uploaded`: every version ever, also unloaded ones.
    """
    steps: list[Step] = []
    known = {view.name: view for view in tenants}
    entries = {entry.name: entry for entry in manifest.tenants}
    for name in manifest.tenant_names:
        own = entries.get(name)
        view = known.get(name)
        if view is None:
            add = AddTenant(
                name=name,
                vram_quota_mb=manifest.quota_bytes(name) // MB,
                upgrade_headroom_mb=own.upgrade_headroom_mb if own else 0,
                base_allowed=own.base_allowed if own else True,
                limits=own.limits if own else {},
            )
            steps.append(add)
            view = _as_added(add)
        change = _change(manifest, name, view)
        if change is not None:
            steps.append(change)
    if manifest.routing is not None and manifest.routing != routing:
        steps.append(ChangeRouting(routing=manifest.routing, before=routing))
    steps += [_adapter_step(entry, adapters, uploaded, local[entry.tenant, entry.name]) for entry in manifest.adapters]
    for name in manifest.tenant_names:
        default = manifest.default_adapter(name)
        if default and (name not in known or known[name].default_adapter != default):
            steps.append(ChangeTenant(name=name, changes={"default_adapter": default}, said=f"default adapter {default}"))
    named = {(entry.tenant, entry.name) for entry in manifest.adapters}
    others = sorted({(view.tenant, view.name) for view in adapters} - named)
    steps += [LeftAlone(tenant=tenant, name=name) for tenant, name in others]
    return steps


def _as_added(add: AddTenant) -> TenantView:
    return TenantView(
        tenant_id="",
        name=add.name,
        vram_quota_bytes=add.vram_quota_mb * MB,
        vram_held_bytes=0,
        upgrade_headroom_bytes=add.upgrade_headroom_mb * MB,
        adapters=0,
        base_allowed=add.base_allowed,
        limits=msgspec.structs.replace(TenantLimits(), **add.limits),
    )


def _change(manifest: Manifest, name: str, view: TenantView) -> ChangeTenant | None:
    changes: dict[str, Any] = {}
    said: list[str] = []
    own = next((entry for entry in manifest.tenants if entry.name == name), None)
    if any(entry.tenant == name for entry in manifest.adapters):
        quota_bytes = manifest.quota_bytes(name)
        if quota_bytes != view.vram_quota_bytes:
            changes["vram_quota_bytes"] = quota_bytes
            said.append(f"VRAM quota {view.vram_quota_bytes // MB} -> {quota_bytes // MB} MB")
        ceilings = {**view.adapter_ceilings, **manifest.ceilings(name)}
        if ceilings != view.adapter_ceilings:
            changes["adapter_ceilings"] = ceilings
            said += [f"{key} at most {value // MB} MB" for key, value in ceilings.items() if view.adapter_ceilings.get(key) != value]
    if own is not None:
        headroom_bytes = own.upgrade_headroom_mb * MB
        if headroom_bytes != view.upgrade_headroom_bytes:
            changes["upgrade_headroom_bytes"] = headroom_bytes
            said.append(f"upgrade headroom {view.upgrade_headroom_bytes // MB} -> {own.upgrade_headroom_mb} MB")
        if own.base_allowed != view.base_allowed:
            changes["base_allowed"] = own.base_allowed
            said.append("base allowed" if own.base_allowed else "base not allowed")
        differing = {field: value for field, value in own.limits.items() if getattr(view.limits, field) != value}
        if differing:
            changes["limits"] = differing
            after = limits.said(msgspec.structs.replace(view.limits, **differing))
            said += [f"{name} {value} -> {after[name]}" for name, value in limits.said(view.limits).items() if value != after[name]]
    return ChangeTenant(name=name, changes=changes, said=", ".join(said)) if changes else None


def _adapter_step(entry: AdapterEntry, adapters: Sequence[AdapterView], uploaded: Sequence[AdapterView], local: Local) -> Step:
    mine = [view for view in adapters if (view.tenant, view.name) == (entry.tenant, entry.name)]
    serving = next((view for view in mine if view.serving and view.state in _SERVING), None)
    same_base = serving is not None and entry.base in ("", serving.base)
    if local.present:
        known = {view.digest for view in mine if view is serving or view.on_trial}  # one on trial is promoted, not applied
        if serving is not None and same_base and local.digest and local.digest in known:
            return Unchanged(entry=entry, view=serving)
        return Upload(entry=entry, path=local.path)
    if serving is not None and same_base:
        return Unchanged(entry=entry, view=serving)
    earlier = any((view.tenant, view.name) == (entry.tenant, entry.name) and view.state not in {"rejected"} for view in (*uploaded, *mine))
    return Mount(entry=entry) if earlier else Missing(entry=entry, tried=local.path)
