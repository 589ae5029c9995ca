"""Requests and tokens per minute: charged to leases in memory, which are taken from the cluster's counters in blocks ahead of need,
each minute's first block before the minute begins.

A request waits only where its tenant has not asked this router for minutes, where its budget is so small that it is leased request by
request, or where this router's lease is spent and more may be had; and then at most for one answer of the bus. A router that cannot
reach the counters serves from what it holds, then refuses.
"""

import asyncio
from collections import deque
from zlib import crc32

import msgspec
import structlog

from services.router.charge import Charge
from services.router.clock import ClusterClock
from services.router.dispatch import Dispatcher
from services.router.metrics import Metrics
from shared.bus import INCREMENT_HEADER, BusUnavailable, Message, decode_moved
from shared.contracts.rates import REQUESTS, TOKENS, rate_subject
from shared.contracts.tenancy import TenantLimits
from shared.errors import RequestRateExceeded, TenantryError, TokenRateExceeded
from shared.policy.rate_budget import Lease

log = structlog.get_logger()

_TICK_S = 0.1
_WAIT_S = 0.25  # of a request for a block
_LOST_S = 2.0  # after which an ask is taken for lost
_FORGET_S = 30.0  # after which a late answer is not looked for any more
_AHEAD_S = (1.0, 6.0)  # before a minute's end, one tenant earlier and the other later, its next block is asked for


class _Ask(msgspec.Struct):
    """A block on its way. `tenant_id`, `kind` name the counter."""

    tenant_id: str
    kind: str
    minute: int
    amount: int
    sent_s: float
    lost: bool = False


class Account:
    """One tenant's budget of one kind, here."""

    __slots__ = ("ahead_s", "kind", "lease", "tenant_id", "waiters")

    def __init__(self, tenant_id: str, kind: str, lease: Lease) -> None:
        self.tenant_id = tenant_id
        self.kind = kind
        self.lease = lease
        self.ahead_s = _AHEAD_S[0] + crc32(tenant_id.encode()) / 2**32 * (_AHEAD_S[1] - _AHEAD_S[0])
        self.waiters: deque[asyncio.Future[None]] = deque()


class Rates:
    def __init__(self, dispatcher: Dispatcher, clock: ClusterClock, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._metrics = metrics
        self._requests: dict[str, Account] = {}  # by tenant_id
        self._tokens: dict[str, Account] = {}
        self._accounts = {REQUESTS: self._requests, TOKENS: self._tokens}
        self._minute_now = 0
        self._minute_until_s = -1.0  # until then it need not be asked again
        self._asks: dict[str, _Ask] = {}  # by number
        self._returns: dict[tuple[str, str, int], int] = {}  # by counter
        self._number = 0
        self.lost_blocks = 0  # asks without an answer: what they asked for is nobody's in that minute
        self._stopping = False
        dispatcher.on_side("rate", self._answered)

    async def admit(self, tenant_id: str, limits: TenantLimits, tokens: int, now_s: float) -> Charge | None:
        """Charges one request and `tokens`; None where the tenant has no budget of tokens.

        :raises RequestRateExceeded: :raises TokenRateExceeded: nothing is charged then.
        """
        minute = self._minute(now_s)
        requests_limit = limits.requests_per_minute
        if requests_limit is not None:
            account = self._requests.get(tenant_id)
            if account is None or account.lease.limit != requests_limit:
                account = self._account(REQUESTS, tenant_id, requests_limit, now_s)
            if not account.lease.take(minute, now_s, 1):
                await self._wait(account, 1)
        tokens_limit = limits.tokens_per_minute
        if tokens_limit is None:
            return None
        account = self._tokens.get(tenant_id)
        if account is None or account.lease.limit != tokens_limit:
            account = self._account(TOKENS, tenant_id, tokens_limit, now_s)
        if not account.lease.take(minute, now_s, tokens):
            try:
                await self._wait(account, tokens)
            except TenantryError:
                if requests_limit is not None:
                    requests = self._account(REQUESTS, tenant_id, requests_limit, now_s)
                    requests.lease.settle(minute, self._minute(now_s), 1, 0)
                raise
        return Charge(tenant_id, tokens_limit, account.lease.minute, tokens)

    def settle(self, charge: Charge, used: int, now_s: float) -> None:
        """`used` tokens, in the end. Once per charge."""
        account = self._tokens.get(charge.tenant_id)
        if account is None:  # forgotten while a long request ran
            account = self._account(TOKENS, charge.tenant_id, charge.limit, now_s)
        account.lease.settle(charge.minute, self._minute(now_s), charge.tokens, used)

    async def run(self) -> None:
        """Until `stop`: blocks ahead of need, and back what is not needed."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            await asyncio.sleep(_TICK_S)
            try:
                await self._tend(loop.time())
            except BusUnavailable as error:
                log.warning("rates.not_sent", error=error.message)

    async def stop(self) -> None:
        """Everything unspent goes back to the other routers."""
        self._stopping = True
        for accounts in self._accounts.values():
            for account in accounts.values():
                self._give_up(account)
        try:
            await self._send_returns(asyncio.get_running_loop().time())
        except BusUnavailable as error:
            log.warning("rates.not_given_back", error=error.message)

    @property
    def leased(self) -> int:
        """Accounts that this router holds something of."""
        return sum(len(accounts) for accounts in self._accounts.values())

    def account(self, kind: str, tenant_id: str) -> "Account | None":
        """What this router holds of one budget."""
        return self._accounts[kind].get(tenant_id)

    def _minute(self, now_s: float) -> int:
        """Of the shared clock."""
        if now_s >= self._minute_until_s:
            unix_s = self._clock.unix_s()
            self._minute_now = int(unix_s // 60)
            self._minute_until_s = now_s + min(_TICK_S, 60.0 - unix_s % 60.0)
        return self._minute_now

    def _account(self, kind: str, tenant_id: str, limit: int, now_s: float) -> Account:
        """Made, or under another limit from now on."""
        account = self._accounts[kind].get(tenant_id)
        if account is None:
            account = self._accounts[kind][tenant_id] = Account(tenant_id, kind, Lease(limit, self._minute(now_s), now_s))
        elif account.lease.limit != limit:
            self._give_up(account)
            account.lease.relimit(limit)
        return account

    def _give_up(self, account: Account) -> None:
        lease = account.lease
        self._return(account.tenant_id, account.kind, lease.minute, lease.give_up())
        self._return(account.tenant_id, account.kind, lease.minute + 1, lease.give_up_ahead())

    async def _wait(self, account: Account, amount: int) -> None:
        """Until the amount is taken.

        :raises RequestRateExceeded: :raises TokenRateExceeded: it cannot be had in this minute, or not in time.
        """
        loop = asyncio.get_running_loop()
        lease = account.lease
        until_s = loop.time() + _WAIT_S
        while True:
            now_s = loop.time()
            if now_s >= until_s or self._stopping or not self._dispatcher.bus.connected or not lease.may_come(amount, now_s):
                raise self._refusal(account, amount)
            waiter: asyncio.Future[None] = loop.create_future()
            account.waiters.append(waiter)
            lease.waiting += amount
            try:
                await self._ask_for(account, now_s)
                async with asyncio.timeout(until_s - now_s):
                    await waiter
            except TimeoutError:
                pass
            except BusUnavailable:
                raise self._refusal(account, amount) from None
            finally:
                lease.waiting -= amount
                if waiter in account.waiters:
                    account.waiters.remove(waiter)
            now_s = loop.time()
            if lease.take(self._minute(now_s), now_s, amount):
                return

    def _refusal(self, account: Account, amount: int) -> TenantryError:
        lease = account.lease
        self._metrics.rate_refusals[account.kind] = self._metrics.rate_refusals.get(account.kind, 0) + 1
        retry_after_s = round(60.0 - self._clock.unix_s() % 60.0, 3)
        fields = {"asked": amount, "held": lease.held, "limit": lease.limit, "retry_after_s": retry_after_s}
        if account.kind == REQUESTS:
            return RequestRateExceeded(f"the tenant's {lease.limit} requests of this minute are used up", **fields)
        if amount > lease.limit:
            return TokenRateExceeded(
                f"the request may take {amount} tokens, more than the tenant's {lease.limit} of a whole minute: ask for fewer", **fields
            )
        return TokenRateExceeded(
            f"the request may take {amount} tokens; {lease.held} of the tenant's {lease.limit} of this minute are taken", **fields
        )

    async def _tend(self, now_s: float) -> None:
        for number in [number for number, ask in self._asks.items() if now_s - ask.sent_s > _LOST_S]:
            self._give_up_on(number, now_s)
        if self._stopping:
            return
        minute = self._minute(now_s)
        left_s = 60.0 - self._clock.unix_s() % 60.0
        connected = self._dispatcher.bus.connected
        for accounts in self._accounts.values():
            for account in list(accounts.values()):
                lease = account.lease
                if connected:
                    await self._ask_for(account, now_s)
                    if left_s <= account.ahead_s:
                        await self._ask_ahead(account, now_s)
                    self._return(account.tenant_id, account.kind, minute, lease.surplus(now_s))
                if lease.is_over(now_s):
                    del accounts[account.tenant_id]
        if connected:
            await self._send_returns(now_s)

    async def _ask_for(self, account: Account, now_s: float) -> None:
        """A block, if one is wanted and none is on its way."""
        minute = self._minute(now_s)
        amount = account.lease.want(minute, now_s)
        if not amount:
            return
        account.lease.ask(amount)
        await self._send_ask(account, minute, amount, now_s)

    async def _ask_ahead(self, account: Account, now_s: float) -> None:
        """What the next minute begins with, once."""
        minute = self._minute(now_s)
        amount = account.lease.want_ahead(minute, now_s)
        if amount:
            account.lease.ask_ahead(amount)
            await self._send_ask(account, minute + 1, amount, now_s)

    async def _send_ask(self, account: Account, minute: int, amount: int, now_s: float) -> None:
        self._number += 1
        number = str(self._number)
        self._asks[number] = _Ask(account.tenant_id, account.kind, minute, amount, now_s)
        reply = self._dispatcher.side_subject("rate", number)
        await self._move(account.tenant_id, account.kind, minute, amount, reply)

    def _return(self, tenant_id: str, kind: str, minute: int, amount: int) -> None:
        """Goes back with the next tick, if the minute is not over then."""
        if amount:
            counter = (tenant_id, kind, minute)
            self._returns[counter] = self._returns.get(counter, 0) + amount

    async def _send_returns(self, now_s: float) -> None:
        """Each once and never again: twice would be a gain."""
        returns, self._returns = self._returns, {}
        this_minute = self._minute(now_s)
        for (tenant_id, kind, minute), amount in returns.items():
            if minute in (this_minute, this_minute + 1):
                await self._move(tenant_id, kind, minute, -amount)

    async def _move(self, tenant_id: str, kind: str, minute: int, amount: int, reply: str = "") -> None:
        subject = rate_subject(tenant_id, kind, minute)
        await self._dispatcher.bus.publish(subject, b"", reply, {INCREMENT_HEADER: f"{amount:+d}"})

    def _give_up_on(self, number: str, now_s: float) -> None:
        ask = self._asks[number]
        if now_s - ask.sent_s > _FORGET_S:
            del self._asks[number]
        if ask.lost:
            return
        ask.lost = True
        self.lost_blocks += 1
        account = self._accounts[ask.kind].get(ask.tenant_id)
        if account is not None:
            account.lease.lost(ask.minute, now_s)
            self._wake(account)
        log.warning("rates.no_answer", tenant_id=ask.tenant_id, kind=ask.kind, amount=ask.amount)

    def _answered(self, number: str, message: Message) -> None:
        ask = self._asks.get(number)
        if ask is None:
            return
        now_s = asyncio.get_running_loop().time()
        try:
            moved = decode_moved(message.data) if message.status != "503" else None
        except msgspec.MsgspecError as error:
            log.warning("rates.answer_unreadable", error=str(error))
            moved = None
        if moved is None or moved.error is not None or not moved.val:  # the counter did not move, or nobody knows
            self._give_up_on(number, now_s)
            self._asks.pop(number, None)
            return
        del self._asks[number]
        account = self._accounts[ask.kind].get(ask.tenant_id)
        back = ask.amount
        if account is not None and not ask.lost:
            back = account.lease.granted(ask.minute, ask.amount, int(moved.val), now_s)
            self._wake(account)
        self._return(ask.tenant_id, ask.kind, ask.minute, back)

    def _wake(self, account: Account) -> None:
        for waiter in account.waiters:
            if not waiter.done():
                waiter.set_result(None)
