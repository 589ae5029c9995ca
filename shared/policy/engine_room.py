"""What may be in one engine at once beside KV cache: seats, and prompts that are being prefilled.

Pure. The engine serves what it holds first come, first served, and a prompt that is being prefilled takes its part of every step
before a newcomer gets any; so fairness is kept by what is let in, not by the order inside.
"""

from enum import Enum

import msgspec

_SEATS_PER_RESERVED = 32
_MOST_RESERVED = 8
_SHARED_PART = 40  # of a step's tokens
_SHARED_ROUND = 32


class Full(Enum):
    SEATS = "seats"
    PREFILL = "prefill"


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """0 of anything: unknown, and not limited here."""

    seats: int = 0  # sequences that the engine runs at once
    reserved_seats: int = 0  # of them: only for a tenant that has nothing running
    step_tokens: int = 0  # prefill and decode tokens of one step
    shared_prefill_tokens: int = 0  # of them, for one tenant's prompts while another tenant has something in the engine


def shape_of(seats: int, step_tokens: int, shared_prefill_tokens: int = 0) -> EngineShape:
    """The reserve is a thirty-second of the seats. The prefill budget, unless given, is a fortieth of a step in whole 32s: with it
    one tenant's longest prompts lengthen the others' decode steps to less than twice (benchmarks/results/tenancy.json).
    """
    reserved = min(_MOST_RESERVED, max(1, seats // _SEATS_PER_RESERVED)) if seats > 1 else 0
    budget = shared_prefill_tokens or max(_SHARED_ROUND, step_tokens // _SHARED_PART // _SHARED_ROUND * _SHARED_ROUND)
    return EngineShape(
        seats=seats, reserved_seats=reserved, step_tokens=step_tokens, shared_prefill_tokens=min(budget, step_tokens) if step_tokens else 0
    )


class EngineRoom:
    """Seats and prefill in use. `prefill` counts each prompt with the most that it can take of one step; `bypass`, the seats of those
    that entered past one that waits for seats: as many as are reserved, so that it waits no longer for a stream of small ones.
    """

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.seats = 0
        self.prefill = 0
        self.bypass = 0

    @property
    def free_seats(self) -> int:
        return self.shape.seats - self.seats if self.shape.seats else 1 << 30

    @property
    def most_seats(self) -> int:
        """Of one request. What is reserved is for small ones."""
        return self.shape.seats - self.shape.reserved_seats if self.shape.seats else 1 << 30

    def step_share(self, prompt_tokens: int) -> int:
        """The most that a prompt takes of one step beside others, whatever its samples: the engine reads one tenant's prompts, each
        sample's its own, within the shared budget.
        """
        return min(prompt_tokens, self.shape.shared_prefill_tokens)

    def full(self, seats: int, prefill: int, *, tenant_seats: int, tenant_prefill: int, alone: bool) -> Full | None:
        """What keeps a request out now. `alone`: nobody but its tenant has anything in the engine.

        A tenant with nothing running may take reserved seats, for no more samples than those, and whatever a step has left. Others
        leave a quarter of a step free for such a one; beside others their prompts take at most the shared budget, alone at most half
        a step.
        """
        shape = self.shape
        quiet = tenant_seats == 0
        kept = 0 if quiet and seats <= shape.reserved_seats else shape.reserved_seats
        if seats > self.free_seats - kept:
            return Full.SEATS
        if not shape.step_tokens or not self.prefill:
            return None
        if quiet:
            return Full.PREFILL if self.prefill + prefill > shape.step_tokens else None
        own_limit = shape.step_tokens // 2 if alone else shape.shared_prefill_tokens
        if tenant_prefill and tenant_prefill + prefill > own_limit:
            return Full.PREFILL
        return Full.PREFILL if self.prefill + prefill > shape.step_tokens * 3 // 4 else None

    def enter(self, seats: int, prefill: int) -> None:
        self.seats += seats
        self.prefill += prefill

    def prefilled(self, prefill: int) -> None:
        self.prefill -= prefill
        assert self.prefill >= 0

    def leave(self, seats: int) -> None:
        self.seats -= seats
        assert self.seats >= 0
