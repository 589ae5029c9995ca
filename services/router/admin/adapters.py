"""Adapters: upload and mount, list, show, unload, remove, events."""

from typing import Annotated, Any

import msgspec
import structlog
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from services.router.admin.answers import Body, NameInPath, Text, TextInQuery, Version, VersionInQuery, Wait, answer, check_name
from services.router.admin.registry_client import RegistryClient
from services.router.admin.tenant_door import tenant_of
from services.router.admin.uploads import Upload, received, stage, unstage
from services.router.crowd import Crowd
from services.router.settings import RouterSettings
from shared.bus import Bus, BusUnavailable
from shared.contracts.adapters import OnDeadline
from shared.contracts.admin import AddAdapter, ListAdapters, ListEvents, RemoveAdapter, ShowAdapter, UnloadAdapter
from shared.errors import InvalidRequest, NotPermitted, RegistryUnavailable, TenantryError
from shared.policy.limits import MAX_BYTES

log = structlog.get_logger()

_ADD_FIELDS = frozenset({"base", "pool_id", "ceiling_bytes", "drain_first", "make_default", "request", "wait_s"})
_ARCHIVE = {
    "requestBody": {
        "description": "The archive (.tar, .tar.gz, .zip): the form's `file`, or the whole body. Without one, the newest artifact "
        "already uploaded under this tenant and name is mounted. The query's (or form's) other fields: " + ", ".join(sorted(_ADD_FIELDS)),
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


_MAX_WAIT_S = 3600.0


class Unload(Body):
    mode: Text = "draining"
    version: Version = 0
    deadline_s: Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)] = 300.0
    on_deadline: OnDeadline = OnDeadline.ABORT
    wait_s: Wait = 0.0


def make_routes(registry: RegistryClient, bus: Bus, settings: RouterSettings) -> APIRouter:
    routes = APIRouter(tags=["adapters"])
    uploads = Crowd("uploads", settings.tenant_uploads_at_once)  # each takes disk here until it is staged

    async def add(request: Request, tenant: str, name: str, upload: Upload) -> Response:
        fields = dict(request.query_params) | upload.fields
        command = _command(fields, tenant, name)
        if command.ceiling_bytes is not None and tenant_of(request.scope):
            raise NotPermitted("ceiling_bytes is the operator's to set", field="ceiling_bytes")
        if upload.path is None:
            return answer(await registry.ask(command, command.wait_s), 201)
        staged = await stage(bus, upload.path)
        try:
            return answer(await registry.ask(msgspec.structs.replace(command, object=staged), command.wait_s), 201)
        except RegistryUnavailable:
            await _take_back(bus, staged)
            raise

    @routes.get("/adapters")
    async def list_adapters(tenant: TextInQuery = "", all_versions: bool = False) -> Response:
        return answer(await registry.ask(ListAdapters(tenant=tenant, all_versions=all_versions)))

    @routes.get("/adapters/{tenant}")
    async def list_adapters_of(tenant: NameInPath, all_versions: bool = False) -> Response:
        """As above for one tenant. This and the following paths take that tenant's own key too, with the scope `adapters`."""
        return answer(await registry.ask(ListAdapters(tenant=tenant, all_versions=all_versions)))

    @routes.post("/adapters", status_code=201, openapi_extra=_ARCHIVE)
    async def add_named_in_form(request: Request) -> Response:
        """As below, with `tenant` and `name` among the form's or query's fields."""
        async with received(request, settings.upload_limit_bytes) as upload:
            fields = dict(request.query_params) | upload.fields
            tenant, name = _named(fields, "tenant"), _named(fields, "name")
            upload.fields = {key: value for key, value in upload.fields.items() if key not in {"tenant", "name"}}
            return await add(request, tenant, name, upload)

    @routes.get("/adapters/{tenant}/{name}")
    async def show_adapter(tenant: NameInPath, name: NameInPath, version: VersionInQuery = 0) -> Response:
        return answer(await registry.ask(ShowAdapter(tenant=tenant, name=name, version=version)))

    @routes.post("/adapters/{tenant}/{name}", status_code=201, openapi_extra=_ARCHIVE)
    async def add_adapter(request: Request, tenant: NameInPath, name: NameInPath) -> Response:
        """Validates, admits and mounts; answers when it serves, is refused or fails, or after `wait_s`."""
        own = tenant_of(request.scope)
        if not own:
            return await received_and_added(request, tenant, name)
        uploads.enter(own)
        try:
            return await received_and_added(request, tenant, name)
        finally:
            uploads.leave(own)

    async def received_and_added(request: Request, tenant: str, name: str) -> Response:
        async with received(request, settings.upload_limit_bytes) as upload:
            return await add(request, tenant, name, upload)

    @routes.post("/adapters/{tenant}/{name}/unload")
    async def unload_adapter(tenant: NameInPath, name: NameInPath, unload: Unload | None = None) -> Response:
        """Takes it out of the routes, lets what runs end, then releases its memory."""
        order = (unload or Unload()).model_dump()
        return answer(await registry.ask(UnloadAdapter(tenant=tenant, name=name, **order), order["wait_s"]))

    @routes.delete("/adapters/{tenant}/{name}")
    async def remove_adapter(tenant: NameInPath, name: NameInPath, version: VersionInQuery = 0) -> Response:
        """Forgets versions that are not mounted (all, or one), and their stored files, which the artifact quota counts."""
        return answer(await registry.ask(RemoveAdapter(tenant=tenant, name=name, version=version)))

    @routes.get("/events")
    async def list_events(
        tenant: TextInQuery = "", name: TextInQuery = "", limit: Annotated[int, Query(ge=1, le=10_000)] = 100
    ) -> Response:
        return answer(await registry.ask(ListEvents(tenant=tenant, name=name, limit=limit)))

    return routes


def _command(fields: dict[str, Any], tenant: str, name: str) -> AddAdapter:
    """:raises InvalidRequest: an unknown field, or a value of the wrong kind."""
    given = {key: value for key, value in fields.items() if key not in {"tenant", "name"}}
    unknown = sorted(given.keys() - _ADD_FIELDS)
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0][:80]!r}; known are: {', '.join(sorted(_ADD_FIELDS))}", param=unknown[0][:80])
    try:
        command = msgspec.convert(given | {"type": "add_adapter", "tenant": tenant, "name": name}, AddAdapter, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a field of the upload is wrong: {error}", param=str(error).rpartition("`$.")[2].rstrip("`")) from error
    if not 0 <= command.wait_s <= _MAX_WAIT_S:
        raise InvalidRequest(f"wait_s: expected 0 to {_MAX_WAIT_S:g}", param="wait_s")
    if command.ceiling_bytes is not None and not 0 <= command.ceiling_bytes <= MAX_BYTES:
        raise InvalidRequest(f"ceiling_bytes: expected 0 to {MAX_BYTES}", param="ceiling_bytes")
    return command


def _named(fields: dict[str, Any], field: str) -> str:
    try:
        return check_name(fields.get(field, ""))
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from error


async def _take_back(bus: Bus, staged: str) -> None:
    """Best effort: the registry also clears what nobody takes."""
    try:
        await unstage(bus, staged)
    except (BusUnavailable, TenantryError) as error:
        log.warning("upload.left_in_staging", object=staged, error=error.message)
