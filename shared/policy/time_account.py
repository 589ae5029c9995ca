"""Where an engine's time went: intervals as they were measured, in any order, each moment counted once. Pure.

A moment in which a step computes is busy, whatever else happens then (steps overlap with the scheduling of the next one); otherwise it
is the overhead of the span that began last; otherwise it is idle, if it was measured as such. What nothing covers is unaccounted.
"""

BUSY = "busy"
IDLE = "idle"

_Interval = tuple[int, int, str]  # start and end in nanoseconds, name


class TimeAccount:
    """From `began_ns` on; one clock that does not go back."""

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.until_ns = began_ns
        self.busy_ns = 0
        self.idle_ns = 0
        self.overhead_ns: dict[str, int] = {}
        self._open: list[_Interval] = []

    @property
    def wall_ns(self) -> int:
        return self.until_ns - self.began_ns

    @property
    def unaccounted_ns(self) -> int:
        return self.wall_ns - self.busy_ns - self.idle_ns - sum(self.overhead_ns.values())

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """What lies before `until_ns` is too late and counts no more."""
        start_ns = max(start_ns, self.until_ns)
        if end_ns > start_ns:
            self._open.append((start_ns, end_ns, name))

    def close(self, until_ns: int) -> None:
        """Everything until then has been told: counts it."""
        if until_ns <= self.until_ns:
            return
        intervals = sorted(self._open)
        edges = sorted({until_ns, *(edge for start, end, _ in intervals for edge in (start, end) if edge < until_ns)})
        here_ns = self.until_ns
        active: list[_Interval] = []
        coming = 0
        for edge_ns in edges:
            active = [one for one in active if one[1] > here_ns]
            while coming < len(intervals) and intervals[coming][0] <= here_ns:
                if intervals[coming][1] > here_ns:
                    active.append(intervals[coming])
                coming += 1
            if active and edge_ns > here_ns:
                self._count(active, edge_ns - here_ns)
            here_ns = max(here_ns, edge_ns)
        self._open = [(max(start, until_ns), end, name) for start, end, name in intervals if end > until_ns]
        self.until_ns = until_ns

    def _count(self, active: list[_Interval], size_ns: int) -> None:
        name = IDLE
        for _, _, one in active:  # by start: the last overhead began last
            if one == BUSY:
                self.busy_ns += size_ns
                return
            if one != IDLE:
                name = one
        if name == IDLE:
            self.idle_ns += size_ns
        else:
            self.overhead_ns[name] = self.overhead_ns.get(name, 0) + size_ns
