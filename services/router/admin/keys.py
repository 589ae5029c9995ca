"""API keys: the operator's view of all, and each tenant's of its own."""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from services.router.admin.answers import Body, Name, NameInPath, Text, TextInPath, TextInQuery, answer
from services.router.admin.registry_client import RegistryClient
from services.router.routes import RouteTable
from shared.contracts.admin import CreateKey, ListKeys, RevokeKey, RotateKey
from shared.contracts.state import Scope

_KNOWN_WITHIN_S = 1.0

Scopes = Annotated[tuple[Scope, ...], Field(min_length=1, max_length=len(Scope))]


class NewKey(Body):
    tenants: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    gateway: bool = False
    label: Text = ""
    scopes: Scopes = (Scope.INFER,)


class NewOwnKey(Body):
    label: Text = ""
    scopes: Scopes = (Scope.INFER,)


class Rotation(Body):
    """`overlap_s`: how long the old secret works beside the new one; 0 revokes it at once."""

    overlap_s: Annotated[float, Field(ge=0, le=30 * 86_400, allow_inf_nan=False)] = 3600.0


def make_routes(registry: RegistryClient, table: RouteTable) -> APIRouter:
    routes = APIRouter(tags=["keys"])

    async def with_secret(command: CreateKey | RotateKey) -> Response:
        """The answer's `secret` is the API key; it is shown this once. This router knows it when the answer comes."""
        made: Any = await registry.ask(command)
        if isinstance(made, dict) and "secret" in made:
            secret = str(made["secret"])  # pyright: ignore[reportUnknownArgumentType]
            await table.wait_key(hashlib.sha256(secret.encode()).hexdigest(), _KNOWN_WITHIN_S)
        return answer(made, 201)

    @routes.get("/keys")
    async def list_keys(tenant: TextInQuery = "") -> Response:
        return answer(await registry.ask(ListKeys(tenant=tenant)))

    @routes.post("/keys", status_code=201)
    async def create_key(key: NewKey) -> Response:
        """The answer's `secret` is the API key; it is shown this once."""
        return await with_secret(
            CreateKey(tenants=tuple(key.tenants), gateway=key.gateway, label=key.label, scopes=key.scopes)
        )  # fmt: skip

    @routes.delete("/keys/{key_id}")
    async def revoke_key(key_id: TextInPath) -> Response:
        return answer(await registry.ask(RevokeKey(key_id=key_id)))

    @routes.post("/keys/{key_id}/rotate", status_code=201)
    async def rotate_key(key_id: TextInPath, rotation: Rotation | None = None) -> Response:
        """A new secret for the same tenants and scopes; the old one works for `overlap_s` more."""
        return await with_secret(RotateKey(key_id=key_id, overlap_s=(rotation or Rotation()).overlap_s))

    @routes.get("/tenants/{tenant}/keys")
    async def list_own_keys(tenant: NameInPath) -> Response:
        """Those that speak for this tenant alone."""
        return answer(await registry.ask(ListKeys(tenant=tenant, own=True)))

    @routes.post("/tenants/{tenant}/keys", status_code=201)
    async def create_own_key(tenant: NameInPath, key: NewOwnKey) -> Response:
        return await with_secret(CreateKey(tenants=(tenant,), label=key.label, scopes=key.scopes))

    @routes.delete("/tenants/{tenant}/keys/{key_id}")
    async def revoke_own_key(tenant: NameInPath, key_id: TextInPath) -> Response:
        return answer(await registry.ask(RevokeKey(key_id=key_id, tenant=tenant)))

    @routes.post("/tenants/{tenant}/keys/{key_id}/rotate", status_code=201)
    async def rotate_own_key(tenant: NameInPath, key_id: TextInPath, rotation: Rotation | None = None) -> Response:
        return await with_secret(RotateKey(key_id=key_id, tenant=tenant, overlap_s=(rotation or Rotation()).overlap_s))

    return routes
