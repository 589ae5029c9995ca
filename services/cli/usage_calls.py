"""The Python client's part about usage."""

from collections.abc import Sequence

from services.cli.admin_http import AdminHttp
from shared.contracts.usage_query import EnginesReply, UsageReply


class UsageCalls(AdminHttp):
    def usage(
        self, begin: str = "", end: str = "", *, group_by: Sequence[str] = ("tenant",), zone: str = "UTC", tenant: str = ""
    ) -> UsageReply:
        """Between two dates of the zone or RFC 3339 times, the second not included; this month, where they are left out.

        A tenant's own key with the scope `admin` may ask for its own.
        """
        params = {"from": begin, "to": end, "group_by": ",".join(group_by), "zone": zone, "tenant": tenant}
        return self._get("/usage", UsageReply, **params)

    def engines_time(self, begin: str = "", end: str = "", *, zone: str = "UTC") -> EnginesReply:
        """Where the time of each engine went."""
        return self._get("/usage/engines", EnginesReply, **{"from": begin, "to": end, "zone": zone})
