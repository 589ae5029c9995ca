"""What counters that only grow say of the last seconds: differences against earlier readings, of which a bounded number is kept."""

from collections import deque

from shared.policy.canary_stop import Counts, since

_READINGS = 120  # over one window


class Readings:
    """One router's counters of one version. `number` tells how often they were told before: 0 means that they began with us.

    Of counters that were told before we listened, what they already held is not ours to judge.
    """

    def __init__(self, at_s: float, counts: Counts, number: int) -> None:
        self._earlier: deque[tuple[float, Counts]] = deque([(at_s, Counts() if number == 0 else counts)])
        self._newest = counts
        self._number = number
        self.at_s = at_s

    def read(self, at_s: float, counts: Counts, number: int, window_s: float) -> None:
        """One that comes late or twice says nothing."""
        if number <= self._number:
            return
        if at_s - self._earlier[-1][0] >= window_s / _READINGS:
            self._earlier.append((self.at_s, self._newest))
        while len(self._earlier) > 1 and self._earlier[1][0] <= at_s - window_s:
            self._earlier.popleft()
        self._newest, self._number, self.at_s = counts, number, at_s

    def over(self, from_s: float) -> Counts:
        """What was told after from_s, and at most a reading's distance before."""
        if self.at_s <= from_s:
            return Counts()
        before = self._earlier[0][1]
        for at_s, reading in self._earlier:
            if at_s > from_s:
                break
            before = reading
        return since(self._newest, before)
