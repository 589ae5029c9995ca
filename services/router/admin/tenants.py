"""Tenants and their API keys."""

import hashlib

from fastapi import APIRouter
from fastapi.responses import Response

from services.router.admin.answers import Body, Name, NameInPath, answer
from services.router.admin.registry_client import RegistryClient
from services.router.routes import RouteTable
from shared.contracts.admin import CreateKey, CreateTenant, DeleteTenant, ListKeys, ListTenants, RevokeKey, UpdateTenant

_KNOWN_WITHIN_S = 1.0


class NewTenant(Body):
    name: Name
    vram_quota_bytes: int = 0
    upgrade_headroom_bytes: int = 0
    base_allowed: bool = True
    nats_password: bool = False


class TenantChanges(Body):
    """What is left out, or null, stays."""

    vram_quota_bytes: int | None = None
    upgrade_headroom_bytes: int | None = None
    adapter_ceilings: dict[str, int] | None = None
    default_adapter: str | None = None
    base_allowed: bool | None = None
    nats_password: bool = False


class NewKey(Body):
    tenants: list[Name]
    gateway: bool = False
    label: str = ""


def make_routes(registry: RegistryClient, table: RouteTable) -> APIRouter:
    routes = APIRouter(tags=["tenants"])

    @routes.get("/tenants")
    async def list_tenants() -> Response:
        return answer(await registry.ask(ListTenants()))

    @routes.post("/tenants", status_code=201)
    async def create_tenant(tenant: NewTenant) -> Response:
        """With `nats_password` the answer holds the password of its NATS user, once."""
        return answer(await registry.ask(CreateTenant(**tenant.model_dump())), 201)

    @routes.patch("/tenants/{tenant}")
    async def update_tenant(tenant: NameInPath, changes: TenantChanges) -> Response:
        return answer(await registry.ask(UpdateTenant(name=tenant, **changes.model_dump())))

    @routes.delete("/tenants/{tenant}")
    async def delete_tenant(tenant: NameInPath) -> Response:
        """Refused while it holds adapters; revokes its keys."""
        return answer(await registry.ask(DeleteTenant(name=tenant)))

    @routes.get("/keys")
    async def list_keys(tenant: str = "") -> Response:
        return answer(await registry.ask(ListKeys(tenant=tenant)))

    @routes.post("/keys", status_code=201)
    async def create_key(key: NewKey) -> Response:
        """The answer's `secret` is the API key; it is shown this once. This router knows it when the answer comes."""
        made = await registry.ask(CreateKey(tenants=tuple(key.tenants), gateway=key.gateway, label=key.label))
        if isinstance(made, dict) and "secret" in made:
            secret = str(made["secret"])  # pyright: ignore[reportUnknownArgumentType]
            await table.wait_key(hashlib.sha256(secret.encode()).hexdigest(), _KNOWN_WITHIN_S)
        return answer(made, 201)

    @routes.delete("/keys/{key_id}")
    async def revoke_key(key_id: str) -> Response:
        return answer(await registry.ask(RevokeKey(key_id=key_id)))

    return routes
