"""The admin plane's door and frame: its credential, its errors, its OpenAPI document."""

import asyncio
import hashlib
import hmac

from fastapi import FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from services.router.admin import adapters, audit, canary, cluster, keys, tenants, usage
from services.router.admin.actor import current_actor, operator_of
from services.router.admin.adding import Adding
from services.router.admin.registry_client import RegistryClient
from services.router.admin.tenant_door import TenantDoor, tenant_of
from services.router.asgi import AsgiApp, Receive, Scope, Send, answer_whole
from services.router.fleet import Fleet
from services.router.freshness import Freshness
from services.router.openai import body_of, retry_after_of, status_of
from services.router.routes import RouteTable
from services.router.settings import RouterSettings
from shared.bus import Bus
from shared.errors import InvalidKey, InvalidRequest, MissingKey, NoFreeSlot, NotFound, NotPermitted, TenantryError

PREFIX = "/admin/v1"
_OPEN = frozenset({f"{PREFIX}/openapi.json", f"{PREFIX}/docs"})  # the same for everybody, and nothing of this cluster


class Gate:
    """Lets through who holds the admin credential (without one configured, nobody), and tenants' keys where `door` opens to them.

    For the admin plane and the metrics.
    """

    def __init__(self, inner: AsgiApp, key_sha256: str, door: TenantDoor | None = None) -> None:
        self._inner = inner
        self._key_sha256 = key_sha256.strip().lower()
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = await self._refusal(scope)
        if refusal is None:
            if self._door is not None and tenant_of(scope):
                await self._door.through(self._inner, scope, receive, send)
            else:
                current_actor.set(operator_of(scope))
                await self._inner(scope, receive, send)
            return
        status = status_of(refusal)
        headers = [(b"www-authenticate", b"Bearer")] if status == 401 else []
        retry_after = retry_after_of(refusal)
        if retry_after:
            headers.append((b"retry-after", retry_after.encode()))
        await answer_whole(send, status, body_of(refusal, scope["path"], ""), headers)

    async def _refusal(self, scope: Scope) -> TenantryError | None:
        if not self._key_sha256:
            return NotPermitted("the admin plane is closed: this router was started without TENANTRY_ROUTER_ADMIN_KEY_SHA256")
        if scope["path"] in _OPEN:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
        scheme, _, secret = given.partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            return MissingKey("no admin key: send `Authorization: Bearer <admin key>`")
        if hmac.compare_digest(hashlib.sha256(secret.encode()).hexdigest(), self._key_sha256):
            return None
        if self._door is None:
            return InvalidKey("the admin key is not valid")
        return await self._door.refusal(scope, secret, asyncio.get_running_loop().time())


def make_admin_plane(bus: Bus, table: RouteTable, freshness: Freshness, fleet: Fleet, settings: RouterSettings) -> AsgiApp:
    app = FastAPI(
        title="Tenantry admin plane",
        version="1",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=f"{PREFIX}/docs",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # for the document: the gate decides
        dependencies=[Security(HTTPBearer(auto_error=False, description="the admin key, or where a tenant is in the path its own key"))],
    )
    registry = RegistryClient(bus)
    app.include_router(tenants.make_routes(registry), prefix=PREFIX)
    app.include_router(keys.make_routes(registry, table), prefix=PREFIX)
    adding = Adding(registry, bus, settings)
    app.include_router(adapters.make_routes(registry, adding, settings), prefix=PREFIX)
    app.include_router(canary.make_routes(registry, adding), prefix=PREFIX)
    app.include_router(audit.make_routes(registry), prefix=PREFIX)
    app.include_router(cluster.make_routes(registry, table, fleet, bus), prefix=PREFIX)
    app.include_router(usage.make_routes(registry, table), prefix=PREFIX)
    app.add_exception_handler(TenantryError, _told)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unrouted)
    door = TenantDoor(table, freshness, settings.tenant_admin_max_concurrent, settings.tenant_changes_per_minute)
    return Gate(app, settings.admin_key_sha256, door)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, TenantryError)
    if isinstance(error, NoFreeSlot) and tenant_of(request.scope):
        error = NoFreeSlot("no adapter slot is free now")  # how many others hold is no tenant's business
    retry_after = retry_after_of(error)
    headers = {"retry-after": retry_after} if retry_after else {}
    return Response(body_of(error, request.url.path, ""), status_of(error), headers, "application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    where = ".".join(str(part) for part in found["loc"])
    return await _told(request, InvalidRequest(f"{where}: {found['msg']}", param=where))


async def _unrouted(request: Request, error: Exception) -> Response:
    """What FastAPI itself refuses: no such path, wrong method, a body that is no JSON."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _told(request, NotFound(f"there is no {request.url.path[:128]} here"))
    refused = InvalidRequest(f"{request.method} {request.url.path[:128]}: {error.detail}")
    return Response(body_of(refused, "", ""), error.status_code, error.headers, "application/json")
