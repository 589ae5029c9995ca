"""Watches trials: hears what routers count of both versions, forms windows by differences, and stops what has to end.

Every registry hears everything and judges for itself (shared/policy/canary_stop.py); the stop is one compare-and-set on the pool's
entry, so that it happens once, whoever comes first.
"""

import asyncio

import msgspec
import structlog

from services.registry.mounting import Mounting
from services.registry.standstill import Standstill
from services.registry.store import Store
from shared.bus import Message
from shared.contracts import adapters, state
from shared.contracts.adapters import Canary, PoolEntry
from shared.contracts.canary import VersionCounts, decode_counts
from shared.errors import TenantryError
from shared.policy.canary import STOPPED, stop, stopped_note
from shared.policy.canary_stop import Counts, plus, verdict
from shared.policy.canary_window import Readings
from shared.policy.lifecycle import AdapterState
from shared.policy.mounts import Change, Outcome

log = structlog.get_logger()

_FORGOTTEN_S, _FORGOTTEN_WINDOWS = 3600.0, 20  # a router's counters that stood still so long begin anew; until then a late request counts
_REPAIR_S = 2.0  # a stop that its version's record does not tell after this long is told by whoever sees it


class _Trial:
    """All that was heard of one run of one trial."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], Readings] = {}  # by (router_id, adapter_id)
        self.window_s = 60.0

    def forget(self, before_s: float) -> None:
        """Routers that have told nothing new since."""
        self.counters = {name: counter for name, counter in self.counters.items() if counter.at_s >= before_s}

    def over(self, adapter_id: str, from_s: float) -> Counts:
        total = Counts()
        for (_, of), counter in self.counters.items():
            if of == adapter_id:
                total = plus(total, counter.over(from_s))
        return total


class CanaryWatch:
    """`heard` is the subscription's handler, `run` judges every second."""

    def __init__(self, store: Store, mounting: Mounting, tick_s: float) -> None:
        self._store = store
        self._mounting = mounting
        self._tick_s = tick_s
        self._trials: dict[tuple[str, int], _Trial] = {}  # by (adapter_id on trial, how often it was resumed)
        self._runs: dict[str, int] = {}  # adapter_id on trial -> resumed, of those that run
        self._untold = Standstill()
        self._told: set[tuple[str, int]] = set()  # stops that their version's record tells
        self._decoded: dict[str, tuple[PoolEntry, int]] = {}

    def heard(self, message: Message) -> None:
        try:
            told = decode_counts(message.data)
        except msgspec.MsgspecError as error:
            log.error("canary.counts_malformed", subject=message.subject, error=str(error))
            return
        now_s = asyncio.get_running_loop().time()
        for row in told.versions:
            trial = self._trials.setdefault((row.trial, self._runs.get(row.trial, 0)), _Trial())
            counter = trial.counters.get((told.router_id, row.adapter_id))
            if counter is None or row.number == 0:  # a router that counts from the start again
                trial.counters[told.router_id, row.adapter_id] = Readings(now_s, _counts(row), row.number)
            else:
                counter.read(now_s, _counts(row), row.number, trial.window_s)

    def figures(self, canary: Canary, adapter_id: str) -> Counts:
        """Of one version over the trial's window, as heard here."""
        trial = self._trials.get((canary.adapter_id, canary.resumed))
        now_s = asyncio.get_running_loop().time()
        return trial.over(adapter_id, now_s - canary.stop.window_s) if trial is not None else Counts()

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                await self._round()
            except Exception:
                log.exception("canary.watch_failed")

    async def _round(self) -> None:
        now_s = asyncio.get_running_loop().time()
        kept: dict[tuple[str, int], _Trial] = {}
        runs: dict[str, int] = {}
        found: list[tuple[PoolEntry, int, str, str, Canary]] = []
        for pool, revision in self._pools():
            for tenant, trials in pool.canaries.items():
                for alias, canary in trials.items():
                    name = (canary.adapter_id, canary.resumed)
                    runs[canary.adapter_id] = canary.resumed
                    kept[name] = self._trials.get(name) or _Trial()
                    kept[name].window_s = canary.stop.window_s
                    kept[name].forget(now_s - max(_FORGOTTEN_S, _FORGOTTEN_WINDOWS * canary.stop.window_s))
                    found.append((pool, revision, tenant, alias, canary))
        self._runs, self._trials = runs, kept
        self._told &= kept.keys()
        self._untold.keep({adapter_id for adapter_id, _ in kept})
        for pool, revision, tenant, alias, canary in found:
            try:
                await self._look_at(pool, revision, tenant, alias, canary)
            except TenantryError as error:  # this trial again in the next round; the others now
                log.warning("canary.watch_failed", adapter=canary.adapter_id, code=error.code, message=error.message)
            except Exception:
                log.exception("canary.watch_failed", adapter=canary.adapter_id)

    async def _look_at(self, pool: PoolEntry, revision: int, tenant: str, alias: str, canary: Canary) -> None:
        if not canary.stopped:
            await self._judge(pool, tenant, alias, canary)
        elif (canary.adapter_id, canary.resumed) not in self._told:
            await self._tell_stop(pool, revision, canary)

    def _pools(self) -> list[tuple[PoolEntry, int]]:
        """As mirrored; decoded once per revision."""
        decoded: dict[str, tuple[PoolEntry, int]] = {}
        for key, entry in self._store.live_mirror.entries.items():
            if key.startswith(state.POOL_PREFIX):
                known = self._decoded.get(key)
                is_known = known is not None and known[1] == entry.revision
                decoded[key] = known if known is not None and is_known else (adapters.decode_pool(entry.value), entry.revision)
        self._decoded = decoded
        return list(decoded.values())

    async def _judge(self, pool: PoolEntry, tenant: str, alias: str, canary: Canary) -> None:
        stable_id = pool.aliases.get(tenant, {}).get(alias, "")
        reason = verdict(self.figures(canary, stable_id), self.figures(canary, canary.adapter_id), canary.stop)
        if not reason:
            return

        async def decide(entry: PoolEntry, revision: int) -> Change | None:
            return stop(entry, tenant, alias, canary, reason, revision)

        done = await self._mounting.change(pool.pool_id, decide)
        if done is not None:
            log.warning("canary.stopped", tenant=tenant, alias=alias, adapter=canary.adapter_id, reason=reason)

    async def _tell_stop(self, pool: PoolEntry, revision: int, canary: Canary) -> None:
        """The registry that stopped it may have died before the version's record said so."""
        record = await self._store.record(canary.adapter_id)
        mount = pool.mounts[canary.adapter_id]
        note = stopped_note(canary.stopped)
        if record is None or mount.state is not AdapterState.READY:
            return
        if any(step.note == note for step in record.history):
            self._told.add((canary.adapter_id, canary.resumed))
            return
        loop = asyncio.get_running_loop()
        if self._untold.for_s(canary.adapter_id, (canary.stopped, canary.resumed), loop.time()) >= _REPAIR_S:
            await self._mounting.record(pool.pool_id, Outcome(mount=mount, state=mount.state, action=STOPPED, note=note), revision)


def _counts(row: VersionCounts) -> Counts:
    return Counts(requests=row.requests, errors=row.errors, refused=row.refused, first_byte=row.first_byte)
