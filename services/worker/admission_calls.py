"""What admission hands out and keeps: a call of the engine that was let in, and one attempt's place in it."""

import asyncio

from shared.errors import TenantryError
from shared.policy.asks import Ask
from shared.policy.block_time import BlockTime


class Call:
    """One call of the engine that was let in. `shared`: a beam search's, whose one place all its calls use."""

    __slots__ = ("ask", "cached", "due", "max_tokens", "output", "place", "shared")

    def __init__(self, place: "Place", ask: Ask, max_tokens: int, mean_output: float, *, shared: bool) -> None:
        self.place = place
        self.ask = ask
        self.max_tokens = max_tokens  # per sample, as reserved: it may generate no more
        self.shared = shared
        self.output = 0
        self.cached = 0
        self.due = min(float(ask.max_new_tokens), mean_output)  # output tokens that its tenant has been charged


class Wave:
    """Prompts of one request that wait for each other, so that there is one decision."""

    __slots__ = ("asks", "deciding")

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.deciding: list[asyncio.Future[TenantryError | None]] = []  # of all but the last, until it is decided


class Place:
    """What one attempt has asked for and what of it waits. Mutable; owned by Admission."""

    __slots__ = ("beam_tokens", "firsts", "held", "queued_ms", "queued_since_s", "shared", "tenant_id", "waiting", "wave")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.beam_tokens: tuple[int, int] | None = None  # of a beam search without max_tokens: its tenant's default, the model's length
        self.firsts: list[Ask] = []  # one per decision: more than one only if the application generates again
        self.waiting: list[asyncio.Future[TenantryError | None]] = []
        self.shared: tuple[Call, ...] = ()  # of a beam search, one per prompt
        self.wave: Wave | None = None  # of a request of several prompts
        self.held = BlockTime()
        self.queued_ms = 0.0  # of waits that have ended
        self.queued_since_s: float | None = None  # loop time since when it waits in its tenant's queue

    def queued_until_ms(self, now_s: float) -> float:
        return self.queued_ms + ((now_s - self.queued_since_s) * 1000.0 if self.queued_since_s is not None else 0.0)

    def stop_waiting(self, error: TenantryError) -> None:
        """Whatever of it waits for admission raises `error` in the application. Idempotent."""
        for future in self.waiting:
            if not future.done():
                future.set_result(error)
