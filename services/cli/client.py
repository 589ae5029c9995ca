"""The Python client of the admin plane: one method per operation, over HTTP.

from tenantry import Client
client = Client("http://127.0.0.1:8080", admin_key)
client.unload("lora_cs", mode="draining")
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from services.cli.admin_http import AdminHttp, ClientError, Progress, present
from services.cli.audit_calls import AuditCalls
from services.cli.canary_calls import CanaryCalls
from services.cli.usage_calls import UsageCalls
from shared.contracts.adapters import AdapterEvent
from shared.contracts.admin import AdapterView, KeyView, TenantView
from shared.contracts.state import Matrix, Routing

__all__ = ["MB", "Client", "ClientError"]

MB = 1024 * 1024


class Client(CanaryCalls, AuditCalls, UsageCalls, AdminHttp):
    """Safe for one thread. Every method raises ClientError; results are the contracts' views."""

    # tenants and keys

    def tenants(self) -> list[TenantView]:
        return self._get("/tenants", list[TenantView])

    def tenant(self, name: str) -> TenantView:
        """With what it asks for, holds and is allowed of everything."""
        return self._get(f"/tenants/{name}", TenantView)

    def add_tenant(
        self,
        name: str,
        *,
        vram_quota_mb: int = 0,
        upgrade_headroom_mb: int = 0,
        base_allowed: bool = True,
        nats_user: bool = False,
        limits: Mapping[str, Any] | None = None,
    ) -> TenantView:
        """With `nats_user` the answer holds its NATS password, once. `limits`: fields of contracts.tenancy.TenantLimits."""
        body = {
            "name": name,
            "vram_quota_bytes": vram_quota_mb * MB,
            "upgrade_headroom_bytes": upgrade_headroom_mb * MB,
            "base_allowed": base_allowed,
            "nats_password": nats_user,
            "limits": dict(limits or {}),
        }
        return self._send("POST", "/tenants", TenantView, json=body)

    def update_tenant(self, name: str, **changes: Any) -> TenantView:
        """`changes`: fields of contracts.admin.UpdateTenant; what is not named stays."""
        return self._send("PATCH", f"/tenants/{name}", TenantView, json=changes)

    def delete_tenant(self, name: str) -> None:
        self._send("DELETE", f"/tenants/{name}", object)

    def keys(self, tenant: str = "", *, own: bool = False) -> list[KeyView]:
        """`own`: only those that speak for this tenant alone, which its own key with the scope `admin` may ask for too."""
        return self._get(f"/tenants/{tenant}/keys", list[KeyView]) if own else self._get("/keys", list[KeyView], tenant=tenant)

    def add_key(self, *tenants: str, gateway: bool = False, label: str = "", scopes: Sequence[str] = ("infer",)) -> KeyView:
        """The answer's `secret` is the API key; it is shown this once. A gateway's key may speak for several tenants.

        `scopes`: infer (the OpenAI paths), adapters and admin (the tenant's own adapters, keys and figures on the admin plane).
        """
        body = {"tenants": list(tenants), "gateway": gateway, "label": label, "scopes": list(scopes)}
        return self._send("POST", "/keys", KeyView, json=body)

    def rotate_key(self, key_id: str, *, overlap_s: float = 3600.0, tenant: str = "") -> KeyView:
        """A new secret for the same tenants and scopes; the old one works for overlap_s more. With `tenant` its own key may do it."""
        return self._send("POST", f"{_keys_of(tenant)}/{key_id}/rotate", KeyView, json={"overlap_s": overlap_s})

    def revoke_key(self, key_id: str, *, tenant: str = "") -> None:
        self._send("DELETE", f"{_keys_of(tenant)}/{key_id}", object)

    # adapters

    def adapters(self, tenant: str = "", *, all_versions: bool = False) -> list[AdapterView]:
        """With `tenant` its own key with the scope `adapters` may ask too."""
        return self._get(f"/adapters/{tenant}" if tenant else "/adapters", list[AdapterView], all_versions=_flag(all_versions))

    def show(self, name: str, tenant: str | None = None, *, version: int = 0) -> AdapterView:
        owner = tenant or self.owner_of(name)
        return self._get(f"/adapters/{owner}/{name}", AdapterView, version=version or "")

    def upload(
        self,
        tenant: str,
        name: str,
        path: str | Path,
        *,
        base: str = "",
        ceiling_mb: int | None = None,
        drain_first: bool = False,
        make_default: bool = False,
        wait_s: float = 120.0,
        progress: Progress | None = None,
    ) -> AdapterView:
        """Sends a folder or an archive (.tar, .tar.gz, .zip) and waits until it serves, is refused or fails.

        :raises ConfigInvalid: `path` is no adapter.
        """
        params = _adapter_params(base, ceiling_mb, drain_first, make_default, wait_s)
        return self._send_archive(f"/adapters/{tenant}/{name}", Path(path), params, wait_s, AdapterView, progress)

    def mount(
        self,
        tenant: str,
        name: str,
        *,
        base: str = "",
        ceiling_mb: int | None = None,
        drain_first: bool = False,
        make_default: bool = False,
        wait_s: float = 120.0,
    ) -> AdapterView:
        """Mounts again the newest artifact already uploaded under this tenant and name."""
        params = _adapter_params(base, ceiling_mb, drain_first, make_default, wait_s)
        timeout = httpx.Timeout(wait_s + 60.0, connect=5.0)
        return self._send("POST", f"/adapters/{tenant}/{name}", AdapterView, params=params, timeout=timeout)

    def unload(
        self,
        name: str,
        tenant: str | None = None,
        *,
        mode: str = "draining",
        version: int = 0,
        deadline_s: float = 300.0,
        on_deadline: str = "abort",
        wait: bool = False,
    ) -> object:
        """Takes the adapter out: no new requests at once, running ones end, then its memory is released.

        Without `tenant` the name must be one tenant's only. `wait`: return when it is released.
        """
        owner = tenant or self.owner_of(name)
        wait_s = deadline_s + 10.0 if wait else 0.0
        body = {"mode": mode, "version": version, "deadline_s": deadline_s, "on_deadline": on_deadline, "wait_s": wait_s}
        timeout = httpx.Timeout(wait_s + 30.0, connect=5.0)
        return self._send("POST", f"/adapters/{owner}/{name}/unload", object, json=body, timeout=timeout)

    def remove(self, name: str, tenant: str | None = None, *, version: int = 0) -> list[AdapterView]:
        """Forgets versions that are not mounted (all, or one), and their stored files."""
        owner = tenant or self.owner_of(name, all_versions=True)
        return self._send("DELETE", f"/adapters/{owner}/{name}", list[AdapterView], params=present(version=version or ""))

    def events(self, tenant: str = "", name: str = "", *, limit: int = 100) -> list[AdapterEvent]:
        return self._get("/events", list[AdapterEvent], tenant=tenant, name=name, limit=limit)

    def owner_of(self, name: str, *, all_versions: bool = False) -> str:
        """The one tenant that has an adapter of this name.

        :raises ClientError: none has (404), or several (409).
        """
        owners = sorted({view.tenant for view in self.adapters(all_versions=all_versions) if view.name == name})
        if not owners:
            raise ClientError(f"no tenant has an adapter {name}", status=404, peer_code="adapter_not_found")
        if len(owners) > 1:
            raise ClientError(f"several tenants have an adapter {name}: say which ({', '.join(owners)})", status=409, peer_code="conflict")
        return owners[0]

    # compatibility

    def matrix(self) -> Matrix:
        return self._get("/matrix", Matrix)

    def set_label(self, label: str, base: str) -> Matrix:
        """Adapters that name `label` (label or label@revision) as their base are taken as made for `base`, a full identity."""
        return self._send("POST", "/matrix/labels", Matrix, json={"label": label, "base": base})

    def remove_label(self, label: str, base: str = "") -> Matrix:
        return self._send("DELETE", "/matrix/labels", Matrix, params=present(label=label, base=base))

    def set_pair(self, adapter_digest: str, base: str, *, allowed: bool, note: str = "") -> Matrix:
        body = {"adapter_digest": adapter_digest, "base": base, "allowed": allowed, "note": note}
        return self._send("POST", "/matrix/pairs", Matrix, json=body)

    def remove_pair(self, adapter_digest: str, base: str) -> Matrix:
        return self._send("DELETE", "/matrix/pairs", Matrix, params={"adapter_digest": adapter_digest, "base": base})

    # the cluster

    def pools(self) -> list[dict[str, Any]]:
        return self._get("/pools", list[dict[str, Any]])

    def workers(self) -> list[dict[str, Any]]:
        return self._get("/workers", list[dict[str, Any]])

    def routing(self) -> Routing:
        return self._get("/routing", Routing)

    def set_routing(self, header: str, default: str) -> Routing:
        return self._send("PUT", "/routing", Routing, json={"header": header, "default": default})

    def top(self) -> dict[str, Any]:
        return self._get("/top", dict[str, Any])


def _keys_of(tenant: str) -> str:
    return f"/tenants/{tenant}/keys" if tenant else "/keys"


def _adapter_params(base: str, ceiling_mb: int | None, drain_first: bool, make_default: bool, wait_s: float) -> dict[str, Any]:
    return present(
        base=base,
        ceiling_bytes="" if ceiling_mb is None else ceiling_mb * MB,
        drain_first=_flag(drain_first),
        make_default=_flag(make_default),
        wait_s=wait_s,
    )


def _flag(value: bool) -> str:
    return "true" if value else ""
