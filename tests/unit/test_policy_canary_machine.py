"""Trials among everything else that happens to a pool's entry, in any order: the ledger's machine with trials in it."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from shared.contracts.adapters import Canary, DrainOrder, PoolEntry
from shared.errors import TenantryError
from shared.policy import canary as policy
from shared.policy.admission import Reserved, decide
from shared.policy.canary import TermsChange, leaves_trial_alone, trial_of
from shared.policy.lifecycle import AdapterState
from shared.policy.mounts import Change
from tests.unit.pool_values import ask
from tests.unit.test_policy_admission import Ledger

PRESENT = (AdapterState.ADMITTED, AdapterState.LOADING, AdapterState.READY)


class Trials(Ledger):
    def decided(self, outcome: Change | TenantryError | None) -> PoolEntry | None:
        """The entry before, if the decision was carried out."""
        before = self.entry
        if isinstance(outcome, Change):
            self.take(outcome)
            return before
        return None

    @rule(owner=Ledger.owners, name=Ledger.names, number=st.integers(1, 4), share=st.sampled_from([0, 100_000, 1_000_000]))
    def a_trial_is_started(self, owner: str, name: str, number: int, share: int) -> None:
        adapter_id = f"ad_{owner}_{name}_{number}"
        if adapter_id in self.entry.mounts:
            return
        trial = Canary(adapter_id=adapter_id, share_ppm=share)
        wanted = msgspec.structs.replace(ask(name, adapter_id, rank=4, version=number), trial=trial)
        aliases = self.entry.aliases
        outcome = decide(self.entry, self.tenants[owner], wanted, self.revision)
        if isinstance(outcome, Reserved):
            self.entry, self.revision = outcome.pool, self.revision + 1
            assert trial_of(self.entry, owner, name) == trial
            assert self.entry.aliases == aliases

    @rule(number=st.integers(1, 4))
    def the_upgraded_name_tries_a_version(self, number: int) -> None:
        self.a_trial_is_started("sales", "one", number, 100_000)

    @rule(owner=Ledger.owners, name=Ledger.names)
    def a_trial_is_promoted(self, owner: str, name: str) -> None:
        before = self.decided(policy.promote(self.entry, owner, name, 0, DrainOrder(), self.revision))
        if before is not None:
            trial = trial_of(before, owner, name)
            assert trial is not None
            assert before.mounts[trial.adapter_id].state is AdapterState.READY
            assert self.entry.aliases[owner][name] == trial.adapter_id
            assert trial_of(self.entry, owner, name) is None

    @rule(owner=Ledger.owners, name=Ledger.names)
    def a_trial_is_rolled_back(self, owner: str, name: str) -> None:
        before = self.decided(policy.roll_back(self.entry, owner, name, 0, DrainOrder(), self.revision))
        if before is not None:
            assert self.entry.aliases == before.aliases
            assert trial_of(self.entry, owner, name) is None

    @rule(owner=Ledger.owners, name=Ledger.names, resume=st.booleans())
    def a_trial_is_stopped_or_changed(self, owner: str, name: str, resume: bool) -> None:
        trial = trial_of(self.entry, owner, name)
        if trial is not None:
            before = self.decided(policy.stop(self.entry, owner, name, trial, "it fails", self.revision))
            assert (before is None) == bool(trial.stopped)
            self.decided(policy.change(self.entry, owner, name, TermsChange(share_ppm=5, resume=resume), self.revision))
            after = trial_of(self.entry, owner, name)
            assert after is not None
            assert bool(after.stopped) is not resume

    @rule(owner=Ledger.owners, name=Ledger.names)
    def a_name_is_unloaded_whole_and_its_stable_version_never_alone(self, owner: str, name: str) -> None:
        ids = [mount.adapter_id for mount in self.entry.mounts.values() if (mount.tenant, mount.name) == (owner, name)]
        trial, stable = trial_of(self.entry, owner, name), self.entry.aliases.get(owner, {}).get(name, "")
        assert leaves_trial_alone(self.entry, ids) is None
        assert (leaves_trial_alone(self.entry, [stable]) is not None) == (trial is not None and stable in self.entry.mounts)

    @invariant()
    def a_trial_is_of_a_version_of_its_name_that_is_there_and_not_the_aliass(self) -> None:
        for owner, trials in self.entry.canaries.items():
            assert trials, "no tenant without a trial is left in the entry"
            for name, trial in trials.items():
                mount = self.entry.mounts[trial.adapter_id]
                assert (mount.tenant, mount.name, mount.on_trial) == (owner, name, True)
                assert mount.state in PRESENT
                assert self.entry.aliases.get(owner, {}).get(name) != trial.adapter_id

    @invariant()
    def a_version_on_trial_that_does_not_drain_has_its_trial(self) -> None:
        for mount in self.entry.mounts.values():
            if mount.on_trial and mount.state in PRESENT:
                trial = trial_of(self.entry, mount.tenant, mount.name)
                assert trial is not None
                assert trial.adapter_id == mount.adapter_id

    @invariant()
    def a_name_has_at_most_two_versions_that_do_not_drain(self) -> None:
        present = [(mount.tenant, mount.name) for mount in self.entry.mounts.values() if mount.state in PRESENT]
        assert all(present.count(name) <= 2 for name in present)


TestTrials = Trials.TestCase
TestTrials.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
