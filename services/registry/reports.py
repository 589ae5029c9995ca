"""What workers last said of themselves, as this registry heard it."""

import asyncio

import msgspec
import structlog

from shared.bus import Message
from shared.contracts import workers
from shared.contracts.adapters import PoolEntry
from shared.contracts.workers import WorkerReport
from shared.policy.shares import Use

log = structlog.get_logger()

_MAX_REPORTS = 4096


class Reports:
    """By worker_id; the newest heard."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[WorkerReport, float]] = {}

    def heard(self, message: Message) -> None:
        try:
            report = workers.decode_report(message.data)
        except msgspec.MsgspecError as error:
            log.warning("worker.report_malformed", subject=message.subject, error=str(error))
            return
        if report.worker_id in self._heard or len(self._heard) < _MAX_REPORTS:
            self._heard[report.worker_id] = (report, asyncio.get_running_loop().time())

    @property
    def busy(self) -> bool:
        """Whether any tenant uses or waits for anything."""
        return any(report.tenants for report, _ in self._heard.values())

    def forget(self, worker_id: str) -> None:
        self._heard.pop(worker_id, None)

    def last(self, worker_id: str) -> tuple[WorkerReport | None, float]:
        """The report and its age in seconds; -1 where none was heard."""
        found = self._heard.get(worker_id)
        return (found[0], round(asyncio.get_running_loop().time() - found[1], 3)) if found else (None, -1.0)

    def uses(self, pool: PoolEntry) -> "PoolUses":
        """What the pool's present workers use, as they last reported."""
        found = [report for worker_id in pool.workers if (report := self.last(worker_id)[0]) is not None]
        return PoolUses([report for report in found if report.incarnation == pool.workers[report.worker_id].incarnation])


class PoolUses:
    """A tenant that a report does not name uses nothing there."""

    def __init__(self, reports: list[WorkerReport]) -> None:
        self._idle = {
            report.worker_id: Use(incarnation=report.incarnation, revision=report.shares_revision) for report in reports
        }  # fmt: skip
        self._busy: dict[str, dict[str, Use]] = {}
        for report in reports:
            for tenant in report.tenants:
                self._busy.setdefault(tenant.tenant_id, {})[report.worker_id] = Use(
                    incarnation=report.incarnation,
                    revision=report.shares_revision,
                    running=tenant.running,
                    waiting=tenant.waiting,
                    kv_bytes=tenant.kv_bytes,
                )

    def of(self, tenant_id: str) -> dict[str, Use]:
        busy = self._busy.get(tenant_id)
        return {**self._idle, **busy} if busy else self._idle

    def busy(self, tenant_id: str) -> bool:
        return tenant_id in self._busy
