"""What enters the engine now, what waits in its tenant's own queue, what is refused: one decision over KV cache, concurrency, seats,
prefill and fair order.

Pure: asks in, decisions out; the governor (services/worker) waits, wakes and tells. A head that its tenant's own limits keep out is
passed over; a head that the shared engine keeps out is waited for, so that nothing large starves.
"""

import heapq

from shared.policy.asks import Ask, AskState, Limit, Short, TenantTerms
from shared.policy.engine_room import EngineRoom, Full
from shared.policy.fair_order import Account, FairOrder, Least
from shared.policy.kv_ledger import Fit, KvLedger

_IDLE_KEPT = 1024  # tenants with nothing here whose counters are remembered


class TenantLine:
    """One tenant's queue and what it has in the engine. Mutable; owned by the queue."""

    __slots__ = ("account", "claim", "prefill", "running", "seats", "terms", "waiting", "waiting_requests")

    def __init__(self, account: Account, terms: TenantTerms) -> None:
        self.account = account
        self.terms = terms
        self.waiting: list[tuple[int, int, int, Ask]] = []  # rank, arrival, number, ask; those that left are dropped at the head
        self.waiting_requests = 0
        self.running = 0  # requests admitted and not finished
        self.seats = 0
        self.prefill = 0
        self.claim = 0  # blocks within its guarantee that its head waits for

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting_requests or self.seats or self.prefill or self.claim)

    def head(self) -> Ask | None:
        waiting = self.waiting
        while waiting and waiting[0][3].state is not AskState.WAITING:
            heapq.heappop(waiting)
        return waiting[0][3] if waiting else None


class AdmissionQueue:
    """`offer` a request; after it and after anything that makes room, `take` says which waiting ones enter now."""

    def __init__(self, room: EngineRoom, ledger: KvLedger, order: FairOrder) -> None:
        self.room = room
        self.ledger = ledger
        self.order = order
        self.lines: dict[str, TenantLine] = {}  # of tenants that have something here, and those that had lately
        self._terms: dict[str, TenantTerms] = {}
        self._lines_limit = 2 * _IDLE_KEPT
        self._quiet = Least()  # tenants whose head may enter for all they know, with nothing in the engine
        self._busy = Least()  # the same, with something
        self._in_engine = 0  # tenants
        self._claims = 0
        self._on_reserve = 0  # blocks of those who passed a head that waited for cache
        self._numbers = 0

    @property
    def has_waiting(self) -> bool:
        """Whether `take` may find any: a queue that only its tenant's own limits keep waiting does not count."""
        return bool(self._quiet.keys or self._busy.keys)

    def line(self, tenant_id: str) -> TenantLine:
        found = self.lines.get(tenant_id)
        if found is None:
            if len(self.lines) >= self._lines_limit:
                self._forget_idle()
            terms = self._terms.get(tenant_id, _NO_TERMS)
            account = self.order.account(tenant_id)
            account.weight = float(max(1, terms.weight))
            found = self.lines[tenant_id] = TenantLine(account, terms)
        return found

    def _forget_idle(self) -> None:
        """Those whose lines were made first, but for so many. One that comes back begins at the level of the others, as a newcomer does."""
        idle = [tenant_id for tenant_id, line in self.lines.items() if line.is_idle]
        for tenant_id in idle[: max(0, len(idle) - _IDLE_KEPT)]:
            self._park(self.lines.pop(tenant_id))
            self.order.forget(tenant_id)
        self._lines_limit = 2 * max(_IDLE_KEPT, len(self.lines))

    def set_terms(self, tenant_id: str, terms: TenantTerms) -> None:
        """Evicts nothing; what waits is decided anew by the next `take`."""
        if terms == _NO_TERMS:
            self._terms.pop(tenant_id, None)
        else:
            self._terms[tenant_id] = terms
        self.ledger.set_share(tenant_id, terms.kv)
        line = self.lines.get(tenant_id)
        if line is not None:
            line.terms = terms
            line.account.weight = float(max(1, terms.weight))
            self._ready(line)

    def offer(self, ask: Ask) -> Short | None:
        """None: it has entered (PREFILLING) or waits (WAITING). Otherwise why it is refused."""
        line = self.line(ask.tenant_id)
        fit = self.ledger.fit(ask.tenant_id, ask.all_blocks, self._claims - line.claim)
        short = self._never(line, ask, fit)
        if short is not None:
            return short
        fits = not line.waiting and self._short(line, ask, fit) is None
        at_once = fits and not self.has_waiting
        if not at_once and line.waiting_requests >= line.terms.queue_limit:
            if not fits or line.seats or not self._may_bypass(ask):  # of a tenant whose requests may not wait at all
                return Short(Limit.QUEUE, 1, line.waiting_requests, line.terms.queue_limit)
            at_once = ask.bypassed = True
        self._numbers += 1
        ask.arrival = self._numbers
        if at_once:
            self.order.lift(line.account, None)
            self._enter(line, ask)
        else:
            self._wait(line, ask)
            line.waiting_requests += 1
        return None

    def take(self) -> list[Ask]:
        """Waiting asks that have entered now, in order."""
        entered: list[Ask] = []
        aside: list[TenantLine] = []
        seats_may, room_may = True, True  # nobody earlier in the order waits for them
        while self.room.free_seats > 0:
            account = self._first(busy_may=seats_may)
            if account is None:
                break
            line = self.lines[account.tenant_id]
            ask = line.head()
            if ask is None:
                self._park(line)
                continue
            limit = self._short(line, ask, self._fit(line, ask))
            on_reserve = False
            if limit is None and not room_may and ask.leads and self.ledger.draws_on_shared(ask.tenant_id, ask.all_blocks):
                on_reserve = self._may_use_reserve(ask)
                limit = None if on_reserve else Limit.ROOM
            if limit is None and not seats_may:
                ask.bypassed = self._may_bypass(ask)
                limit = None if ask.bypassed else Limit.SEATS
            if limit is None:
                heapq.heappop(line.waiting)
                if ask.leads:
                    line.waiting_requests -= 1
                self._enter(line, ask)
                if on_reserve:
                    self._on_reserve += ask.all_blocks
                    for one in (ask, *ask.followers):
                        one.on_reserve = True
                entered.append(ask)
                continue
            self._park(line)
            if limit in _SHARED_LIMITS:
                aside.append(line)
                seats_may = seats_may and limit is Limit.ROOM
                room_may = room_may and limit is not Limit.ROOM
                if limit is Limit.ROOM:
                    self._claim(line, ask)
        for line in aside:
            (self._busy if line.seats else self._quiet).add(line.account)
        return entered

    def waits_for(self, ask: Ask) -> Short:
        """What keeps a waiting ask out now, with figures as told to its client."""
        line = self.line(ask.tenant_id)
        head = line.head() or ask
        return self._figures(line, ask, self._short(line, head, self._fit(line, head)) or Limit.QUEUE)

    def prefilled(self, ask: Ask) -> None:
        """Its first token is there. Idempotent."""
        if ask.state is AskState.PREFILLING:
            ask.state = AskState.DECODING
            self.room.prefilled(ask.prefill)
            line = self.lines[ask.tenant_id]
            line.prefill -= ask.prefill

    def leave(self, ask: Ask, cached_tokens: int = 0, output_tokens: int = 0) -> int:
        """It is out of the engine, or will not enter it; the blocks that it gave back. Idempotent."""
        line = self.lines.get(ask.tenant_id)
        if line is None:  # it left long ago, and its tenant had nothing here since
            return 0
        if ask.state is AskState.WAITING:
            ask.state = AskState.LEFT
            if ask.leads:
                line.waiting_requests -= 1
            self._claims -= line.claim
            line.claim = 0
        elif ask.state in (AskState.PREFILLING, AskState.DECODING):
            self.prefilled(ask)
            ask.state = AskState.LEFT
            self.room.leave(ask.seats)
            self.room.bypass -= ask.seats if ask.bypassed else 0
            line.seats -= ask.seats
            if line.seats == 0:
                self._in_engine -= 1
            self.order.settle(line.account, ask.charged, ask.prompt_tokens, min(cached_tokens, ask.prompt_tokens), output_tokens)
        freed = self.ledger.release(ask.key)
        if ask.on_reserve:
            ask.on_reserve = False
            self._on_reserve -= freed
        self._ready(line)
        return freed

    def finish(self, first: Ask) -> int:
        """The request is over: whatever is left of it leaves, and it is no more one of its tenant's concurrent ones; the blocks that it
        gave back. Idempotent."""
        freed = 0
        for ask in (first, *first.followers) if first.followers else (first,):
            if ask.state is not AskState.LEFT:
                freed += self.leave(ask)
        if first.counted:
            first.counted = False
            line = self.lines[first.tenant_id]
            line.running -= 1
            self._ready(line)
        return freed

    def _may_bypass(self, ask: Ask) -> bool:
        return self.room.bypass + ask.seats <= self.room.shape.reserved_seats

    def _may_use_reserve(self, ask: Ask) -> bool:
        """A tenant that holds nothing passes a head that waits for cache, within what is kept for such: the head never gets that."""
        return self.ledger.held_by(ask.tenant_id) == 0 and self._on_reserve + ask.all_blocks <= self.ledger.reserved

    def _fit(self, line: TenantLine, ask: Ask) -> Fit:
        return self.ledger.fit(ask.tenant_id, ask.all_blocks, self._claims - line.claim) if ask.leads else Fit.NOW

    def _never(self, line: TenantLine, ask: Ask, fit: Fit) -> Short | None:
        if ask.most_seats > self.room.most_seats:
            return Short(Limit.SEATS, ask.most_seats, line.seats, self.room.most_seats, never=True)
        if line.terms.most_concurrent is not None and line.terms.most_concurrent < 1:
            return Short(Limit.CONCURRENT, 1, line.running, line.terms.most_concurrent, never=True)
        if fit is Fit.NEVER:
            return Short(Limit.KV, ask.all_blocks, self.ledger.held_by(ask.tenant_id), self.ledger.limit_of(ask.tenant_id), never=True)
        return None

    def _short(self, line: TenantLine, ask: Ask, fit: Fit) -> Limit | None:
        """What keeps the ask out now, were it next."""
        if ask.leads:
            concurrent = line.terms.concurrent
            if concurrent is not None and line.running >= concurrent:
                return Limit.CONCURRENT
            if fit is not Fit.NOW:
                return Limit.ROOM if fit is Fit.ROOM_FULL else Limit.KV
        alone = self._in_engine == (1 if line.seats else 0)
        full = self.room.full(ask.seats, ask.prefill, tenant_seats=line.seats, tenant_prefill=line.prefill, alone=alone)
        if full is None:
            return None
        return Limit.SEATS if full is Full.SEATS else Limit.PREFILL

    def _figures(self, line: TenantLine, ask: Ask, limit: Limit) -> Short:
        ledger, room = self.ledger, self.room
        if limit is Limit.KV:
            return Short(limit, ask.all_blocks, ledger.held_by(ask.tenant_id), ledger.limit_of(ask.tenant_id))
        if limit is Limit.ROOM:
            return Short(limit, ask.all_blocks, ledger.held_by(ask.tenant_id), ledger.blocks)
        if limit is Limit.CONCURRENT:
            return Short(limit, 1, line.running, line.terms.concurrent or 0)
        if limit is Limit.SEATS:
            return Short(limit, ask.seats, line.seats, room.shape.seats)
        if limit is Limit.PREFILL:
            return Short(limit, ask.prefill, line.prefill, room.shape.step_tokens)
        return Short(limit, 1, line.waiting_requests, line.terms.queue_limit)

    def _enter(self, line: TenantLine, ask: Ask) -> None:
        self._claims -= line.claim
        line.claim = 0
        if ask.leads:
            self.ledger.reserve(ask.key, ask.tenant_id, ask.kv_blocks)
            for one in ask.followers:
                self.ledger.reserve(one.key, ask.tenant_id, one.kv_blocks)
            ask.counted = True
            line.running += 1
        ask.charged = self.order.charge(line.account, ask.prompt_tokens, ask.max_new_tokens)
        ask.state = AskState.PREFILLING
        self.room.enter(ask.seats, ask.prefill)
        self.room.bypass += ask.seats if ask.bypassed else 0
        if line.seats == 0:
            self._in_engine += 1
        line.seats += ask.seats
        line.prefill += ask.prefill
        for one in ask.followers:
            one.arrival = ask.arrival
            self._wait(line, one)
        if line.waiting:
            self._ready(line)

    def _wait(self, line: TenantLine, ask: Ask) -> None:
        ask.state = AskState.WAITING
        self._numbers += 1
        heapq.heappush(line.waiting, (ask.rank, ask.arrival, self._numbers, ask))
        self._ready(line)

    def _claim(self, line: TenantLine, ask: Ask) -> None:
        """What waits within its tenant's guarantee is no more lent to others."""
        if not line.claim and not self.ledger.draws_on_shared(ask.tenant_id, ask.all_blocks):
            line.claim = ask.all_blocks
            self._claims += line.claim

    def _first(self, *, busy_may: bool = True) -> Account | None:
        best = self._quiet.first()
        if busy_may:
            busy = self._busy.first()
            if best is None or (busy is not None and (busy.counter, busy.place) < (best.counter, best.place)):
                best = busy
        return best

    def _ready(self, line: TenantLine) -> None:
        """Its head is looked at by the next `take`."""
        if not line.waiting:
            return
        if line.head() is None:
            self._park(line)
            return
        account = line.account
        here, there = (self._busy, self._quiet) if line.seats else (self._quiet, self._busy)
        if account.tenant_id in there.keys:
            there.discard(account)
        elif account.tenant_id not in here.keys:
            first = self._first()
            self.order.lift(account, first.counter if first is not None else None)
        here.add(account)
        here.lowered(account)

    def _park(self, line: TenantLine) -> None:
        """Until something of its own changes."""
        self._quiet.discard(line.account)
        self._busy.discard(line.account)


_NO_TERMS = TenantTerms()
_SHARED_LIMITS = frozenset({Limit.ROOM, Limit.SEATS, Limit.PREFILL})
