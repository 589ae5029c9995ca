"""Adapters: upload and mount, list, show, unload, events."""

from typing import Any

import msgspec
import structlog
from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.admin.answers import Body, NameInPath, answer, check_name
from services.router.admin.registry_client import RegistryClient
from services.router.admin.uploads import Upload, received, stage, unstage
from shared.bus import Bus, BusUnavailable
from shared.contracts.adapters import OnDeadline
from shared.contracts.admin import AddAdapter, ListAdapters, ListEvents, ShowAdapter, UnloadAdapter
from shared.errors import InvalidRequest, RegistryUnavailable, TenantryError

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


class Unload(Body):
    mode: str = "draining"
    version: int = 0
    deadline_s: float = 300.0
    on_deadline: OnDeadline = OnDeadline.ABORT
    wait_s: float = 0.0


def make_routes(registry: RegistryClient, bus: Bus, upload_limit_bytes: int) -> APIRouter:
    routes = APIRouter(tags=["adapters"])

    async def add(request: Request, tenant: str, name: str, upload: Upload) -> Response:
        fields = dict(request.query_params) | upload.fields
        command = _command(fields, tenant, name)
        if upload.path is None:
            return answer(await registry.ask(command, command.wait_s), 201)
        staged = await stage(bus, upload.path)
        try:
            return answer(await registry.ask(msgspec.structs.replace(command, object=staged), command.wait_s), 201)
        except RegistryUnavailable:
            await _take_back(bus, staged)
            raise

    @routes.get("/adapters")
    async def list_adapters(tenant: str = "", all_versions: bool = False) -> Response:
        return answer(await registry.ask(ListAdapters(tenant=tenant, all_versions=all_versions)))

    @routes.post("/adapters", status_code=201, openapi_extra=_ARCHIVE)
    async def add_named_in_form(request: Request) -> Response:
        """As below, with `tenant` and `name` among the form's or query's fields."""
        async with received(request, upload_limit_bytes) as upload:
            fields = dict(request.query_params) | upload.fields
            tenant, name = _named(fields, "tenant"), _named(fields, "name")
            upload.fields = {key: value for key, value in upload.fields.items() if key not in {"tenant", "name"}}
            return await add(request, tenant, name, upload)

    @routes.get("/adapters/{tenant}/{name}")
    async def show_adapter(tenant: NameInPath, name: NameInPath, version: int = 0) -> Response:
        return answer(await registry.ask(ShowAdapter(tenant=tenant, name=name, version=version)))

    @routes.post("/adapters/{tenant}/{name}", status_code=201, openapi_extra=_ARCHIVE)
    async def add_adapter(request: Request, tenant: NameInPath, name: NameInPath) -> Response:
        """Validates, admits and mounts; answers when it serves, is refused or fails, or after `wait_s`."""
        async with received(request, upload_limit_bytes) as upload:
            return await add(request, tenant, name, upload)

    @routes.post("/adapters/{tenant}/{name}/unload")
    async def unload_adapter(tenant: NameInPath, name: NameInPath, unload: Unload | None = None) -> Response:
        """Takes it out of the routes, lets what runs end, then releases its memory."""
        order = (unload or Unload()).model_dump()
        return answer(await registry.ask(UnloadAdapter(tenant=tenant, name=name, **order), order["wait_s"]))

    @routes.get("/events")
    async def list_events(tenant: str = "", name: str = "", limit: int = 100) -> Response:
        return answer(await registry.ask(ListEvents(tenant=tenant, name=name, limit=limit)))

    return routes


def _command(fields: dict[str, Any], tenant: str, name: str) -> AddAdapter:
    """:raises InvalidRequest: an unknown field, or a value of the wrong kind."""
    given = {key: value for key, value in fields.items() if key not in {"tenant", "name"}}
    unknown = sorted(given.keys() - _ADD_FIELDS)
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0][:80]!r}; known are: {', '.join(sorted(_ADD_FIELDS))}", param=unknown[0][:80])
    try:
        return msgspec.convert(given | {"type": "add_adapter", "tenant": tenant, "name": name}, AddAdapter, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"a field of the upload is wrong: {error}") from error


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
