"""A router's part of a tenant's budget of one minute: leased in blocks from a counter that all routers share.

The counter holds what is leased, never less than what routers may spend: a block counts from when the counter has moved, and
what is given back or lost on the way only ever makes it smaller for the rest of the minute. Of `asked` that moved the counter to
`total`, what lies at or below the limit is granted. What was used beyond what was granted is owed, and is paid out of the
next grants, in the next minute too.
"""

import math

_HORIZON_S = 2.0  # of demand, in one block
_IDLE_S = 2.0  # after this long without use a block is given back
_CLOSED_S = 1.0  # before a counter that was found full, or did not answer, is asked again
_LEAST = 100  # a block is at least this fraction of the limit,
_MOST = 4  # and at most this one


class Lease:
    """One tenant's, one kind's, one router's. Mutable, owned by that router; `now_s` is its own time, `minute` the shared clock's."""

    __slots__ = (
        "_closed_until_s",
        "_rate_per_s",
        "_seen_s",
        "_spent",
        "_used_s",
        "asked",
        "left",
        "limit",
        "minute",
        "owed",
        "total",
        "waiting",
    )

    def __init__(self, limit: int, minute: int, now_s: float) -> None:
        self.limit = limit
        self.minute = minute
        self.left = 0  # granted for this minute and not spent
        self.owed = 0  # used and not granted yet
        self.asked = 0  # on its way
        self.waiting = 0  # wanted by requests that wait for it
        self.total = 0  # where the counter stood when last heard
        self._closed_until_s = -math.inf
        self._rate_per_s = 0.0
        self._spent = 0
        self._seen_s = now_s
        self._used_s = now_s

    @property
    def held(self) -> int:
        """Leased by all routers, as far as is known."""
        return min(self.total, self.limit)

    def take(self, minute: int, now_s: float, amount: int) -> bool:
        if minute != self.minute:
            self._begin(minute)
        self._used_s = now_s
        if amount > self.left or self.owed:
            return False
        self.left -= amount
        self._spent += amount
        return True

    def may_come(self, amount: int, now_s: float) -> bool:
        """Whether it is of any use to wait for this amount."""
        return amount <= self.limit and (now_s >= self._closed_until_s or bool(self.asked))

    def settle(self, charged_minute: int, minute: int, charged: int, used: int) -> None:
        """What was charged in `charged_minute` turned out to be `used`. Less counts in that minute only; more is charged now."""
        if minute != self.minute:
            self._begin(minute)
        more = used - charged
        if more > 0:
            paid = min(more, self.left)
            self.left -= paid
            self.owed += more - paid
            self._spent += more
        elif charged_minute == self.minute:
            paid = min(-more, self.owed)
            self.owed -= paid
            self.left += -more - paid

    def want(self, minute: int, now_s: float) -> int:
        """The block to ask for now; 0: none."""
        if minute != self.minute:
            self._begin(minute)
        self._look(now_s)
        if self.asked or now_s < self._closed_until_s:
            return 0
        need = self.owed + self.waiting
        block = self._block()
        in_use = now_s - self._used_s <= _IDLE_S
        if not need and (not in_use or self.left * 2 > block):
            return 0
        return min(need + (block if in_use else 0), self.limit)

    def ask(self, amount: int) -> None:
        self.asked = amount

    def granted(self, minute: int, asked: int, total: int, now_s: float) -> int:
        """The counter's answer; returns what is to be given back: all of it if the minute is over."""
        if minute != self.minute:
            return asked
        self.asked = 0
        self.total = total
        got = min(asked, max(0, self.limit - (total - asked)))
        paid = min(got, self.owed)
        self.owed -= paid
        self.left += got - paid
        if got < asked:
            self._closed_until_s = now_s + _CLOSED_S
        return asked - got

    def lost(self, minute: int, now_s: float) -> None:
        """No answer came: the block may be leased, and is nobody's until the minute is over."""
        if minute == self.minute:
            self.asked = 0
            self._closed_until_s = now_s + _CLOSED_S

    def surplus(self, now_s: float) -> int:
        """What is to be given back now: all of it when idle, what is beyond need otherwise."""
        block = self._block()
        spare = self.left if now_s - self._used_s > _IDLE_S else self.left - 2 * block if self.left > _MOST * block else 0
        self.left -= spare
        return spare

    def relimit(self, limit: int) -> int:
        """Under another limit from now on; what is to be given back of the old one's block."""
        if limit == self.limit:
            return 0
        self.limit = limit
        self._closed_until_s = -math.inf
        return self.give_up()

    def give_up(self) -> int:
        left, self.left = self.left, 0
        return left

    def is_over(self, now_s: float) -> bool:
        """Nothing here is worth remembering."""
        return not (self.left or self.owed or self.asked or self.waiting) and now_s - self._used_s > 2 * _IDLE_S

    def _begin(self, minute: int) -> None:
        self.minute = minute
        self.left = self.asked = self.total = 0
        self._closed_until_s = -math.inf

    def _look(self, now_s: float) -> None:
        """Demand per second, smoothed over about one."""
        passed_s = now_s - self._seen_s
        if passed_s >= 0.05:
            weight = 1.0 - math.exp(-passed_s)
            self._rate_per_s += (self._spent / passed_s - self._rate_per_s) * weight
            self._spent = 0
            self._seen_s = now_s

    def _block(self) -> int:
        least = max(1, self.limit // _LEAST)
        return max(least, min(int(self._rate_per_s * _HORIZON_S), self.limit // _MOST))
