"""The split of an alias between its two versions: within its share, sticky, monotone, and the same everywhere."""

import math
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.adapters import Canary, CanaryBy
from shared.policy.canary_split import goes_on_trial, place

SHARES = st.integers(min_value=0, max_value=1_000_000)


def canary(share_ppm: int, by: CanaryBy = CanaryBy.REQUEST, **changes: object) -> Canary:
    return Canary(adapter_id="ad_trial", share_ppm=share_ppm, by=by, **changes)


def on_trial(trial: Canary, request_id: str = "r", session: str = "", header: str = "") -> bool:
    return goes_on_trial(trial, request_id, session, header)


@pytest.mark.parametrize("by", [CanaryBy.REQUEST, CanaryBy.SESSION])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_share_gets_its_part_within_four_deviations(share: float, by: CanaryBy) -> None:
    many = 20_000
    trial = canary(round(share * 1_000_000), by)
    got = sum(on_trial(trial, f"r{n}", f"s{n}" if by is CanaryBy.SESSION else "") for n in range(many))
    assert abs(got - share * many) <= 4 * math.sqrt(many * share * (1 - share))


@given(st.text(), SHARES, SHARES)
def test_a_larger_share_moves_nobody_back(session: str, one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    if on_trial(canary(smaller, CanaryBy.SESSION), session=session or "x"):
        assert on_trial(canary(larger, CanaryBy.SESSION), session=session or "x")


@given(st.text(min_size=1), st.lists(st.text(), min_size=2, max_size=5), SHARES)
def test_a_session_stays_where_it_is_whatever_the_request(session: str, requests: list[str], share: int) -> None:
    trial = canary(share, CanaryBy.SESSION)
    assert len({on_trial(trial, request, session) for request in requests}) == 1


@given(st.text(), SHARES)
def test_a_request_that_is_tried_again_stays_where_it_was(request: str, share: int) -> None:
    trial = canary(share)
    assert on_trial(trial, request, "one") == on_trial(trial, request, "another"), "by request, the session says nothing"


@given(st.text(), st.text(), st.sampled_from(CanaryBy))
def test_nothing_goes_on_trial_at_no_share_and_everything_that_may_at_the_whole(request: str, session: str, by: CanaryBy) -> None:
    assert not on_trial(canary(0, by), request, session, "1")
    assert on_trial(canary(1_000_000, by), request, session, "1")


@given(st.text(), SHARES)
def test_by_header_only_requests_that_carry_it_can_go_on_trial(request: str, share: int) -> None:
    assert not on_trial(canary(share, CanaryBy.HEADER), request)
    assert on_trial(canary(share, CanaryBy.HEADER), request, header="1") == on_trial(canary(share), request)


@given(st.sampled_from(CanaryBy), SHARES, st.text())
def test_a_header_that_names_a_version_is_obeyed_under_every_rule(by: CanaryBy, share: int, request: str) -> None:
    assert on_trial(canary(share, by), request, header="canary")
    assert not on_trial(canary(share, by), request, header="stable")


@given(st.sampled_from(CanaryBy), st.sampled_from(["", "1", "canary", "stable"]))
def test_a_stopped_trial_gets_nothing(by: CanaryBy, header: str) -> None:
    assert not on_trial(canary(1_000_000, by, stopped="it failed"), header=header)


def test_the_next_trial_takes_other_sessions() -> None:
    first, second = canary(100_000, CanaryBy.SESSION), msgspec.structs.replace(canary(100_000, CanaryBy.SESSION), adapter_id="ad_next")
    sessions = [f"s{n}" for n in range(2000)]
    both = sum(on_trial(first, session=session) and on_trial(second, session=session) for session in sessions)
    assert both < 60, "independent: about 20 of 2,000"


def test_another_process_finds_the_same_places() -> None:
    code = "from shared.policy.canary_split import place; print([place('salt', 'session', f's{n}') for n in range(50)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([place("salt", "session", f"s{n}") for n in range(50)])
    assert place("salt", "session", "s0") == 365976, "pinned: another hash would move every session of a running trial"
