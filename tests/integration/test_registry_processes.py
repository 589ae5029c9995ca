"""Registries as processes that reserve in one entry at once, replayed from what they were told; router processes that hear of changes."""

import pytest

from benchmarks.tenancy_control.configuration import configuration
from benchmarks.tenancy_control.quotas import reserving
from benchmarks.tenancy_control.reserving import Step, overdrafts
from benchmarks.tenancy_control.visibility import visible
from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats

REGISTRIES, ATTEMPTS = 8, 800


async def test_eight_registry_processes_give_out_no_more_than_there_is(nats_server: EmbeddedNats, bus: Bus) -> None:
    tally = await reserving(nats_server, bus, ATTEMPTS, registries=REGISTRIES)
    assert tally["attempts"] == ATTEMPTS
    assert tally["overdrafts"] == 0
    assert min(tally["reserved"], tally["refused"], tally["revisions"]) > 50


async def test_without_compare_and_set_the_replay_shows_overdrafts(nats_server: EmbeddedNats, bus: Bus) -> None:
    tally = await reserving(nats_server, bus, ATTEMPTS // 2, registries=4, careless=True)
    assert tally["overdrafts"] > 0


@pytest.mark.parametrize(
    ("last", "found"),
    [
        (Step(3, {"ad_3": ("tn_0", "w2", 8)}, (), {}), 0),
        (Step(3, {"ad_3": ("tn_0", "w2", 9)}, (), {}), 1),
        (Step(3, {"ad_3": ("tn_0", "w2", 9)}, ("ad_1",), {}), 0),
        (Step(3, {f"ad_x{i}": ("tn_1", "w1", 0) for i in range(9)}, (), {}), 1),
        (Step(3, {}, (), {"tn_1": 1001}), 1),
        (Step(3, {}, (), {"tn_1": 1001, "tn_0": 0}), 0),
    ],
)
def test_the_replay_counts_what_is_held_by_the_order_of_writing(last: Step, found: int) -> None:
    steps = [last, Step(1, {"ad_1": ("tn_0", "w1", 8)}, (), {"tn_0": 1000}), Step(2, {"ad_2": ("tn_0", "w1", 8)}, (), {})]
    assert overdrafts(steps) == found


async def test_changes_of_keys_tenants_and_pools_reach_four_router_processes(nats_server: EmbeddedNats, bus: Bus) -> None:
    """And how long it took is what the benchmark tells; it waits for each of them to answer by every change."""
    found = await visible(bus, nats_server, configuration(1, tenants=3), rounds=2)
    assert found.keys() == {f"visible_{what}_{which}_ms" for what in ("key", "tenant", "pool") for which in ("p50", "max")}
    assert all(0.0 < found[f"visible_{what}_p50_ms"] <= found[f"visible_{what}_max_ms"] for what in ("key", "tenant", "pool"))
