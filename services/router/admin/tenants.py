"""Tenants: what they may use, hold and ask for."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field

from services.router.admin.answers import Body, Bytes, Name, NameInPath, answer
from services.router.admin.registry_client import RegistryClient
from shared.contracts.admin import CreateTenant, DeleteTenant, ListTenants, ShowTenant, UpdateTenant
from shared.policy.limits import BOUNDS


def _count(name: str) -> Any:
    """The bounds of a limit that is a whole number."""
    lowest, highest = BOUNDS[name]
    return Field(strict=True, ge=int(lowest), le=int(highest))


class Limits(Body):
    """What is left out stays; null takes a limit away. Bytes, requests, tokens; KV cache and concurrency are per pool."""

    kv_quota_bytes: Annotated[int, _count("kv_quota_bytes")] | None = None
    max_concurrent: Annotated[int, _count("max_concurrent")] | None = None
    requests_per_minute: Annotated[int, _count("requests_per_minute")] | None = None
    tokens_per_minute: Annotated[int, _count("tokens_per_minute")] | None = None
    host_cache_bytes: Annotated[int, _count("host_cache_bytes")] | None = None
    artifact_bytes: Annotated[int, _count("artifact_bytes")] | None = None
    burst: Annotated[bool, Field(strict=True)] = False
    weight: Annotated[int, _count("weight")] = 1
    default_max_tokens: Annotated[int, _count("default_max_tokens")] | None = None
    queue_limit: Annotated[int, _count("queue_limit")] = 256
    queue_deadline_s: Annotated[float, Field(strict=True, ge=0.001, le=3600, allow_inf_nan=False)] = 30.0
    cache_group: Name | None = None


class NewTenant(Body):
    name: Name
    vram_quota_bytes: Bytes = 0
    upgrade_headroom_bytes: Bytes = 0
    base_allowed: bool = True
    nats_password: bool = False
    limits: Limits = Limits()


class TenantChanges(Body):
    """What is left out, or null, stays."""

    vram_quota_bytes: Bytes | None = None
    upgrade_headroom_bytes: Bytes | None = None
    adapter_ceilings: Annotated[dict[Name, Bytes], Field(max_length=10_000)] | None = None
    default_adapter: Name | Literal[""] | None = None
    base_allowed: bool | None = None
    nats_password: bool = False
    limits: Limits = Limits()


def make_routes(registry: RegistryClient) -> APIRouter:
    routes = APIRouter(tags=["tenants"])

    @routes.get("/tenants")
    async def list_tenants() -> Response:
        return answer(await registry.ask(ListTenants()))

    @routes.get("/tenants/{tenant}")
    async def show_tenant(tenant: NameInPath) -> Response:
        """What it asks for, holds and is allowed of everything. Its own key with the scope `admin` may ask too."""
        return answer(await registry.ask(ShowTenant(name=tenant)))

    @routes.post("/tenants", status_code=201)
    async def create_tenant(tenant: NewTenant) -> Response:
        """With `nats_password` the answer holds the password of its NATS user, once."""
        limits = tenant.limits.model_dump(exclude_unset=True)
        return answer(await registry.ask(CreateTenant(**tenant.model_dump(exclude={"limits"}), limits=limits)), 201)

    @routes.patch("/tenants/{tenant}")
    async def update_tenant(tenant: NameInPath, changes: TenantChanges) -> Response:
        """A quota below what is held is taken: the answer's `over_quota` names it, and nothing new gets in."""
        limits = changes.limits.model_dump(exclude_unset=True)
        return answer(await registry.ask(UpdateTenant(name=tenant, **changes.model_dump(exclude={"limits"}), limits=limits)))

    @routes.delete("/tenants/{tenant}")
    async def delete_tenant(tenant: NameInPath) -> Response:
        """Refused while it holds adapters; revokes its keys."""
        return answer(await registry.ask(DeleteTenant(name=tenant)))

    return routes
