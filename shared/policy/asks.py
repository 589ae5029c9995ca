"""What asks to enter the engine, a tenant's terms, and what may be missing: the values of admission_queue.py."""

from collections.abc import Hashable
from enum import Enum

import msgspec

from shared.policy.kv_ledger import KvShare


class TenantTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's limits on this worker; None: not limited. What exceeds its part and not its quota waits: parts move to where work does."""

    kv: KvShare = KvShare()
    concurrent: int | None = None  # this worker's part
    most_concurrent: int | None = None  # the whole quota
    weight: int = 1
    queue_limit: int = 256


class Limit(Enum):
    KV = "kv"  # the tenant's own share; figures in blocks
    ROOM = "room"  # the engine's cache: full, or promised to others; figures in blocks
    CONCURRENT = "concurrent"
    SEATS = "seats"
    PREFILL = "prefill"  # figures in tokens of one step
    QUEUE = "queue"


class Short(msgspec.Struct, frozen=True):
    """What there is too little of. `never`: waiting cannot help."""

    limit: Limit
    asked: int
    held: int
    allowed: int
    never: bool = False


class AskState(Enum):
    NEW = "new"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LEFT = "left"


class Ask:
    """One prompt with its samples. Those after an attempt's first are its `followers`: it is admitted with the KV cache of all of them and
    as one request, and each then enters as there is room. Mutable; owned by the queue once offered.
    """

    __slots__ = (
        "arrival", "bypassed", "charged", "counted", "followers", "key", "kv_blocks", "leads", "max_new_tokens", "on_reserve", "prefill",
        "prompt_tokens", "rank", "seats", "state", "tenant_id",
    )  # fmt: skip

    def __init__(
        self,
        key: Hashable,
        tenant_id: str,
        *,
        kv_blocks: int,
        seats: int,
        prefill: int,
        prompt_tokens: int,
        max_new_tokens: int,
        rank: int = 1,
        leads: bool = True,
        followers: tuple["Ask", ...] = (),
    ) -> None:
        self.key = key
        self.tenant_id = tenant_id
        self.kv_blocks = kv_blocks
        self.seats = seats
        self.prefill = prefill  # the most that it takes of one step
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens  # of all samples
        self.rank = rank  # priority class, lower first
        self.leads = leads
        self.followers = followers
        self.state = AskState.NEW
        self.arrival = 0
        self.charged = 0.0
        self.bypassed = False  # entered while one before it waited for seats
        self.on_reserve = False  # entered while one before it waited for KV cache
        self.counted = False  # as one of its tenant's concurrent requests

    @property
    def all_blocks(self) -> int:
        return self.kv_blocks + sum(one.kv_blocks for one in self.followers) if self.followers else self.kv_blocks

    @property
    def most_seats(self) -> int:
        return max(self.seats, *(one.seats for one in self.followers)) if self.followers else self.seats
