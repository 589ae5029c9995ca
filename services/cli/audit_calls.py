"""The Python client's part about what was done."""

from services.cli.admin_http import AdminHttp
from shared.contracts.audit import AuditPage


class AuditCalls(AdminHttp):
    def audit(
        self,
        tenant: str = "",
        *,
        own: bool = False,
        action: str = "",
        since: str = "",
        until: str = "",
        after: int = 0,
        limit: int = 100,
    ) -> AuditPage:
        """A page, oldest first; its `next`, unless it is 0, is the following one's `after`.

        `own`: as the tenant sees it, which its own key with the scope `admin` may ask too. `action`: one, or a beginning followed by `*`.
        `since`, `until`: RFC 3339.
        """
        path = f"/audit/{tenant}" if own else "/audit"
        named = "" if own else tenant
        return self._get(path, AuditPage, tenant=named, action=action, since=since, until=until, after=after or "", limit=limit)
