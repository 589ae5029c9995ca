"""How much of one router a tenant may take at once: requests that stand in it, whatever they wait for."""

from shared.errors import Overloaded


class Crowd:
    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._inside: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """:raises Overloaded: as many of the tenant's are inside as may be."""
        held = self._inside.get(tenant, 0)
        if held >= self._limit:
            raise Overloaded(
                f"{held} {self._what} of this tenant are in this router already", asked=1, held=held, allowed=self._limit, retry_after_s=1.0
            )
        self._inside[tenant] = held + 1

    def leave(self, tenant: str) -> None:
        """Once for every `enter`."""
        held = self._inside[tenant] - 1
        if held:
            self._inside[tenant] = held
        else:
            del self._inside[tenant]
