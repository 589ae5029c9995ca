"""The virtual token counter: the least served is next, idle time earns nothing, and the least is found though counters move."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.policy.fair_order import Account, FairOrder, Least

TENANTS = ("a", "b", "c", "d")


def test_service_counts_against_a_tenant_by_its_weight() -> None:
    order = FairOrder()
    light, heavy = order.account("light"), order.account("heavy")
    heavy.weight = 4.0
    for account in (light, heavy):
        order.charge(account, 100, 50)
    assert light.counter == 4 * heavy.counter == 200.0


def test_a_tenant_that_becomes_active_is_lifted_to_the_least_of_the_active_and_never_lowered() -> None:
    order = FairOrder()
    b, c = order.account("b"), order.account("c")
    order.lift(b, 1000.0)
    assert b.counter == 1000
    b.serve(50)
    order.lift(b, 1000.0)
    assert b.counter == 1050
    order.lift(c, 1050.0)
    assert c.counter == 1050


def test_where_nobody_waits_a_tenant_stands_where_the_last_one_entered() -> None:
    order = FairOrder()
    a, b = order.account("a"), order.account("b")
    a.serve(700)
    order.charge(a, 100, 0)
    order.lift(b, None)
    assert b.counter == 700


def test_what_was_charged_ahead_is_settled_to_what_was_served() -> None:
    order = FairOrder()
    account = order.account("a")
    charged = order.charge(account, 100, 1000)
    order.settle(account, charged, prompt_tokens=100, cached_tokens=60, output_tokens=10)
    assert abs(account.counter - (40 * 1.0 + 60 * 0.1 + 10 * 2.0)) < 1e-9
    assert account.mean_output < 256


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 400)), min_size=3, max_size=3), st.integers(200, 400))
def test_backlogged_tenants_get_service_by_their_weights_whatever_their_requests_cost(tenants: list[tuple[int, int]], turns: int) -> None:
    order, waiting, served = FairOrder(), Least(), {}
    for number, (weight, _) in enumerate(tenants):
        account = order.account(str(number))
        account.weight = float(weight)
        waiting.add(account)
        served[account.tenant_id] = 0
    for _ in range(turns):
        account = waiting.first()
        assert account is not None
        cost = tenants[int(account.tenant_id)][1]
        account.serve(cost)
        served[account.tenant_id] += cost
    shares = [served[str(number)] / weight for number, (weight, _) in enumerate(tenants)]
    assert max(shares) - min(shares) <= max(cost / weight for weight, cost in tenants)


class Leasts(RuleBasedStateMachine):
    """`Least` against the plain minimum, while members come, go, and their counters rise and fall."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts = {tenant: Account(tenant) for tenant in TENANTS}
        self.members: set[str] = set()
        self.least = Least()

    @rule(tenant=st.sampled_from(TENANTS))
    def add(self, tenant: str) -> None:
        self.least.add(self.accounts[tenant])
        self.members.add(tenant)

    @rule(tenant=st.sampled_from(TENANTS))
    def discard(self, tenant: str) -> None:
        self.least.discard(self.accounts[tenant])
        self.members.discard(tenant)

    @rule(tenant=st.sampled_from(TENANTS), service=st.integers(0, 50))
    def rise(self, tenant: str, service: int) -> None:
        self.accounts[tenant].serve(service)

    @rule(tenant=st.sampled_from(TENANTS), service=st.integers(0, 50))
    def fall(self, tenant: str, service: int) -> None:
        self.accounts[tenant].serve(-service)
        self.least.lowered(self.accounts[tenant])

    @invariant()
    def the_first_is_the_least(self) -> None:
        first = self.least.first()
        assert (first is None) == (not self.members)
        assert len(self.least.keys) == len(self.members)
        if first is not None:
            assert first.counter == min(self.accounts[tenant].counter for tenant in self.members)


Leasts.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestLeast = Leasts.TestCase


def test_entries_of_members_that_come_and_go_do_not_pile_up() -> None:
    least, stays, comes = Least(), Account("stays"), Account("comes")
    comes.serve(10)
    least.add(stays)
    for _ in range(10_000):
        least.add(comes)
        least.discard(comes)
    assert len(least._heap) < 200
    assert least.first() is stays
