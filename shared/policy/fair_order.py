"""Who is next among tenants: a weighted virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

Pure. Every tenant's counter grows by the service it gets divided by its weight; the least counter is next. What may enter at
all is admission_queue.py's.
"""

import heapq

import msgspec

_STALE_LIMIT = 64
_FIRST_GUESS = 256.0  # output tokens
_LATELY = 0.125


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Service per token. An output token costs about two prompt tokens (that paper's ratio), a cached one next to nothing."""

    prompt: float = 1.0
    cached: float = 0.1
    output: float = 2.0


PRICE = Price()


class Account:
    """One tenant's counter. Mutable; the hot path adds to `counter` itself through `Account.serve`."""

    __slots__ = ("counter", "mean_output", "place", "tenant_id", "weight")

    def __init__(self, tenant_id: str, place: int = 0) -> None:
        self.tenant_id = tenant_id
        self.place = place  # between equals
        self.weight = 1.0
        self.counter = 0.0
        self.mean_output = _FIRST_GUESS  # tokens per prompt lately: what an admission is charged ahead

    def serve(self, service: float) -> None:
        self.counter += service / self.weight


class Least:
    """A set of accounts of which the one with the least counter can be had, though counters change while they are in it.

    An entry whose counter has grown is put right when it comes to the top; one whose counter has fallen needs `lowered`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Account]] = []
        self.keys: dict[str, tuple[float, int]] = {}  # tenants that are in it, each with its valid entry
        self._count = 0

    def add(self, account: Account) -> None:
        if account.tenant_id not in self.keys:
            self._push(account)

    def discard(self, account: Account) -> None:
        self.keys.pop(account.tenant_id, None)
        if not self.keys:
            self._heap.clear()

    def lowered(self, account: Account) -> None:
        key = self.keys.get(account.tenant_id)
        if key is not None and account.counter < key[0]:
            self._push(account)

    def first(self) -> Account | None:
        heap = self._heap
        while heap:
            counter, _, number, account = heap[0]
            if self.keys.get(account.tenant_id) != (counter, number):
                heapq.heappop(heap)
            elif account.counter > counter:
                heapq.heappop(heap)
                self._push(account)
            else:
                return account
        return None

    def _push(self, account: Account) -> None:
        if len(self._heap) > 2 * len(self.keys) + _STALE_LIMIT:
            self._heap = [entry for entry in self._heap if self.keys.get(entry[3].tenant_id) == (entry[0], entry[2])]
            heapq.heapify(self._heap)
        self._count += 1
        self.keys[account.tenant_id] = (account.counter, self._count)
        heapq.heappush(self._heap, (account.counter, account.place, self._count, account))


class FairOrder:
    """Counters of all tenants that have something here, or had lately.

    A tenant is active while a request of it waits for the shared engine. One that becomes active is lifted to the least counter of those
    that are, or to where the last one entered: idle time, and time in which only its own limits kept it waiting, earn nothing.
    """

    def __init__(self, price: Price = PRICE) -> None:
        self.price = price
        self.level = 0.0  # the highest counter with which anybody has entered
        self._accounts: dict[str, Account] = {}
        self._places = 0

    def account(self, tenant_id: str) -> Account:
        found = self._accounts.get(tenant_id)
        if found is None:
            found = self._accounts[tenant_id] = Account(tenant_id, self._places)
            self._places += 1
        return found

    def forget(self, tenant_id: str) -> None:
        """A tenant that has nothing here."""
        self._accounts.pop(tenant_id, None)

    def lift(self, account: Account, active: float | None) -> None:
        """It becomes active. `active`: the least counter of those that are; None: nobody is."""
        account.counter = max(account.counter, self.level if active is None else active)

    def charge(self, account: Account, prompt_tokens: int, max_new_tokens: int) -> float:
        """It enters. Charges it ahead, for its prompt and for as much output as the tenant's requests have had lately; what was charged.

        Without it a tenant whose requests are still running would look unserved, and the order would swing by whole batches.
        """
        self.level = max(self.level, account.counter)
        output = min(float(max_new_tokens), account.mean_output)
        service = prompt_tokens * self.price.prompt + output * self.price.output
        account.serve(service)
        return service

    def settle(self, account: Account, charged: float, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """At a request's end: from what was charged ahead to what it got."""
        price = self.price
        service = (prompt_tokens - cached_tokens) * price.prompt + cached_tokens * price.cached + output_tokens * price.output
        account.serve(service - charged)
        account.mean_output += (output_tokens - account.mean_output) * _LATELY
