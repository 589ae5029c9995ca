"""A router's part of a tenant's budget of one minute: leased in blocks from a counter that all routers share.

The counter holds what is leased, never less than what routers may spend: a block counts from when the counter has moved, and
what is given back or lost on the way only ever makes it smaller for the rest of the minute. Of `asked` that moved the counter to
`total`, what lies at or below the limit is granted. What was used beyond what was granted is owed, and is paid out of the
next grants, in the next minute too.

What the next minute begins with is leased before it begins, and what an idle router keeps is as much as one more request like its
last ones takes, so that requests do not wait; a budget of few requests is leased one by one instead, so that no router sits on it.
"""

import math

_HORIZON_S = 2.0  # of demand, in one block
_IDLE_S = 2.0  # after this long without use a block is given back, but for the standing part
_REMEMBER_S = 300.0  # after this long that too
_STANDING = 16  # requests like the last ones that a minute must allow for one to be kept at hand
_CLOSED_S = 1.0  # before a counter that was found full, or did not answer, is asked again
_LEAST = 100  # a block is at least this fraction of the limit,
_MOST = 4  # and at most this one


class Lease:
    """One tenant's, one kind's, one router's. Mutable, owned by that router; `now_s` is its own time, `minute` the shared clock's."""

    __slots__ = (
        "_asked_ahead",
        "_closed_until_s",
        "_rate_per_s",
        "_seen_s",
        "_spent",
        "_used_s",
        "_usual",
        "ahead",
        "ahead_total",
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
        self.ahead = 0  # granted for the next minute
        self.ahead_total = 0
        self._asked_ahead = 0  # of the next minute's counter, and on its way
        self._usual = 0  # what a request takes lately
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
        self._usual = max(amount, self._usual - (self._usual - amount) // 8)
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
        if now_s - self._used_s <= _IDLE_S:
            block = self._block()
            return min(need + block, self.limit) if need or self.left * 2 <= block else 0
        return min(need + max(0, self._standing(now_s) - self.left), self.limit)

    def want_ahead(self, minute: int, now_s: float) -> int:
        """What to ask of the next minute's counter, shortly before it begins; once."""
        if minute != self.minute:
            self._begin(minute)
        self._look(now_s)
        if self._asked_ahead or self.ahead or self.ahead_total:
            return 0
        first = self._block() if now_s - self._used_s <= _IDLE_S else self._standing(now_s)
        return min(self.owed + first, self.limit) if first else 0

    def ask(self, amount: int) -> None:
        self.asked = amount

    def ask_ahead(self, amount: int) -> None:
        self._asked_ahead = amount

    def granted(self, minute: int, asked: int, total: int, now_s: float) -> int:
        """The counter's answer; returns what is to be given back: all of it if the minute is over."""
        got = min(asked, max(0, self.limit - (total - asked)))
        if minute == self.minute + 1:
            self._asked_ahead = 0
            self.ahead, self.ahead_total = got, total
            return asked - got
        if minute != self.minute:
            return asked
        self.asked = 0
        self.total = total
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
        elif minute == self.minute + 1:
            self._asked_ahead = 0
            self.ahead_total = 1  # is not asked a second time before that minute

    def surplus(self, now_s: float) -> int:
        """What is to be given back now: when idle all but the standing part, what is beyond need otherwise."""
        if now_s - self._used_s > _IDLE_S:
            spare = max(0, self.left - self._standing(now_s))
        else:
            block = self._block()
            spare = self.left - 2 * block if self.left > _MOST * block else 0
        self.left -= spare
        return spare

    def relimit(self, limit: int) -> int:
        """Under another limit from now on; what is to be given back of the old one's block (`give_up_ahead`: of the next minute's)."""
        if limit == self.limit:
            return 0
        self.limit = limit
        self._closed_until_s = -math.inf
        return self.give_up()

    def give_up(self) -> int:
        left, self.left = self.left, 0
        return left

    def give_up_ahead(self) -> int:
        ahead, self.ahead = self.ahead, 0
        return ahead

    def left_in(self, minute: int) -> int:
        """Granted for that minute and not spent."""
        return self.left if minute == self.minute else self.ahead if minute == self.minute + 1 else 0

    def is_over(self, now_s: float) -> bool:
        """Nothing here is worth remembering."""
        if self.left or self.ahead or self.owed or self.asked or self.waiting:
            return False
        return now_s - self._used_s > (_REMEMBER_S if self._standing(now_s) else 2 * _IDLE_S)

    def _begin(self, minute: int) -> None:
        if minute == self.minute + 1:
            paid = min(self.ahead, self.owed)
            self.owed -= paid
            self.left, self.total, self.asked = self.ahead - paid, self.ahead_total, self._asked_ahead
        else:
            self.left = self.asked = self.total = 0
        self.minute = minute
        self.ahead = self.ahead_total = self._asked_ahead = 0
        self._closed_until_s = -math.inf

    def _standing(self, now_s: float) -> int:
        """Kept at hand while nobody asks: enough for one more request like the last ones."""
        return self._usual if self._usual * _STANDING <= self.limit and now_s - self._used_s <= _REMEMBER_S else 0

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
        return max(least, min(max(int(self._rate_per_s * _HORIZON_S), 2 * self._usual), self.limit // _MOST))
