"""How long each thing has looked the same, as this process has seen it."""

from collections.abc import Hashable


class Standstill:
    """How long each thing has looked the same, by this process's monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def for_s(self, key: str, looks: Hashable, now_s: float) -> float:
        known = self._seen.get(key)
        if known is None or known[0] != looks:
            self._seen[key] = (looks, now_s)
            return 0.0
        return now_s - known[1]

    def again(self, key: str, now_s: float) -> None:
        """Counts from now."""
        self._seen[key] = (self._seen[key][0], now_s)

    def keep(self, keys: set[str]) -> None:
        self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
