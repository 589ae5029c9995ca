"""How many changes a minute a tenant may ask one process for: each leaves records that nobody can take away again."""

from shared.errors import Overloaded

_MINUTE_S = 60.0


class Pace:
    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._begun_s = 0.0
        self._asked: dict[str, int] = {}  # in the minute that began then

    def take(self, tenant: str, now_s: float) -> None:
        """:raises Overloaded: asked, allowed, retry_after_s."""
        if now_s - self._begun_s >= _MINUTE_S:
            self._begun_s, self._asked = now_s, {}
        asked = self._asked.get(tenant, 0) + 1
        if asked > self._per_minute:
            left_s = self._begun_s + _MINUTE_S - now_s
            raise Overloaded(
                f"{self._per_minute} changes a minute are taken of one tenant", asked=asked, allowed=self._per_minute, retry_after_s=left_s
            )
        self._asked[tenant] = asked
