"""The lifecycle's table, and its picture."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.lifecycle import HOLDS_RESERVATION, TRANSITIONS, AdapterState, IllegalTransition, LifecycleEvent, diagram, step

DOCUMENT = Path(__file__).parents[2] / "docs" / "lifecycle.md"


@given(st.sampled_from(AdapterState), st.sampled_from(LifecycleEvent))
def test_an_event_outside_the_table_raises_and_says_what_and_where(state: AdapterState, event: LifecycleEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert step(state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(IllegalTransition, match=f"{event} cannot happen to an adapter that is {state}"):
        step(state, event)


def test_every_state_is_reachable_from_an_upload() -> None:
    reached = {AdapterState.UPLOADED}
    while True:
        further = reached | {after for (before, _), after in TRANSITIONS.items() if before in reached}
        if further == reached:
            break
        reached = further
    assert reached == set(AdapterState)


def test_a_reservation_begins_only_with_reserved_and_ends_only_with_an_acknowledgement_or_a_lost_worker() -> None:
    begins = {event for (a, event), b in TRANSITIONS.items() if a not in HOLDS_RESERVATION and b in HOLDS_RESERVATION}
    ends = {event for (a, event), b in TRANSITIONS.items() if a in HOLDS_RESERVATION and b not in HOLDS_RESERVATION}
    assert begins == {LifecycleEvent.RESERVED}
    assert ends == {LifecycleEvent.LOAD_FAILED, LifecycleEvent.DRAINED, LifecycleEvent.WORKER_LOST}


def test_a_drain_never_goes_back_to_ready() -> None:
    after_drain = {b for (a, _), b in TRANSITIONS.items() if a is AdapterState.DRAINING}
    assert after_drain == {AdapterState.DRAINING, AdapterState.UNLOADED}


def test_the_documents_diagram_is_the_tables() -> None:
    text = DOCUMENT.read_text()
    drawn = text.split("```mermaid\n", 1)[1].split("\n```", 1)[0]
    assert drawn == diagram(), "docs/lifecycle.md is not what shared.policy.lifecycle.diagram() draws"
