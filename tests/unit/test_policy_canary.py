"""What a trial does to a pool's entry, from its reservation to its end."""

import msgspec
import pytest

from shared.contracts.adapters import AdapterFailed, AdapterLoaded, Canary, CanaryBy, CanaryStop, CanaryTerms, DrainOrder, PoolEntry
from shared.contracts.errors import ErrorInfo
from shared.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from shared.policy.admission import Ask, decide, held_bytes
from shared.policy.canary import TermsChange, change, changed_terms, leaves_trial_alone, promote, roll_back, stop
from shared.policy.lifecycle import AdapterState
from shared.policy.mounts import Change, acknowledge, order_drain, worker_arrived, worker_removed
from tests.unit.pool_values import BASE, PER_RANK, admit, ask, pool, ready, refused, tenant, worker

SLOT = 8 * PER_RANK
WHO = tenant(quota=SLOT, headroom=SLOT)
DRAIN = DrainOrder()


def trial_ask(adapter_id: str = "ad_2", share_ppm: int = 100_000) -> Ask:
    return msgspec.structs.replace(ask("tone", adapter_id), trial=Canary(adapter_id=adapter_id, share_ppm=share_ppm))


def serving(**two: int) -> PoolEntry:
    """tone@1 serves on w1."""
    workers = (worker("w1", slots=1), worker("w2", slots=1)) if two else (worker(slots=2),)
    return ready(admit(pool(*workers), WHO, ask("tone", "ad_1")), "ad_1")


def running(**two: int) -> PoolEntry:
    """tone@1 serves, tone@2 is on trial and ready."""
    return loaded(admit(serving(**two), WHO, trial_ask(), revision=5))


def loaded(entry: PoolEntry) -> PoolEntry:
    done = acknowledge(entry, _ack(entry, "ad_2", AdapterLoaded), 6)
    assert done is not None
    return done.pool


def _ack(entry: PoolEntry, adapter_id: str, kind: type) -> AdapterLoaded | AdapterFailed:
    worker_id = entry.mounts[adapter_id].worker_id
    common = {"pool_id": "main", "adapter_id": adapter_id, "worker_id": worker_id, "incarnation": "i1", "generation": 100}
    if kind is AdapterFailed:
        return AdapterFailed(**common, error=ErrorInfo(code="load_failed", message="no"))
    return AdapterLoaded(**common, modules_matched=1, probe_difference=1.0, fetch_ms=1.0, load_ms=1.0, bytes_loaded=1)


def changed(outcome: object) -> PoolEntry:
    assert isinstance(outcome, Change), outcome
    return outcome.pool


def notes(outcome: object) -> list[tuple[int, AdapterState, str]]:
    assert isinstance(outcome, Change), outcome
    return [(each.mount.version, each.state, each.note) for each in outcome.outcomes]


def test_a_trial_is_reserved_and_charged_beside_the_version_that_serves() -> None:
    entry = admit(serving(), WHO, trial_ask(), revision=5)
    assert entry.canaries == {"sales": {"tone": Canary(adapter_id="ad_2", share_ppm=100_000)}}
    assert entry.aliases == {"sales": {"tone": "ad_1"}}
    assert entry.mounts["ad_2"].on_trial
    assert held_bytes(entry, WHO.tenant_id) == 2 * SLOT


def test_without_headroom_a_trial_is_refused_and_not_told_to_drain_first() -> None:
    error = refused(decide(serving(), tenant(quota=SLOT), trial_ask(), 5))
    assert isinstance(error, QuotaExceeded)
    assert "grant upgrade headroom" in error.message
    assert "drain-first" not in error.message
    assert error.fields["drain_first_helps"] is False


def test_a_loaded_trial_is_ready_without_the_alias_and_drains_nothing() -> None:
    entry = running()
    assert entry.mounts["ad_2"].state is AdapterState.READY
    assert entry.mounts["ad_1"].state is AdapterState.READY
    assert entry.aliases == {"sales": {"tone": "ad_1"}}


def test_a_name_that_nothing_serves_has_no_trial() -> None:
    assert "nothing serves tone" in refused(decide(pool(), WHO, trial_ask(), 5)).message


@pytest.mark.parametrize("third", [trial_ask("ad_3"), ask("tone", "ad_3"), ask("tone", "ad_3", drain_first=True)])
@pytest.mark.parametrize("entry", [admit(serving(), WHO, trial_ask(), revision=5), running()], ids=["loading", "ready"])
def test_a_name_on_trial_gets_no_third_version(entry: PoolEntry, third: Ask) -> None:
    error = refused(decide(entry, tenant(quota=9 * SLOT), third, 7))
    assert isinstance(error, Conflict)
    assert "version 2 of tone is on trial" in error.message


def test_a_trial_that_fails_to_load_is_over_and_releases_its_room() -> None:
    entry = admit(serving(), WHO, trial_ask(), revision=5)
    done = acknowledge(entry, _ack(entry, "ad_2", AdapterFailed), 6)
    after = changed(done)
    assert (after.canaries, after.aliases) == ({}, {"sales": {"tone": "ad_1"}})
    assert held_bytes(after, WHO.tenant_id) == SLOT


def test_promoting_switches_the_alias_ends_the_trial_and_drains_the_other_in_one_change() -> None:
    done = promote(running(), "sales", "tone", 2, DrainOrder(deadline_s=9.0), 7)
    after = changed(done)
    assert after.aliases == {"sales": {"tone": "ad_2"}}
    assert after.canaries == {}
    assert not after.mounts["ad_2"].on_trial
    assert (after.mounts["ad_1"].state, after.mounts["ad_1"].drain) == (AdapterState.DRAINING, DrainOrder(deadline_s=9.0))
    assert notes(done) == [
        (2, AdapterState.READY, "promoted: it serves now"),
        (1, AdapterState.DRAINING, "version 2 was promoted"),
    ]
    assert isinstance(promote(after, "sales", "tone", 0, DRAIN, 8), NotFound), "once only"


def test_rolling_back_drains_the_trial_and_leaves_the_alias() -> None:
    after = changed(roll_back(running(), "sales", "tone", 0, DRAIN, 7))
    assert after.aliases == {"sales": {"tone": "ad_1"}}
    assert after.canaries == {}
    assert after.mounts["ad_2"].state is AdapterState.DRAINING
    assert after.mounts["ad_1"].state is AdapterState.READY


def test_a_trial_that_loads_may_be_rolled_back_and_not_promoted() -> None:
    entry = admit(serving(), WHO, trial_ask(), revision=5)
    assert isinstance(promote(entry, "sales", "tone", 0, DRAIN, 7), Conflict)
    assert changed(roll_back(entry, "sales", "tone", 0, DRAIN, 7)).mounts["ad_2"].state is AdapterState.DRAINING


@pytest.mark.parametrize("decision", [promote, roll_back])
def test_a_decision_about_another_version_changes_nothing(decision: object) -> None:
    error = decision(running(), "sales", "tone", 3, DRAIN, 7)  # type: ignore[operator]
    assert isinstance(error, Conflict)
    assert error.fields["version"] == 2


def test_terms_change_while_it_runs() -> None:
    done = change(running(), "sales", "tone", TermsChange(share_ppm=200_000, by=CanaryBy.SESSION, stop={"min_requests": 50}), 7)
    assert changed(done).canaries["sales"]["tone"] == Canary(
        adapter_id="ad_2", share_ppm=200_000, by=CanaryBy.SESSION, stop=CanaryStop(min_requests=50)
    )
    assert notes(done) == [(2, AdapterState.READY, "on trial: 20% by session")]
    assert changed(change(running(), "sales", "tone", TermsChange(), 7)) == running()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (TermsChange(share_ppm=-1), "share_ppm"),
        (TermsChange(share_ppm=1_000_001), "share_ppm"),
        (TermsChange(stop={"window_s": 0.0}), "stop.window_s"),
        (TermsChange(stop={"window_s": float("nan")}), "stop.window_s"),
        (TermsChange(stop={"min_requests": 0}), "stop.min_requests"),
        (TermsChange(stop={"error_rate_margin": 1.5}), "stop.error_rate_margin"),
        (TermsChange(stop={"latency_ratio": 0.5}), "stop.latency_ratio"),
        (TermsChange(stop={"patience": 1.0}), "stop.patience"),
    ],
)
def test_terms_out_of_bounds_are_refused_by_name(wrong: TermsChange, field: str) -> None:
    refusal = changed_terms(CanaryTerms(), wrong)
    assert isinstance(refusal, InvalidRequest)
    assert refusal.fields["field"] == field


def test_a_stop_is_one_change_however_many_registries_decide_it() -> None:
    entry = running()
    seen = entry.canaries["sales"]["tone"]
    done = stop(entry, "sales", "tone", seen, "it fails", 7)
    after = changed(done)
    assert after.canaries["sales"]["tone"].stopped == "it fails"
    assert notes(done) == [(2, AdapterState.READY, "trial stopped: it fails")]
    assert after.mounts == entry.mounts
    assert stop(after, "sales", "tone", seen, "it fails", 8) is None


def test_a_verdict_about_an_earlier_trial_stops_no_other() -> None:
    entry = running()
    seen = entry.canaries["sales"]["tone"]
    resumed = changed(change(changed(stop(entry, "sales", "tone", seen, "x", 7)), "sales", "tone", TermsChange(resume=True), 8))
    assert resumed.canaries["sales"]["tone"].stopped == ""
    assert stop(resumed, "sales", "tone", seen, "x", 9) is None
    assert stop(resumed, "sales", "tone", msgspec.structs.replace(seen, adapter_id="ad_0"), "x", 9) is None
    assert stop(serving(), "sales", "tone", seen, "x", 9) is None


def test_a_stopped_trial_is_not_promoted_until_it_is_resumed() -> None:
    entry = running()
    stopped = changed(stop(entry, "sales", "tone", entry.canaries["sales"]["tone"], "it fails", 7))
    error = promote(stopped, "sales", "tone", 0, DRAIN, 8)
    assert isinstance(error, Conflict)
    assert "it fails" in error.message
    assert changed(promote(changed(change(stopped, "sales", "tone", TermsChange(resume=True), 8)), "sales", "tone", 0, DRAIN, 9))


def test_unloading_the_version_on_trial_ends_the_trial() -> None:
    after = order_drain(running(), ["ad_2"], DRAIN, 7).pool
    assert (after.canaries, after.aliases) == ({}, {"sales": {"tone": "ad_1"}})


def test_the_version_that_serves_is_not_unloaded_from_beside_a_trial() -> None:
    refusal = leaves_trial_alone(running(), ["ad_1"])
    assert isinstance(refusal, Conflict)
    assert leaves_trial_alone(running(), ["ad_1", "ad_2"]) is None
    assert leaves_trial_alone(running(), ["ad_2"]) is None
    assert leaves_trial_alone(serving(), ["ad_1"]) is None


def test_unloading_both_leaves_neither_alias_nor_trial() -> None:
    after = order_drain(running(), ["ad_1", "ad_2"], DRAIN, 7).pool
    assert after.canaries == {}
    assert not after.aliases["sales"]


def test_a_trial_whose_worker_restarts_loads_again_and_goes_on() -> None:
    entry = running(two=1)
    back = worker_arrived(entry, worker("w2", incarnation="i2", slots=1), BASE, 7)
    assert isinstance(back, Change)
    assert back.pool.mounts["ad_2"].state is AdapterState.LOADING
    assert back.pool.canaries == entry.canaries
    assert back.pool.mounts["ad_1"].state is AdapterState.READY


def test_a_trial_whose_worker_is_removed_is_over_and_the_stable_version_serves_on() -> None:
    after = worker_removed(running(two=1), "w2", 7).pool
    assert (after.canaries, after.aliases) == ({}, {"sales": {"tone": "ad_1"}})
    assert set(after.mounts) == {"ad_1"}


def test_a_trial_whose_stable_version_is_lost_stays_and_can_be_promoted() -> None:
    lost = worker_removed(running(two=1), "w1", 7).pool
    assert not lost.aliases["sales"], "the version on trial takes nothing over by itself"
    assert "tone" in lost.canaries["sales"]
    done = promote(lost, "sales", "tone", 0, DRAIN, 8)
    assert changed(done).aliases == {"sales": {"tone": "ad_2"}}
    assert len(notes(done)) == 1
