"""Trials as people manage them: list, change, promote, roll back. One starts by being added (adapters.py), and ends by itself in
canary_watch.py.
"""

from collections.abc import Callable

import structlog

from services.registry.canary_watch import CanaryWatch
from services.registry.mounting import Decide, Mounting
from services.registry.store import Store
from shared.contracts import admin
from shared.contracts.adapters import Canary, DrainOrder, PoolEntry
from shared.errors import InvalidRequest, NotFound, TenantryError
from shared.policy import canary as policy
from shared.policy.canary import TermsChange, trial_of
from shared.policy.canary_stop import Counts
from shared.policy.mounts import Change

log = structlog.get_logger()

Ending = Callable[[PoolEntry, str, str, int, DrainOrder, int], Change | TenantryError]


class CanaryService:
    def __init__(self, store: Store, mounting: Mounting, watch: CanaryWatch) -> None:
        self._store = store
        self._mounting = mounting
        self._watch = watch

    async def listed(self, request: admin.ListCanaries) -> list[admin.CanaryView]:
        """With what this registry has heard of both versions in the trial's window."""
        if request.tenant:
            await self._store.tenant(request.tenant)
        return [
            self._view(pool, tenant, alias, trial)
            for _, (pool, _) in sorted((await self._store.pools()).items())
            for tenant, trials in sorted(pool.canaries.items())
            for alias, trial in sorted(trials.items())
            if request.tenant in ("", tenant) and request.name in ("", alias)
        ]

    async def change(self, request: admin.ChangeCanary) -> admin.CanaryView:
        """:raises NotFound: no trial. :raises InvalidRequest: a term is out of bounds."""
        wanted = TermsChange(share_ppm=request.share_ppm, by=request.by, stop=request.stop, resume=request.resume)

        async def decide(pool: PoolEntry, revision: int) -> Change | TenantryError:
            return policy.change(pool, request.tenant, request.name, wanted, revision)

        changed = await self._carry_out(request.tenant, request.name, decide)
        trial = trial_of(changed, request.tenant, request.name)
        assert trial is not None
        log.info("canary.changed", tenant=request.tenant, alias=request.name, terms=policy.said(trial))
        return self._view(changed, request.tenant, request.name, trial)

    async def promote(self, request: admin.PromoteCanary) -> admin.CanaryView:
        """As it was until then.

        :raises NotFound: no trial. :raises Conflict: another version's, one that is not ready, or one that was stopped.
        """
        return await self._end(request, policy.promote, "canary.promoted")

    async def roll_back(self, request: admin.RollBackCanary) -> admin.CanaryView:
        """As it was until then.

        :raises NotFound: no trial. :raises Conflict: another version's.
        """
        return await self._end(request, policy.roll_back, "canary.rolled_back")

    async def _end(self, request: admin.PromoteCanary | admin.RollBackCanary, decision: Ending, event: str) -> admin.CanaryView:
        if not request.deadline_s > 0:
            raise InvalidRequest(f"deadline_s is {request.deadline_s}; expected more than 0", field="deadline_s")
        drain = DrainOrder(deadline_s=request.deadline_s, on_deadline=request.on_deadline)
        before: PoolEntry | None = None

        async def decide(pool: PoolEntry, revision: int) -> Change | TenantryError:
            nonlocal before
            before = pool
            return decision(pool, request.tenant, request.name, request.version, drain, revision)

        await self._carry_out(request.tenant, request.name, decide)
        assert before is not None
        trial = trial_of(before, request.tenant, request.name)
        assert trial is not None
        view = self._view(before, request.tenant, request.name, trial)
        log.info(event, tenant=request.tenant, alias=request.name, version=view.version, stable_version=view.stable_version)
        return view

    async def _carry_out(self, tenant: str, name: str, decide: Decide) -> PoolEntry:
        """:raises NotFound: no pool has a trial of this name."""
        await self._store.tenant(tenant)
        for pool_id, (pool, _) in (await self._store.pools()).items():
            if trial_of(pool, tenant, name) is not None:
                done = await self._mounting.change(pool_id, decide)
                assert done is not None
                return done[0].pool
        raise NotFound(f"tenant {tenant} has no version of {name} on trial", tenant=tenant, adapter=name)

    def _view(self, pool: PoolEntry, tenant: str, alias: str, trial: Canary) -> admin.CanaryView:
        mount = pool.mounts[trial.adapter_id]
        stable = pool.mounts.get(pool.aliases.get(tenant, {}).get(alias, ""))
        return admin.CanaryView(
            tenant=tenant,
            name=alias,
            pool_id=pool.pool_id,
            stable_version=stable.version if stable is not None else 0,
            version=mount.version,
            state=mount.state,
            share_ppm=trial.share_ppm,
            by=trial.by,
            stop=trial.stop,
            started_at=trial.started_at,
            stopped=trial.stopped,
            stable=_figures(self._watch.figures(trial, stable.adapter_id)) if stable is not None else admin.TrialFigures(),
            trial=_figures(self._watch.figures(trial, trial.adapter_id)),
        )


def _figures(counts: Counts) -> admin.TrialFigures:
    return admin.TrialFigures(
        requests=counts.requests,
        errors=counts.errors,
        refused=counts.refused,
        p50_ms=counts.quantile_ms(0.5),
        p95_ms=counts.quantile_ms(0.95),
    )
