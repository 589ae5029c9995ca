"""What of the admin plane a tenant's own key opens: its adapters, trials and keys, and what it may know of itself; all else is not its."""

import re
from typing import Any

from services.router.admin.actor import current_actor, key_of
from services.router.asgi import AsgiApp, Event, Receive, Scope, Send
from services.router.crowd import Crowd
from services.router.freshness import Freshness
from services.router.resolve import authenticate
from services.router.routes import RouteTable
from shared.contracts import state
from shared.errors import BodyTooLarge, InvalidKey, NotFound, Overloaded, TenantryError
from shared.policy.pace import Pace

TENANT = "tenantry.tenant"  # scope key: whose key opened the door; absent for the operator's

_BODY_LIMIT_BYTES = 64 * 1024  # of everything but an upload, which has its own
_SEGMENT = r"([^/]+)"
_OPEN = tuple(
    (methods, re.compile(f"/admin/v1{path}"), needed)
    for methods, path, needed in (
        ({"GET"}, f"/adapters/{_SEGMENT}", state.Scope.ADAPTERS),
        ({"GET", "POST", "DELETE"}, f"/adapters/{_SEGMENT}/[^/]+", state.Scope.ADAPTERS),
        ({"POST"}, f"/adapters/{_SEGMENT}/[^/]+/unload", state.Scope.ADAPTERS),
        ({"GET"}, f"/canaries/{_SEGMENT}", state.Scope.ADAPTERS),
        ({"GET", "POST", "PATCH"}, f"/canaries/{_SEGMENT}/[^/]+", state.Scope.ADAPTERS),
        ({"POST"}, f"/canaries/{_SEGMENT}/[^/]+/(?:promote|rollback)", state.Scope.ADAPTERS),
        ({"GET"}, f"/audit/{_SEGMENT}", state.Scope.ADMIN),
        ({"GET"}, f"/tenants/{_SEGMENT}", state.Scope.ADMIN),
        ({"GET", "POST"}, f"/tenants/{_SEGMENT}/keys", state.Scope.ADMIN),
        ({"DELETE"}, f"/tenants/{_SEGMENT}/keys/[^/]+", state.Scope.ADMIN),
        ({"POST"}, f"/tenants/{_SEGMENT}/keys/[^/]+/rotate", state.Scope.ADMIN),
        ({"GET"}, "/usage()", state.Scope.ADMIN),  # names no tenant: the key's own
    )
)


class TenantDoor:
    def __init__(self, table: RouteTable, freshness: Freshness, at_once: int, changes_per_minute: int) -> None:
        self._table = table
        self._freshness = freshness
        self._crowd = Crowd("requests to the admin plane", at_once)
        self._pace = Pace(changes_per_minute)

    async def refusal(self, scope: Scope, secret: str, now_s: float) -> TenantryError | None:
        """None lets the request through, marked as the tenant's.

        Another tenant's path and one of nobody are refused here alike, before anything is looked up.
        """
        opened = next(
            (
                (found[1], needed)
                for methods, path, needed in _OPEN
                if scope["method"] in methods and (found := path.fullmatch(scope["path"])) is not None
            ),
            None,
        )
        if opened is None:
            return InvalidKey("the admin key is not valid")
        tenant, needed = opened
        try:
            if not self._freshness.current(now_s):
                await self._freshness.settle(now_s)
            key = authenticate(self._table, secret, needed)
        except InvalidKey:
            return InvalidKey("the admin key is not valid")
        except TenantryError as error:
            return error
        if not tenant and not key.gateway:
            tenant = key.tenants[0]
        if tenant not in self._table.speaks.get(key.key_id, ()) or tenant not in self._table.tenants:
            return NotFound("there is nothing of that name, or this key may not see it")
        try:
            if scope["method"] != "GET":
                self._pace.take(tenant, now_s)
            self._crowd.enter(tenant)
        except Overloaded as error:
            return error
        scope[TENANT] = tenant
        current_actor.set(key_of(scope, key.prefix or key.key_id))
        return None

    async def through(self, inner: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
        """After `refusal` gave None."""
        try:
            await inner(scope, receive if _is_upload(scope) else _limited(receive), send)
        finally:
            self._crowd.leave(scope[TENANT])


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "POST" and re.fullmatch("/admin/v1/(?:adapters|canaries)/[^/]+/[^/]+", scope["path"]) is not None


def _limited(receive: Receive) -> Receive:
    """The same, refusing a body that is larger than a tenant's request has any use for."""
    read_bytes = 0

    async def counted() -> Event:
        nonlocal read_bytes
        event = await receive()
        read_bytes += len(event.get("body", b""))
        if read_bytes > _BODY_LIMIT_BYTES:
            raise BodyTooLarge(f"the body is larger than {_BODY_LIMIT_BYTES} bytes", asked_bytes=read_bytes, limit_bytes=_BODY_LIMIT_BYTES)
        return event

    return counted


def tenant_of(scope: Any) -> str:
    """Whose key it is; "" for the operator's."""
    return scope.get(TENANT, "")
