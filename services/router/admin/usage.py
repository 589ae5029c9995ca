"""Usage: what tenants used, by whatever it is asked by, and where the engines' time went."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from services.router.admin.answers import TextInQuery, answer
from services.router.admin.registry_client import RegistryClient
from services.router.admin.tenant_door import tenant_of
from services.router.routes import RouteTable
from shared.contracts.usage_query import EngineRow, GetEngines, GetUsage, UsageRow
from shared.errors import NotFound
from shared.policy.periods import begin_of_day, day_at, moment, zone_of
from shared.policy.usage_figures import engine_figures, figures, labels

_DAY_MS = 86_400_000

FromInQuery = Annotated[str, Query(alias="from", max_length=64, description="A date, or RFC 3339; left out: the month's first day.")]
ToInQuery = Annotated[str, Query(alias="to", max_length=64, description="Not included; left out: the end of today.")]


def make_routes(registry: RegistryClient, table: RouteTable) -> APIRouter:
    routes = APIRouter(tags=["usage"])

    def span(begin: str, end: str, zone_name: str) -> tuple[int, int]:
        zone = zone_of(zone_name)
        today = day_at(round(table.clock.unix_s() * 1000), zone)
        from_ms = moment(begin, zone, "from") if begin else begin_of_day(today.replace(day=1), zone)
        to_ms = moment(end, zone, "to") if end else begin_of_day(day_at(begin_of_day(today, zone) + _DAY_MS * 3 // 2, zone), zone)
        return from_ms, to_ms

    @routes.get("/usage")
    async def usage(
        request: Request,
        begin: FromInQuery = "",
        end: ToInQuery = "",
        group_by: Annotated[str, Query(max_length=64, description="Some of day, tenant, adapter, version, key, with commas.")] = "tenant",
        zone: Annotated[str, Query(max_length=64, description="Whose midnights part days.")] = "UTC",
        tenant: TextInQuery = "",
    ) -> Response:
        """Takes a tenant's own key too, with the scope `admin`: then of that tenant alone."""
        own = tenant_of(request.scope)
        if own and tenant not in ("", own):
            raise NotFound("there is nothing of that name, or this key may not see it")
        from_ms, to_ms = span(begin, end, zone)
        groups = tuple(part.strip() for part in group_by.split(",") if part.strip())
        asked = GetUsage(from_ms=from_ms, to_ms=to_ms, group_by=groups, zone=zone, tenant=own or tenant, own=bool(own))
        found: dict[str, Any] = await registry.ask(asked)
        rows = msgspec.convert(found["rows"], list[UsageRow])
        shown = [msgspec.to_builtins(row) | {"shown": labels(row, tuple(found["group_by"])) | figures(row.amounts)} for row in rows]
        return answer(found | {"rows": shown})

    @routes.get("/usage/engines")
    async def engines(begin: FromInQuery = "", end: ToInQuery = "", zone: TextInQuery = "UTC") -> Response:
        from_ms, to_ms = span(begin, end, zone)
        found: dict[str, Any] = await registry.ask(GetEngines(from_ms=from_ms, to_ms=to_ms))
        rows = msgspec.convert(found["rows"], list[EngineRow])
        return answer(found | {"rows": [msgspec.to_builtins(row) | {"shown": engine_figures(row)} for row in rows]})

    return routes
