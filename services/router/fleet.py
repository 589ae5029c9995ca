"""The workers as this router sees them: their reports, our own outstanding work, their incarnations, and whether they are alive.

A worker is gone when pings to it meet no responder again and again, never because it is slow.
"""

import msgspec

from shared.contracts.adapters import PoolWorker
from shared.contracts.workers import WorkerReport

_MISSED_PINGS = 3
_PING_EVERY_S = 0.2
_RECONNECT_GRACE_S = 3.0  # after a reconnect of ours others may still be on their way


class Peer:
    """One worker. Mutable; owned by Fleet."""

    __slots__ = ("heard_s", "incarnation", "missed", "open", "pinged_s", "report", "worker_id")

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.incarnation = ""  # the newest seen; ULIDs, so later ones sort higher (a clock set back: the pool's entry decides)
        self.report: WorkerReport | None = None
        self.open = 0  # attempts of ours that it has and that are not over
        self.heard_s = 0.0
        self.pinged_s = 0.0
        self.missed = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What picking looks at."""

    usable: bool
    waiting: float  # share of its capacity that is asked for


class Fleet:
    """Peers by worker_id; made as they are met."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}
        self.registered: dict[str, str] = {}  # worker_id -> the incarnation that its pool's entry names
        self._turn = 0

    def peer(self, worker_id: str) -> Peer:
        found = self.peers.get(worker_id)
        if found is None:
            found = self.peers[worker_id] = Peer(worker_id)
        return found

    def heard(self, worker_id: str, incarnation: str, now_s: float) -> str | None:
        """A message of this incarnation came. None: it is of one that has been replaced, believe nothing of it.

        Otherwise the incarnation that it replaces ("" when none): what that one ran is lost.
        """
        peer = self.peer(worker_id)
        peer.heard_s = now_s
        peer.missed = 0
        if incarnation == peer.incarnation:
            return ""
        if incarnation < peer.incarnation and incarnation != self.registered.get(worker_id):
            return None
        replaced, peer.incarnation = peer.incarnation, incarnation
        return replaced

    def reported(self, report: WorkerReport, now_s: float) -> str | None:
        """As `heard`, and keeps the report."""
        replaced = self.heard(report.worker_id, report.incarnation, now_s)
        if replaced is not None:
            self.peer(report.worker_id).report = report
        return replaced

    def reports(self) -> list[WorkerReport]:
        """The last one of every incarnation that stands in a pool's entry."""
        found = (self.peers.get(worker_id) for worker_id in self.registered)
        reports = [peer.report for peer in found if peer is not None and peer.report is not None]
        return [report for report in reports if report.incarnation == self.registered[report.worker_id]]

    def pick(self, workers: tuple[PoolWorker, ...], avoid: set[str]) -> PoolWorker | None:
        """The least loaded of those not to be avoided; equals take turns."""
        self._turn += 1
        best: PoolWorker | None = None
        best_load = Load(usable=False, waiting=float("inf"))
        for index in range(len(workers)):
            worker = workers[(index + self._turn) % len(workers)]
            if worker.worker_id in avoid:
                continue
            load = self._load(worker)
            if best is None or (load.usable, -load.waiting) > (best_load.usable, -best_load.waiting):
                best, best_load = worker, load
        return best

    def _load(self, worker: PoolWorker) -> Load:
        peer = self.peers.get(worker.worker_id)
        if peer is None:
            return Load(usable=True, waiting=0.0)
        report = peer.report
        if report is None or report.incarnation != peer.incarnation:
            return Load(usable=True, waiting=float(peer.open))
        asked = max(report.in_flight + report.waiting, peer.open)
        return Load(usable=report.state == "ready", waiting=asked / max(report.capacity, 1))

    def to_ping(self, now_s: float) -> list[Peer]:
        """Workers that have work of ours and have said nothing lately; counts as asked now."""
        due = [
            peer
            for peer in self.peers.values()
            if peer.open > 0 and now_s - peer.heard_s >= _PING_EVERY_S and now_s - peer.pinged_s >= _PING_EVERY_S
        ]
        for peer in due:
            peer.pinged_s = now_s
        return due

    def missed_ping(self, worker_id: str, connected_for_s: float) -> bool:
        """Nobody listens where it should. True when that makes it gone."""
        peer = self.peer(worker_id)
        if connected_for_s < _RECONNECT_GRACE_S:
            peer.missed = 0
            return False
        peer.missed += 1
        return peer.missed >= _MISSED_PINGS
