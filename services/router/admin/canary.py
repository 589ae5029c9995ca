"""Trials: start one, look, change its terms, promote it, roll it back."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from services.router.admin.adding import FIELDS, Adding, command_from, converted, openapi_of, refuse_unknown
from services.router.admin.answers import Body, NameInPath, TextInQuery, Version, answer
from services.router.admin.registry_client import RegistryClient
from shared.contracts.adapters import CanaryBy, CanaryStop, CanaryTerms, OnDeadline
from shared.contracts.admin import AddAdapter, ChangeCanary, ListCanaries, PromoteCanary, RollBackCanary
from shared.errors import NotFound

_STOP_FIELDS = frozenset(CanaryStop.__struct_fields__)
_TERMS_FIELDS = frozenset({"share_ppm", "by"}) | _STOP_FIELDS
_START_FIELDS = (FIELDS - {"drain_first", "make_default", "ceiling_bytes"}) | _TERMS_FIELDS | {"version"}


class Stop(Body):
    window_s: Annotated[float, Field(ge=5, le=3600, allow_inf_nan=False)] | None = None
    min_requests: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] | None = None
    error_rate_margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    latency_ratio: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] | None = None


class Terms(Body):
    """What is not named stays as it is."""

    share_ppm: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] | None = None
    by: CanaryBy | None = None
    stop: Stop = Stop()
    resume: bool = False


class Ending(Body):
    """`version`: only if this one is on trial. The deadline is of the requests that run on the version that drains."""

    version: Version = 0
    deadline_s: Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)] = 300.0
    on_deadline: OnDeadline = OnDeadline.WAIT


class _Stored(msgspec.Struct):
    """Which of the stored versions."""

    version: int = 0


def make_routes(registry: RegistryClient, adding: Adding) -> APIRouter:
    routes = APIRouter(tags=["canaries"])

    @routes.get("/canaries")
    async def list_canaries(tenant: TextInQuery = "") -> Response:
        """Trials that run or were stopped, with what both versions did in the window."""
        return answer(await registry.ask(ListCanaries(tenant=tenant)))

    @routes.get("/canaries/{tenant}")
    async def list_canaries_of(tenant: NameInPath) -> Response:
        """As above for one tenant. This and the following paths take that tenant's own key too, with the scope `adapters`."""
        return answer(await registry.ask(ListCanaries(tenant=tenant)))

    @routes.get("/canaries/{tenant}/{name}")
    async def show_canary(tenant: NameInPath, name: NameInPath) -> Response:
        found: Any = await registry.ask(ListCanaries(tenant=tenant, name=name))
        if not found:
            raise NotFound(f"tenant {tenant} has no version of {name} on trial", tenant=tenant, adapter=name)
        return answer(found[0])

    @routes.post("/canaries/{tenant}/{name}", status_code=201, openapi_extra=openapi_of(_START_FIELDS))
    async def start_canary(request: Request, tenant: NameInPath, name: NameInPath) -> Response:
        """Validates, admits and mounts a version beside the one that serves; then it answers its share of the alias's requests.

        Without an archive a stored version that is at rest goes on trial: `version`, or the newest.
        """
        return await adding.received(request, lambda fields: _command(fields, tenant, name))

    @routes.patch("/canaries/{tenant}/{name}")
    async def change_canary(tenant: NameInPath, name: NameInPath, terms: Terms) -> Response:
        """Share, rule and stop, from the next request on; `resume` lets a trial that was stopped run again."""
        stop = terms.stop.model_dump(exclude_none=True)
        change = ChangeCanary(tenant=tenant, name=name, share_ppm=terms.share_ppm, by=terms.by, stop=stop, resume=terms.resume)
        return answer(await registry.ask(change))

    @routes.post("/canaries/{tenant}/{name}/promote")
    async def promote_canary(tenant: NameInPath, name: NameInPath, ending: Ending | None = None) -> Response:
        """The alias becomes the trial version's; the one that served drains."""
        return answer(await registry.ask(PromoteCanary(tenant=tenant, name=name, **(ending or Ending()).model_dump())))

    @routes.post("/canaries/{tenant}/{name}/rollback")
    async def roll_back_canary(tenant: NameInPath, name: NameInPath, ending: Ending | None = None) -> Response:
        """The trial is over and its version drains; the alias stays."""
        return answer(await registry.ask(RollBackCanary(tenant=tenant, name=name, **(ending or Ending()).model_dump())))

    return routes


def _command(fields: dict[str, Any], tenant: str, name: str) -> AddAdapter:
    """:raises InvalidRequest: an unknown field, or a value of the wrong kind."""
    refuse_unknown({key: value for key, value in fields.items() if key not in {"tenant", "name"}}, _START_FIELDS)
    stop = converted({key: value for key, value in fields.items() if key in _STOP_FIELDS}, CanaryStop)
    terms = converted({key: value for key, value in fields.items() if key in {"share_ppm", "by"}}, CanaryTerms)
    stored = converted({key: value for key, value in fields.items() if key == "version"}, _Stored)
    rest = {key: value for key, value in fields.items() if key in FIELDS | {"tenant", "name"}}
    command = command_from(rest, tenant, name)
    return msgspec.structs.replace(command, trial=msgspec.structs.replace(terms, stop=stop), version=stored.version)
