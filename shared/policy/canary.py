"""What happens to a pool's entry when a trial is changed, promoted, rolled back or stopped.

A trial starts with its version's reservation (admission.py) and is over when that version leaves the routes (mounts.py). While
it runs, its name gets no third version, and the version that serves cannot be unloaded by itself.
"""

from collections.abc import Collection

import msgspec

from shared.contracts.adapters import Canary, CanaryBy, CanaryStop, CanaryTerms, DrainOrder, PoolEntry
from shared.errors import Conflict, InvalidRequest, NotFound, TenantryError
from shared.policy.lifecycle import AdapterState
from shared.policy.mounts import Change, Draft

WHOLE_PPM = 1_000_000
STOPPED = "canary.stopped"
_BOUNDS: dict[str, tuple[float, float]] = {
    "window_s": (5.0, 3600.0),
    "min_requests": (1, 1_000_000),
    "error_rate_margin": (0.0, 1.0),  # 1: never
    "latency_ratio": (1.0, 1000.0),
}


class TermsChange(msgspec.Struct, frozen=True, kw_only=True):
    """None leaves a term as it is. `stop`: fields of CanaryStop. `resume`: a trial that was stopped runs again."""

    share_ppm: int | None = None
    by: CanaryBy | None = None
    stop: dict[str, float] = {}
    resume: bool = False


def changed_terms(terms: CanaryTerms, change: TermsChange) -> CanaryTerms | InvalidRequest:
    """The terms with the change in them, or which is out of bounds."""
    for name, value in change.stop.items():
        if name not in _BOUNDS:
            return InvalidRequest(f"there is no stop.{name[:40]}; known are: {', '.join(_BOUNDS)}", field=f"stop.{name[:40]}")
        lowest, highest = _BOUNDS[name]
        if not lowest <= value <= highest:  # NaN is nowhere
            return InvalidRequest(f"stop.{name} is {value:g}; expected {lowest:g} to {highest:g}", field=f"stop.{name}", got=str(value))
    share_ppm = terms.share_ppm if change.share_ppm is None else change.share_ppm
    if not 0 <= share_ppm <= WHOLE_PPM:
        return InvalidRequest(f"share_ppm is {share_ppm}; expected 0 to {WHOLE_PPM}", field="share_ppm", got=share_ppm)
    values = {name: int(value) if name == "min_requests" else float(value) for name, value in change.stop.items()}
    stop: CanaryStop = msgspec.structs.replace(terms.stop, **values)
    return CanaryTerms(share_ppm=share_ppm, by=terms.by if change.by is None else change.by, stop=stop)


def said(terms: CanaryTerms | Canary) -> str:
    """The terms for people, e.g. "10% by session"."""
    return f"{terms.share_ppm / 10_000:g}% by {terms.by}"


def trial_of(pool: PoolEntry, tenant: str, alias: str) -> Canary | None:
    return pool.canaries.get(tenant, {}).get(alias)


def change(pool: PoolEntry, tenant: str, alias: str, wanted: TermsChange, revision: int) -> Change | TenantryError:
    """Other terms from the next request on."""
    trial = trial_of(pool, tenant, alias)
    if trial is None:
        return _none(alias)
    terms = changed_terms(CanaryTerms(share_ppm=trial.share_ppm, by=trial.by, stop=trial.stop), wanted)
    if isinstance(terms, InvalidRequest):
        return terms
    after = msgspec.structs.replace(trial, share_ppm=terms.share_ppm, by=terms.by, stop=terms.stop)
    runs_again = bool(wanted.resume and trial.stopped)
    if runs_again:
        after = msgspec.structs.replace(after, stopped="", resumed=trial.resumed + 1)
    if after == trial:
        return Change(pool=pool)
    draft = Draft(pool, revision)
    draft.canaries = _with(pool, tenant, alias, after)
    draft.note(pool.mounts[trial.adapter_id], "canary.changed", f"on trial{' again' if runs_again else ''}: {said(after)}")
    return draft.done()


def stop(pool: PoolEntry, tenant: str, alias: str, seen: Canary, reason: str, revision: int) -> Change | None:
    """The trial gets no requests any more; its version stays mounted. None: it is no longer the trial that was judged."""
    trial = trial_of(pool, tenant, alias)
    if trial is None or trial.stopped or (trial.adapter_id, trial.resumed) != (seen.adapter_id, seen.resumed):
        return None
    draft = Draft(pool, revision)
    draft.canaries = _with(pool, tenant, alias, msgspec.structs.replace(trial, stopped=reason))
    draft.note(pool.mounts[trial.adapter_id], STOPPED, stopped_note(reason))
    return draft.done()


def stopped_note(reason: str) -> str:
    return f"trial stopped: {reason}"


def promote(
    pool: PoolEntry, tenant: str, alias: str, version: int, drain: DrainOrder, revision: int
) -> Change | TenantryError:  # fmt: skip
    """The alias is the version's that was on trial; the one that served before drains. `version` 0: whichever is on trial."""
    trial = _named(pool, tenant, alias, version)
    if not isinstance(trial, Canary):
        return trial
    mount = pool.mounts[trial.adapter_id]
    if trial.stopped:
        return Conflict(
            f"the trial of version {mount.version} was stopped: {trial.stopped}; roll it back, or resume it first",
            adapter=alias, version=mount.version, stopped=trial.stopped,
        )  # fmt: skip
    if mount.state is not AdapterState.READY:
        return Conflict(f"version {mount.version} is {mount.state}, not ready", adapter=alias, state=mount.state.value)
    draft = Draft(pool, revision)
    mount = draft.mounts[mount.adapter_id] = msgspec.structs.replace(mount, on_trial=False)
    before = draft.aliases.get(tenant, {}).get(alias, "")
    draft.aliases = {**draft.aliases, tenant: {**draft.aliases.get(tenant, {}), alias: mount.adapter_id}}
    draft.canaries = _with(pool, tenant, alias, None)
    draft.note(mount, "canary.promoted", "promoted: it serves now")
    if before in draft.mounts:
        draft.drain(draft.mounts[before], drain, f"version {mount.version} was promoted")
    return draft.done()


def roll_back(
    pool: PoolEntry, tenant: str, alias: str, version: int, drain: DrainOrder, revision: int
) -> Change | TenantryError:  # fmt: skip
    """The trial is over, and its version drains."""
    trial = _named(pool, tenant, alias, version)
    if not isinstance(trial, Canary):
        return trial
    draft = Draft(pool, revision)
    draft.drain(draft.mounts[trial.adapter_id], drain, "rolled back")
    return draft.done()


def leaves_trial_alone(pool: PoolEntry, adapter_ids: Collection[str]) -> Conflict | None:
    """A version that serves is not unloaded from beside the one on trial: neither may take over what nobody decided."""
    for tenant, trials in pool.canaries.items():
        for alias, trial in trials.items():
            stable = pool.aliases.get(tenant, {}).get(alias, "")
            if stable and stable in adapter_ids and trial.adapter_id not in adapter_ids:
                version = pool.mounts[trial.adapter_id].version
                return Conflict(
                    f"version {version} of {alias} is on trial: promote it or roll it back first, or unload both",
                    adapter=alias,
                    version=version,
                )
    return None


def _named(pool: PoolEntry, tenant: str, alias: str, version: int) -> Canary | TenantryError:
    trial = trial_of(pool, tenant, alias)
    if trial is None:
        return _none(alias)
    on_trial = pool.mounts[trial.adapter_id].version
    if version not in (0, on_trial):
        return Conflict(f"version {on_trial} of {alias} is on trial, not {version}", adapter=alias, version=on_trial)
    return trial


def _none(alias: str) -> NotFound:
    return NotFound(f"no version of {alias} is on trial", adapter=alias)


def _with(pool: PoolEntry, tenant: str, alias: str, trial: Canary | None) -> dict[str, dict[str, Canary]]:
    trials = {name: known for name, known in pool.canaries.get(tenant, {}).items() if name != alias}
    if trial is not None:
        trials[alias] = trial
    others = {owner: known for owner, known in pool.canaries.items() if owner != tenant}
    return {**others, tenant: trials} if trials else others
