"""What this router saw of both versions of an alias with one on trial: counted at each request's end, told to registries every second."""

import asyncio

import structlog

from services.router.exchange import Exchange
from services.router.routes import RouteTable
from shared.bus import Bus, BusUnavailable
from shared.contracts.canary import ROWS_LIMIT, CanaryCounts, VersionCounts, counts_subject, encode
from shared.policy.canary_stop import bucket_of

log = structlog.get_logger()

_TICK_S = 1.0
_ENGINE_REFUSED = "error:engine_status_4"
_CLIENTS_OWN = frozenset({"error:client_too_slow"})


class _Row:
    """One version's counters; `number`: how often they have been told."""

    __slots__ = ("changed", "errors", "first_byte", "number", "refused", "requests", "trial")

    def __init__(self, trial: str) -> None:
        self.trial = trial
        self.requests = 0
        self.errors = 0
        self.refused = 0
        self.first_byte: dict[int, int] = {}
        self.number = 0
        self.changed = True


class Trials:
    """`ended` is all that the request path calls."""

    def __init__(self, bus: Bus, table: RouteTable, router_id: str) -> None:
        self._bus = bus
        self._table = table
        self._router_id = router_id
        self._rows: dict[str, _Row] = {}  # by adapter_id

    def follow(self) -> None:
        """Counts what is on trial now, and what it is compared with; called when pools change."""
        rows: dict[str, _Row] = {}
        for pool in self._table.pools.values():
            for tenant, trials in pool.entry.canaries.items():
                for alias, canary in trials.items():
                    for adapter_id in (canary.adapter_id, pool.entry.aliases.get(tenant, {}).get(alias, "")):
                        known = self._rows.get(adapter_id)
                        kept = known is not None and known.trial == canary.adapter_id
                        rows[adapter_id] = known if known is not None and kept else _Row(canary.adapter_id)
        rows.pop("", None)
        self._rows = rows

    def ended(self, exchange: Exchange, first_byte_s: float) -> None:
        """`first_byte_s` from the request's head; 0: there was none."""
        if not self._rows or exchange.handle is None:
            return
        row = self._rows.get(exchange.handle.adapter_id)
        if row is None:
            return
        if exchange.outcome.startswith(_ENGINE_REFUSED):
            row.changed = True
            row.refused += 1
            return
        failed = _failed(exchange)
        if failed is None:
            return
        row.changed = True
        row.requests += 1
        if failed:
            row.errors += 1
        if first_byte_s > 0:
            bucket = bucket_of(first_byte_s * 1000.0)
            row.first_byte[bucket] = row.first_byte.get(bucket, 0) + 1

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._bus.connected:
                await self._tell()

    async def _tell(self) -> None:
        changed = [(adapter_id, row) for adapter_id, row in self._rows.items() if row.changed]
        for start in range(0, len(changed), ROWS_LIMIT):
            part = changed[start : start + ROWS_LIMIT]
            versions = tuple(
                VersionCounts(
                    trial=row.trial,
                    adapter_id=adapter_id,
                    requests=row.requests,
                    errors=row.errors,
                    refused=row.refused,
                    first_byte=row.first_byte,
                    number=row.number,
                )
                for adapter_id, row in part
            )
            try:
                await self._bus.publish(counts_subject(self._router_id), encode(CanaryCounts(router_id=self._router_id, versions=versions)))
            except BusUnavailable as error:
                log.warning("trials.not_told", error=error.message)
                return
            for _, row in part:
                row.changed = False
                row.number += 1


def _failed(exchange: Exchange) -> bool | None:
    """Whether the version owed an answer and did not give it; None: the client's own doing, which says nothing of the version."""
    if exchange.outcome == "complete":
        return False
    if not exchange.outcome.startswith("error:") or exchange.outcome in _CLIENTS_OWN:
        return None
    broken_off = exchange.status < 400
    return True if broken_off or exchange.status >= 500 else None
