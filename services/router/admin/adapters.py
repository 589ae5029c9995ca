"""Adapters: upload and mount, list, show, unload, remove, events."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from services.router.admin.adding import FIELDS, Adding, command_from, openapi_of
from services.router.admin.answers import Body, NameInPath, Text, TextInQuery, Version, VersionInQuery, Wait, answer, check_name
from services.router.admin.registry_client import RegistryClient
from services.router.admin.uploads import received
from services.router.settings import RouterSettings
from shared.contracts.adapters import OnDeadline
from shared.contracts.admin import ListAdapters, ListEvents, RemoveAdapter, ShowAdapter, UnloadAdapter
from shared.errors import InvalidRequest

_ARCHIVE = openapi_of(FIELDS)


class Unload(Body):
    mode: Text = "draining"
    version: Version = 0
    deadline_s: Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)] = 300.0
    on_deadline: OnDeadline = OnDeadline.ABORT
    wait_s: Wait = 0.0


def make_routes(registry: RegistryClient, adding: Adding, settings: RouterSettings) -> APIRouter:
    routes = APIRouter(tags=["adapters"])

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
            return await adding.add(request, upload, command_from(fields, tenant, name))

    @routes.get("/adapters/{tenant}/{name}")
    async def show_adapter(tenant: NameInPath, name: NameInPath, version: VersionInQuery = 0) -> Response:
        return answer(await registry.ask(ShowAdapter(tenant=tenant, name=name, version=version)))

    @routes.post("/adapters/{tenant}/{name}", status_code=201, openapi_extra=_ARCHIVE)
    async def add_adapter(request: Request, tenant: NameInPath, name: NameInPath) -> Response:
        """Validates, admits and mounts; answers when it serves, is refused or fails, or after `wait_s`."""
        return await adding.received(request, lambda fields: command_from(fields, tenant, name))

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


def _named(fields: dict[str, Any], field: str) -> str:
    try:
        return check_name(fields.get(field, ""))
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from error
