"""Who holds how much of one engine's KV cache: reservations in blocks, made before a request enters the engine.

Pure. A tenant's guarantee is room that only it can draw on; burst is room of others' guarantees that is lent while it lies idle.
"""

from collections.abc import Hashable
from enum import Enum

import msgspec


class Fit(Enum):
    NOW = "now"
    OWN_FULL = "own_full"  # the tenant's own share here has no room now
    ROOM_FULL = "room_full"  # its share has room, the engine's cache has none now, or what is left is promised to others
    NEVER = "never"  # more than it could ever hold here


class KvShare(msgspec.Struct, frozen=True):
    """`blocks` None: no share of its own; it then has what nobody is guaranteed, together with all others like it.

    `most`: its whole quota, of which `blocks` are this worker's part now and may become more; None: `blocks`. `assured`: as much of
    `blocks` as only it can draw on here, None: all. Of all tenants it sums to no more than the cache; parts may sum to more.
    """

    blocks: int | None = None
    burst: bool = False
    most: int | None = None
    assured: int | None = None

    @property
    def guaranteed(self) -> int:
        part = self.blocks or 0
        return part if self.assured is None else min(part, self.assured)


class KvLayout(msgspec.Struct, frozen=True):
    """What a sequence takes of the pool. `groups`: layers with blocks of their own, (tokens of a block, most tokens kept; 0: all)."""

    groups: tuple[tuple[int, int], ...]

    def blocks(self, prompt_tokens: int, new_tokens: int, samples: int) -> int:
        """Blocks that the samples of one prompt may come to hold.

        Every sample counts its whole prompt: samples share a prompt's full blocks only when the prefix cache happens to have them
        before the next sample is scheduled, and never the last, partly filled one. A reservation must hold without luck.
        """
        tokens = prompt_tokens + new_tokens
        each = 0
        for block_tokens, most_tokens in self.groups:
            if most_tokens and most_tokens < tokens:
                each += -(-most_tokens // block_tokens) + 1  # a window begins anywhere in its first block
            else:
                each += -(-tokens // block_tokens)
        return samples * each


class KvLedger:
    """Reservations by key. Sums are kept, so that asking and booking cost the same however many tenants there are.

    A share that is lowered below what is held evicts nothing: `over_share` says by how much, and nothing more fits until it is back.
    `reserve` blocks of what nobody is guaranteed are kept for tenants that hold nothing, for asks no larger than that.
    """

    def __init__(self, blocks: int, reserve: int = 0) -> None:
        self.blocks = blocks
        self.reserved = reserve
        self.held = 0
        self.guaranteed = 0  # sum of shares
        self.promised_idle = 0  # of the guarantees: not held by their tenants now
        self._shares: dict[str, KvShare] = {}
        self._held: dict[str, int] = {}
        self._reservations: dict[Hashable, tuple[str, int]] = {}

    @property
    def free(self) -> int:
        return self.blocks - self.held

    def held_by(self, tenant_id: str) -> int:
        return self._held.get(tenant_id, 0)

    def limit_of(self, tenant_id: str) -> int:
        """The most that the tenant may ever hold here; without a share of its own, what nobody is guaranteed."""
        share = self._shares.get(tenant_id, _NONE)
        if share.burst:
            return max(share.blocks or 0, self.blocks - self.reserved)
        if share.blocks is None:
            common = max(0, self.blocks - self.guaranteed)
            return max(common - self.reserved, min(common, self.reserved))
        return min(self.blocks, share.blocks if share.most is None else share.most)

    def over_share(self, tenant_id: str) -> int:
        share = self._share(tenant_id)
        return 0 if share.burst or share.blocks is None else max(0, self.held_by(tenant_id) - share.blocks)

    def set_share(self, tenant_id: str, share: KvShare) -> None:
        held, before = self.held_by(tenant_id), self._share(tenant_id).guaranteed
        self.guaranteed += share.guaranteed - before
        self.promised_idle += max(0, share.guaranteed - held) - max(0, before - held)
        if share == _NONE:
            self._shares.pop(tenant_id, None)
        else:
            self._shares[tenant_id] = share

    def fit(self, tenant_id: str, blocks: int, wanted_by_others: int = 0) -> Fit:
        """Whether a reservation fits now. `wanted_by_others`: what waits now within others' guarantees, which burst does not borrow."""
        share, held = self._shares.get(tenant_id, _NONE), self._held.get(tenant_id, 0)
        if blocks > self.limit_of(tenant_id):
            return Fit.NEVER
        guaranteed = share.guaranteed
        within = held + blocks <= guaranteed
        if share.blocks is not None and not share.burst and not within and held + blocks > min(share.blocks, self._reach(guaranteed)):
            return Fit.OWN_FULL
        free = self.blocks - self.held
        if blocks > free:
            return Fit.ROOM_FULL
        if within:
            return Fit.NOW
        others_idle = self.promised_idle - max(0, guaranteed - held)
        kept_back = min(wanted_by_others, others_idle) if share.burst else others_idle
        if held or blocks > self.reserved:
            kept_back += self.reserved
        return Fit.NOW if blocks <= free - kept_back else Fit.ROOM_FULL

    def draws_on_shared(self, tenant_id: str, blocks: int) -> bool:
        """Whether so many more would take the tenant beyond its guarantee."""
        return self.held_by(tenant_id) + blocks > self._share(tenant_id).guaranteed

    def reserve(self, key: Hashable, tenant_id: str, blocks: int) -> None:
        """Books what `fit` has allowed. A key that is booked already (delivered again) changes nothing."""
        if key in self._reservations:
            return
        self._reservations[key] = (tenant_id, blocks)
        self._hold(tenant_id, blocks)

    def release(self, key: Hashable) -> int:
        """Blocks given back; 0 for a key that holds nothing (released before)."""
        tenant_id, blocks = self._reservations.pop(key, ("", 0))
        if blocks:
            self._hold(tenant_id, -blocks)
        return blocks

    def _reach(self, guaranteed: int) -> int:
        """The most that one of this guarantee can come to hold beside what others are guaranteed: nobody is kept waiting for more."""
        return self.blocks - (self.guaranteed - guaranteed) - self.reserved

    def _share(self, tenant_id: str) -> KvShare:
        return self._shares.get(tenant_id, _NONE)

    def _hold(self, tenant_id: str, blocks: int) -> None:
        before = self._held.get(tenant_id, 0)
        after = before + blocks
        self.held += blocks
        guaranteed = self._shares.get(tenant_id, _NONE).guaranteed
        if guaranteed:
            self.promised_idle += max(0, guaranteed - after) - max(0, guaranteed - before)
        if after:
            self._held[tenant_id] = after
        else:
            self._held.pop(tenant_id, None)


_NONE = KvShare()
