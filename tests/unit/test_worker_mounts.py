"""What a worker decides to do about its mounts: a table."""

import pytest

from services.worker.mounts import Action, mine, plan
from shared.contracts.adapters import Mount, PoolEntry
from shared.policy.lifecycle import AdapterState

L, R, D, A = AdapterState.LOADING, AdapterState.READY, AdapterState.DRAINING, AdapterState.ADMITTED


def mount(state: AdapterState, adapter_id: str = "a", worker_id: str = "w1") -> Mount:
    return Mount(
        adapter_id=adapter_id,
        tenant_id="t",
        tenant="sales",
        name="tone",
        version=1,
        digest="sha256:0",
        worker_id=worker_id,
        state=state,
        rank=8,
        rank_class=8,
        slot_bytes=1,
        true_bytes=1,
    )


def decided(
    state: AdapterState | None,
    *,
    held: str = "",
    served: str = "",
    proven: str = "",
    busy: str = "",
    failed: str = "",
    said: Action | None = None,
) -> str:
    mounts = {"a": mount(state)} if state else {}
    steps = plan(
        mounts, held=set(held), served=set(served), proven=set(proven), busy=set(busy), failed=set(failed), said={"a": said} if said else {}
    )
    return ",".join(step.action.value for step in steps)


@pytest.mark.parametrize(
    ("state", "facts", "expected"),
    [
        (L, {}, "load"),
        (R, {}, "load"),
        (A, {}, ""),  # its room may still be another's
        (A, {"held": "a"}, "remove"),
        (L, {"busy": "a"}, ""),
        (L, {"held": "a", "proven": "a"}, "serve"),
        (L, {"held": "a", "proven": "a", "served": "a"}, "say_loaded"),
        (L, {"held": "a", "proven": "a", "served": "a", "said": Action.SAY_LOADED}, ""),
        (R, {"held": "a", "proven": "a", "served": "a"}, ""),
        (R, {"held": "a", "proven": "a"}, "serve"),
        (L, {"held": "a"}, "remove"),  # a load that failed half-way
        (L, {"failed": "a"}, "say_failed"),
        (L, {"failed": "a", "said": Action.SAY_FAILED}, ""),
        (L, {"failed": "a", "held": "a", "said": Action.SAY_FAILED}, "remove"),
        (D, {"held": "a", "served": "a", "proven": "a"}, "drain"),
        (D, {"served": "a"}, "drain"),
        (D, {"held": "a", "busy": "a"}, ""),
        (D, {}, "say_drained"),
        (D, {"said": Action.SAY_LOADED}, "say_drained"),
        (D, {"said": Action.SAY_DRAINED}, ""),
        (None, {"held": "a", "proven": "a", "served": "a"}, "remove"),
        (None, {"held": "a", "busy": "a"}, ""),
        (None, {}, ""),
        (AdapterState.FAILED, {"held": "a"}, "remove"),
        (AdapterState.UNLOADED, {}, ""),
    ],
)
def test_the_step_follows_from_the_state_and_what_the_engine_holds(
    state: AdapterState | None, facts: dict[str, str], expected: str
) -> None:
    assert decided(state, **facts) == expected


def test_what_makes_room_comes_before_what_needs_it() -> None:
    mounts = {"new": mount(L, "new"), "old": mount(D, "old")}
    steps = plan(mounts, held={"old", "stray"}, proven={"old"}, served={"old"}, busy=set(), failed=set(), said={})
    assert [(step.action, step.adapter_id) for step in steps] == [
        (Action.DRAIN, "old"),
        (Action.REMOVE, "stray"),
        (Action.LOAD, "new"),
    ]


def test_only_this_workers_mounts_are_its_own() -> None:
    entry = PoolEntry(pool_id="main", base="b", mounts={"a": mount(R), "b": mount(R, "b", "w2")})
    assert list(mine(entry, "w1")) == ["a"]
