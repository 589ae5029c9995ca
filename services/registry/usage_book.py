"""The usage stream folded into amounts: every record counts once, in the transaction that also keeps the stream's sequence.

`apply` is a function of what the stream holds and nothing else; whoever applies the same messages holds the same lines.
"""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog

from services.registry.usage_days import close_days, iso_day, restore
from services.registry.usage_snapshots import Pending, day_object, state_object
from services.registry.usage_tables import get, get_number, open_tables, post, put
from shared.bus import Stored
from shared.contracts.usage import AttemptUsage, EngineEnded, EngineTime, RequestOutcome, Residency, Usage, decode_batch, decode_one
from shared.policy.usage_rollup import (
    Amounts,
    amounts_of_attempt,
    amounts_of_outcome,
    dimensions_of,
    minus,
    open_day_at,
    problem,
    quarter_of,
    residency_parts,
)

log = structlog.get_logger()

OPEN, FINAL, PARTIAL = 0, 1, 2  # `closed` of an attempt

_NOTHING = Amounts()
_FOREVER_MS = 1 << 62
_encode = msgspec.msgpack.Encoder().encode
_decode_attempt = msgspec.msgpack.Decoder(AttemptUsage).decode
_decode_outcome = msgspec.msgpack.Decoder(RequestOutcome).decode
_decode_amounts = msgspec.msgpack.Decoder(Amounts).decode


class OpenEngine(msgspec.Struct, frozen=True):
    """An incarnation with attempts that stand open; the stamps of their newest checkpoints: the youngest, and the oldest."""

    worker_id: str
    incarnation: str
    newest_ms: int
    oldest_ms: int
    attempts: int


def _no_failpoint(_name: str) -> None:
    pass


class UsageBook:
    """For one thread at a time. `failpoint` is called with the name of each step, so that tests can end it there."""

    def __init__(self, path: Path, failpoint: Callable[[str], None] = _no_failpoint) -> None:
        self.path = path
        self.connection = open_tables(path)
        self._failpoint = failpoint

    def close(self) -> None:
        self.connection.close()

    @property
    def sequence(self) -> int:
        """Of the last message that was applied."""
        return get_number(self.connection, "sequence")

    @property
    def created(self) -> str:
        """The stream's mark that these sequences belong to."""
        return get(self.connection, "created")

    def begin(self, created: str) -> None:
        """An empty book takes the stream's mark."""
        put(self.connection, "created", created)

    def apply(self, messages: Sequence[Stored]) -> None:
        """Those that were applied before are passed over."""
        self._failpoint("fetched")
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            sequence = self.sequence
            fold = _Fold(self.connection)
            for message in messages:
                if message.sequence > sequence:
                    fold.take(message)
                    sequence = message.sequence
                    self._failpoint("message")
            put(self.connection, "sequence", sequence)
            self._failpoint("before commit")
            self.connection.execute("COMMIT")
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self._failpoint("after commit")

    def open_engines(self) -> list[OpenEngine]:
        rows = self.connection.execute(
            "SELECT worker_id, incarnation, MAX(stamp_ms), MIN(stamp_ms), COUNT(*) FROM attempts WHERE closed = 0"
            " GROUP BY worker_id, incarnation"
        )
        return [OpenEngine(*row) for row in rows]

    def pending(self) -> list[Pending]:
        """What was closed and is not in the object store yet: days first, then the newest state, which needs them."""
        days = self.connection.execute("SELECT day, content FROM days WHERE stored = 0 ORDER BY day").fetchall()
        states = self.connection.execute("SELECT sequence, content, stored FROM states ORDER BY sequence DESC LIMIT 1").fetchall()
        found = [Pending("days", day, day_object(self.created, iso_day(day)), content) for day, content in days]
        return found + [
            Pending("states", sequence, state_object(self.created, sequence), content) for sequence, content, stored in states if not stored
        ]

    def mark_stored(self, pending: Pending) -> None:
        self._failpoint("snapshot stored")
        if pending.table == "days":
            self.connection.execute("UPDATE days SET stored = 1, content = NULL WHERE day = ?", (pending.key,))
        else:
            self.connection.execute("UPDATE states SET stored = 1 WHERE sequence = ?", (pending.key,))
        self._failpoint("snapshot marked")

    def restore(self, state: bytes, days: dict[str, bytes]) -> None:
        """Only into an empty book.

        :raises SnapshotCorrupt: a day is not what was closed.
        """
        restore(self.connection, state, days)

    def spare_before(self, keep_days: int) -> int:
        """The stream's messages before this sequence are in snapshots that are stored, and of days closed keep_days ago; 0: none are."""
        if self.pending():
            return 0
        oldest = get_number(self.connection, "open_day") - keep_days
        found = self.connection.execute("SELECT MAX(sequence) FROM days WHERE day < ?", (oldest,)).fetchone()[0]
        return found + 1 if found else 0

    def held_until(self) -> dict[str, int]:
        """Up to when residency is known, by pool."""
        return dict(self.connection.execute("SELECT pool_id, MAX(until_ms) FROM residency GROUP BY pool_id"))


class _Fold:
    """Applies messages one after another within the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._open_day = get_number(connection, "open_day")
        self._epoch = get_number(connection, "epoch")
        self._named: dict[str, str] = {}

    def take(self, message: Stored) -> None:
        opens = open_day_at(message.stamp_ms)
        if opens > self._open_day:
            if self._open_day:
                self._epoch = close_days(self._connection, self._open_day, opens, message.sequence - 1)
            self._open_day = opens
            put(self._connection, "open_day", opens)
        for record in self._records(message):
            quarter = quarter_of(message.stamp_ms, self._open_day)
            match record:
                case AttemptUsage():
                    self._attempt(record, quarter, message.stamp_ms)
                case RequestOutcome():
                    self._outcome(record, quarter)
                case EngineTime():
                    self._engine(record, quarter)
                case Residency():
                    self._residency(record)
                case EngineEnded():
                    self._ended(record, quarter)

    def _records(self, message: Stored) -> list[Usage]:
        found: list[Usage] = []
        try:
            parts = decode_batch(message.data)
        except msgspec.MsgspecError as error:
            self._refuse(message, str(error))
            return found
        for part in parts:
            try:
                record = decode_one(part)
            except msgspec.MsgspecError as error:
                self._refuse(message, str(error))
                continue
            why = problem(record, message.subject, message.stamp_ms)
            if why:
                self._refuse(message, why)
            else:
                found.append(record)
        return found

    def _refuse(self, message: Stored, why: str) -> None:
        log.error("usage.record_refused", sequence=message.sequence, subject=message.subject, error=why)
        put(self._connection, "refused", get_number(self._connection, "refused") + 1)

    def _name(self, tenant_id: str, name: str) -> None:
        if name and self._named.get(tenant_id) != name:
            self._named[tenant_id] = name
            self._connection.execute("INSERT INTO names VALUES (?, ?) ON CONFLICT DO UPDATE SET name = excluded.name", (tenant_id, name))

    def _attempt(self, record: AttemptUsage, quarter: int, stamp_ms: int) -> None:
        key = (record.request_id, record.attempt)
        known = self._connection.execute(
            "SELECT closed, checkpoint, posted FROM attempts WHERE request_id = ? AND attempt = ?", key
        ).fetchone()
        closed, posted = OPEN, None
        if known is not None:
            closed, checkpoint, posted = known
            if closed == FINAL or record.checkpoint <= checkpoint:
                return
        else:
            self._name(record.tenant_id, record.tenant)
        closed = FINAL if record.final else closed
        if closed != OPEN:
            posted = _encode(self._settle(record, closed, posted, quarter))
        self._connection.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET closed = excluded.closed,"
            " epoch = excluded.epoch, checkpoint = excluded.checkpoint, stamp_ms = excluded.stamp_ms, record = excluded.record,"
            " posted = excluded.posted",
            (
                *key, closed, self._epoch, record.checkpoint, record.worker_id, record.incarnation, stamp_ms,
                None if closed == FINAL else _encode(record), None if closed == FINAL else posted,
            ),
        )  # fmt: skip

    def _settle(self, record: AttemptUsage, closed: int, posted: bytes | None, quarter: int) -> Amounts:
        """Posts what the attempt comes to beyond what was posted of it. Once partial, it stays counted as that."""
        before = _decode_amounts(posted) if posted else _NOTHING
        outcome = self._outcome_of(record.request_id) if closed == PARTIAL else None  # its worker's own last word stands alone
        amounts = amounts_of_attempt(record, outcome, partial=closed == PARTIAL or before.partial > 0)
        difference = minus(amounts, before)
        if difference != _NOTHING:
            post(self._connection, quarter, dimensions_of(record), "", difference)
        return amounts

    def _outcome_of(self, request_id: str) -> RequestOutcome | None:
        found = self._connection.execute("SELECT record FROM outcomes WHERE request_id = ?", (request_id,)).fetchone()
        return _decode_outcome(found[0]) if found else None

    def _outcome(self, record: RequestOutcome, quarter: int) -> None:
        if self._connection.execute("SELECT 1 FROM outcomes WHERE request_id = ?", (record.request_id,)).fetchone():
            return
        self._name(record.tenant_id, record.tenant)
        self._connection.execute("INSERT INTO outcomes VALUES (?, ?, ?)", (record.request_id, self._epoch, _encode(record)))
        post(self._connection, quarter, dimensions_of(record), record.outcome or "unknown", amounts_of_outcome(record))
        key = (record.request_id, record.attempts)
        open_end = self._connection.execute(
            "SELECT record, posted FROM attempts WHERE request_id = ? AND attempt = ? AND closed = 2", key
        ).fetchone()  # fmt: skip
        if open_end is not None:
            posted = _encode(self._settle(_decode_attempt(open_end[0]), PARTIAL, open_end[1], quarter))
            self._connection.execute("UPDATE attempts SET posted = ? WHERE request_id = ? AND attempt = ?", (posted, *key))

    def _ended(self, record: EngineEnded, quarter: int) -> None:
        rows = self._connection.execute(
            "SELECT request_id, attempt, record FROM attempts WHERE closed = 0 AND worker_id = ? AND incarnation = ? AND stamp_ms < ?",
            (record.worker_id, record.incarnation, record.before_ms or _FOREVER_MS),
        ).fetchall()
        for request_id, attempt, encoded in rows:
            posted = _encode(self._settle(_decode_attempt(encoded), PARTIAL, None, quarter))
            self._connection.execute(
                "UPDATE attempts SET closed = 2, epoch = ?, posted = ? WHERE request_id = ? AND attempt = ?",
                (self._epoch, posted, request_id, attempt),
            )

    def _engine(self, record: EngineTime, quarter: int) -> None:
        key = (record.worker_id, record.incarnation)
        known = self._connection.execute("SELECT MAX(checkpoint) FROM engines WHERE worker_id = ? AND incarnation = ?", key).fetchone()[0]
        if known is not None and record.checkpoint <= known:
            return
        self._connection.execute(
            "INSERT INTO engines VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET checkpoint = excluded.checkpoint, record = excluded.record",
            (*key, quarter, record.checkpoint, _encode(record)),
        )

    def _residency(self, record: Residency) -> None:
        key = (record.pool_id, record.adapter_id, record.since_ms)
        known = self._connection.execute(
            "SELECT until_ms, final FROM residency WHERE pool_id = ? AND adapter_id = ? AND since_ms = ?", key
        ).fetchone()  # fmt: skip
        until_ms, final = known or (record.since_ms, 0)
        if final or (known and not record.final and record.until_ms <= until_ms):
            return
        self._name(record.tenant_id, record.tenant)
        sign = 1 if record.until_ms >= until_ms else -1  # an end may lie before a checkpoint that saw an entry a moment too old
        begin_ms, end_ms = min(until_ms, record.until_ms), max(until_ms, record.until_ms)
        for quarter, byte_ms in residency_parts(begin_ms, end_ms, record.bytes, self._open_day):
            post(self._connection, quarter, dimensions_of(record), "", Amounts(adapter_byte_ms=sign * byte_ms))
        self._connection.execute(
            "INSERT INTO residency VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET until_ms = excluded.until_ms, final = excluded.final, epoch = excluded.epoch",
            (*key, record.until_ms, int(record.final), self._epoch),
        )
