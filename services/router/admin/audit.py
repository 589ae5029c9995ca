"""What was done, by whom, from where."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response

from services.router.admin.answers import NameInPath, TextInQuery, answer
from services.router.admin.registry_client import RegistryClient
from shared.contracts.audit import ListAudit

_READS_S = 5.0  # besides the registry's own answer: a page of a long stream

Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int, Query(ge=0, le=2**63 - 1)]


def make_routes(registry: RegistryClient) -> APIRouter:
    routes = APIRouter(tags=["audit"])

    @routes.get("/audit")
    async def list_audit(
        tenant: TextInQuery = "",
        action: TextInQuery = "",
        since: TextInQuery = "",
        until: TextInQuery = "",
        after: After = 0,
        limit: Limit = 100,
    ) -> Response:
        """A page, oldest first. `next`, unless it is 0, is the `after` of the following one. `action` may end in `*`."""
        asked = ListAudit(tenant=tenant, action=action, since=since, until=until, after=after, limit=limit)
        return answer(await registry.ask(asked, _READS_S))

    @routes.get("/audit/{tenant}")
    async def list_audit_of(
        tenant: NameInPath, action: TextInQuery = "", since: TextInQuery = "", until: TextInQuery = "", after: After = 0, limit: Limit = 100
    ) -> Response:
        """As above, as the tenant itself sees it. This path takes its own key too, with the scope `admin`."""
        asked = ListAudit(tenant=tenant, own=True, action=action, since=since, until=until, after=after, limit=limit)
        return answer(await registry.ask(asked, _READS_S))

    return routes
