"""The KV ledger: guarantees hold, lent room comes back, and nothing is lost or counted twice in any interleaving."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.policy.kv_ledger import Fit, KvLayout, KvLedger, KvShare


def ledger(blocks: int = 100, **shares: KvShare) -> KvLedger:
    made = KvLedger(blocks)
    for tenant_id, share in shares.items():
        made.set_share(tenant_id, share)
    return made


@pytest.mark.parametrize(
    ("prompt", "new", "samples", "blocks"),
    [(1, 0, 1, 1), (16, 0, 1, 1), (16, 1, 1, 2), (15, 1, 1, 1), (100, 28, 4, 32), (0, 1, 3, 3)],
)
def test_every_sample_counts_its_whole_prompt_and_rounds_up_to_blocks(prompt: int, new: int, samples: int, blocks: int) -> None:
    assert KvLayout(((16, 0),)).blocks(prompt, new, samples) == blocks


def test_layers_with_a_window_keep_no_more_than_the_window_and_a_step() -> None:
    layout = KvLayout(((16, 0), (16, 160)))
    assert layout.blocks(100, 28, 1) == 8 + 8
    assert layout.blocks(1000, 24, 2) == 2 * (64 + 11)


def test_a_tenant_holds_its_share_and_not_a_block_more() -> None:
    book = ledger(a=KvShare(10))
    assert book.fit("a", 10) is Fit.NOW
    book.reserve("r1", "a", 10)
    assert book.fit("a", 1) is Fit.OWN_FULL
    assert book.fit("a", 11) is Fit.NEVER


def test_what_nobody_is_guaranteed_is_for_those_without_a_share_and_no_more() -> None:
    book = ledger(a=KvShare(60))
    assert book.limit_of("free") == 40
    assert book.fit("free", 41) is Fit.NEVER
    book.reserve("r1", "free", 30)
    assert book.fit("other", 11) is Fit.ROOM_FULL
    assert book.fit("other", 10) is Fit.NOW
    assert book.fit("a", 60) is Fit.NOW


def test_burst_borrows_idle_guarantees_until_their_tenant_waits_for_them() -> None:
    book = ledger(a=KvShare(50), b=KvShare(50, burst=True))
    assert book.fit("b", 80) is Fit.NOW
    book.reserve("r1", "b", 80)
    assert book.fit("a", 30) is Fit.ROOM_FULL
    assert book.fit("b", 10) is Fit.NOW
    assert book.fit("b", 10, wanted_by_others=30) is Fit.ROOM_FULL
    book.release("r1")
    assert book.fit("a", 30) is Fit.NOW


def test_lowering_a_share_below_what_is_held_evicts_nothing_shows_it_and_lets_nothing_new_in() -> None:
    book = ledger(a=KvShare(50))
    book.reserve("r1", "a", 40)
    book.set_share("a", KvShare(20))
    assert (book.held_by("a"), book.over_share("a")) == (40, 20)
    assert book.fit("a", 1) is Fit.OWN_FULL
    book.release("r1")
    assert (book.over_share("a"), book.fit("a", 20)) == (0, Fit.NOW)


def test_some_of_what_nobody_is_guaranteed_is_kept_for_small_asks_of_tenants_that_hold_nothing() -> None:
    book = KvLedger(100, reserve=10)
    book.set_share("a", KvShare(20))
    assert (book.limit_of("greedy"), book.fit("greedy", 71)) == (70, Fit.NEVER)
    book.reserve("r1", "greedy", 70)
    assert book.fit("greedy", 1) is Fit.ROOM_FULL
    assert book.fit("newcomer", 11) is Fit.ROOM_FULL
    assert book.fit("newcomer", 10) is Fit.NOW
    book.reserve("r2", "newcomer", 4)
    assert book.fit("newcomer", 1) is Fit.ROOM_FULL
    assert book.fit("a", 20) is Fit.NOW


class Ledger(RuleBasedStateMachine):
    """Admits only what `fit` allows, and keeps its own sums beside the ledger's."""

    tenants = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.book = KvLedger(64)
        self.shares = dict.fromkeys(self.tenants, KvShare())
        self.held: dict[int, tuple[str, int]] = {}
        self.next = 0

    def sum_of(self, tenant: str) -> int:
        return sum(blocks for who, blocks in self.held.values() if who == tenant)

    @rule(tenant=st.sampled_from(tenants), blocks=st.none() | st.integers(0, 60), burst=st.booleans(), assured=st.integers(0, 16))
    def share(self, tenant: str, blocks: int | None, burst: bool, assured: int) -> None:
        """What is assured in sum fits the cache, as the registry sees to; parts may pass it."""
        self.shares[tenant] = KvShare(blocks, burst, None, assured)
        self.book.set_share(tenant, self.shares[tenant])

    @rule(tenant=st.sampled_from(tenants), blocks=st.integers(1, 24), wanted=st.integers(0, 20))
    def admit(self, tenant: str, blocks: int, wanted: int) -> None:
        share, before = self.shares[tenant], self.sum_of(tenant)
        if self.book.fit(tenant, blocks, wanted) is not Fit.NOW:
            return
        if share.blocks is not None and not share.burst:
            assert before + blocks <= share.blocks, "above the share"
        if before + blocks > share.guaranteed and not share.burst:
            idle = sum(max(0, s.guaranteed - self.sum_of(t)) for t, s in self.shares.items() if t != tenant)
            assert sum(b for _, b in self.held.values()) + blocks + idle <= 64, "took what another is guaranteed"
        self.next += 1
        self.held[self.next] = (tenant, blocks)
        self.book.reserve(self.next, tenant, blocks)

    @rule(pick=st.integers(0))
    def redeliver(self, pick: int) -> None:
        if self.held:
            key = sorted(self.held)[pick % len(self.held)]
            self.book.reserve(key, *self.held[key])

    @rule(pick=st.integers(0), twice=st.booleans())
    def release(self, pick: int, twice: bool) -> None:
        if self.held:
            key = sorted(self.held)[pick % len(self.held)]
            assert self.book.release(key) == self.held.pop(key)[1]
            if twice:
                assert self.book.release(key) == 0

    @rule()
    def crash(self) -> None:
        """The engine dies: every request ends, in any order."""
        for key in sorted(self.held, reverse=True):
            self.book.release(key)
        self.held.clear()

    @invariant()
    def sums_are_right(self) -> None:
        assert self.book.held == sum(blocks for _, blocks in self.held.values()) <= self.book.blocks
        assert self.book.free >= 0
        for tenant in self.tenants:
            assert self.book.held_by(tenant) == self.sum_of(tenant)
        assert self.book.guaranteed == sum(share.guaranteed for share in self.shares.values())
        assert self.book.promised_idle == sum(max(0, s.guaranteed - self.sum_of(t)) for t, s in self.shares.items())


Ledger.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedger = Ledger.TestCase
