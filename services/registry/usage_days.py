"""Closed days: what they came to, as canonical bytes with a digest, and the state from which the stream goes on after them.

Whoever has applied the same messages makes the same bytes. With the days and the newest state, only the stream after that state's
sequence is needed to hold everything again.
"""

import hashlib
import sqlite3
from datetime import date
from typing import Any

import msgspec

from services.registry.usage_tables import COLUMNS, DIMENSIONS, amounts_of, get, get_number, post, put
from shared.errors import TenantryError
from shared.policy.usage_rollup import QUARTERS, REMEMBERED_CLOSINGS, Amounts, Dimensions

_STATES_KEPT = 3

Row = tuple[Any, ...]


class Line(msgspec.Struct, frozen=True, array_like=True):
    quarter: int
    dimensions: Dimensions
    outcome: str
    amounts: Amounts


class DayContent(msgspec.Struct, frozen=True, kw_only=True):
    day: str  # ISO, UTC
    lines: list[Line]
    engines: list[Row]


class StateContent(msgspec.Struct, frozen=True, kw_only=True):
    """Rows as the tables have them. `lines` and `engines`: of days that were open."""

    sequence: int
    created: str
    open_day: int
    epoch: int
    refused: int
    days: dict[str, str]  # ISO day -> digest of its content
    names: list[Row]
    attempts: list[Row]
    outcomes: list[Row]
    residency: list[Row]
    lines: list[Line]
    engines: list[Row]


class SnapshotCorrupt(TenantryError):
    """A day's content is not what the state says of it: day, expected, got (SHA-256)."""

    code = "snapshot_corrupt"


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decode_day = msgspec.msgpack.Decoder(DayContent).decode
_decode_state = msgspec.msgpack.Decoder(StateContent).decode

_LINES = (
    f"SELECT quarter, outcome, {', '.join(DIMENSIONS)}, {', '.join(COLUMNS)} FROM lines JOIN dimensions ON id = dimension"
    " WHERE quarter >= ? AND quarter < ?"
)  # fmt: skip
_FOREVER = 1 << 62


def iso_day(day: int) -> str:
    """Of days since 1970."""
    return date.fromordinal(date(1970, 1, 1).toordinal() + day).isoformat()


def close_days(connection: sqlite3.Connection, first: int, opens: int, sequence: int) -> int:
    """Keeps the content of each day in [first, opens) that has any, and the state at `sequence`; forgets what ended long ago.

    Returns the number of closings so far.
    """
    for day in range(first, opens) if opens - first < 4000 else _days_with_content(connection, first, opens):
        content = DayContent(
            day=iso_day(day),
            lines=_lines(connection, day * QUARTERS, (day + 1) * QUARTERS),
            engines=_engines(connection, day * QUARTERS, (day + 1) * QUARTERS),
        )
        if content.lines or content.engines:
            encoded = _encode(content)
            connection.execute("INSERT INTO days VALUES (?, ?, ?, ?, 0)", (day, sequence, _digest(encoded), encoded))
    epoch = get_number(connection, "epoch") + 1
    put(connection, "epoch", epoch)
    for table in ("attempts", "outcomes", "residency"):
        ended = {"attempts": "closed > 0 AND ", "residency": "final = 1 AND ", "outcomes": ""}[table]
        connection.execute(f"DELETE FROM {table} WHERE {ended}epoch <= ?", (epoch - 1 - REMEMBERED_CLOSINGS,))
    state = _encode(_state(connection, opens, epoch, sequence))
    connection.execute("INSERT INTO states VALUES (?, ?, ?, 0) ON CONFLICT DO NOTHING", (sequence, _digest(state), state))
    connection.execute(
        "DELETE FROM states WHERE sequence NOT IN (SELECT sequence FROM states ORDER BY sequence DESC LIMIT ?)", (_STATES_KEPT,)
    )
    return epoch


def restore(connection: sqlite3.Connection, state: bytes, days: dict[str, bytes]) -> None:
    """Fills empty tables. `days` by ISO day: every one that `needed_days(state)` names.

    :raises SnapshotCorrupt: a day's bytes are not those that were closed.
    """
    found = _decode_state(state)
    for day, expected in found.days.items():
        got = _digest(days[day])
        if got != expected:
            raise SnapshotCorrupt(f"the usage of {day} is not what was closed", day=day, expected=expected, got=got)
    connection.execute("BEGIN IMMEDIATE")
    try:
        for day in found.days:
            content = _decode_day(days[day])
            _put_lines(connection, content.lines)
            _insert(connection, "engines", content.engines)
            number = date.fromisoformat(day).toordinal() - date(1970, 1, 1).toordinal()
            connection.execute("INSERT INTO days VALUES (?, ?, ?, NULL, 1)", (number, found.sequence, found.days[day]))
        _put_lines(connection, found.lines)
        for table in ("names", "attempts", "outcomes", "residency", "engines"):
            _insert(connection, table, getattr(found, table))
        for name in ("sequence", "created", "open_day", "epoch", "refused"):
            put(connection, name, getattr(found, name))
        connection.execute("INSERT INTO states VALUES (?, ?, ?, 1)", (found.sequence, _digest(state), state))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def needed_days(state: bytes) -> list[str]:
    return list(_decode_state(state).days)


def sequence_of(state: bytes) -> int:
    """Of the last message that the state includes."""
    return _decode_state(state).sequence


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _days_with_content(connection: sqlite3.Connection, first: int, opens: int) -> list[int]:
    quarters = connection.execute("SELECT quarter FROM lines UNION SELECT quarter FROM engines").fetchall()
    return sorted({quarter // QUARTERS for (quarter,) in quarters if first <= quarter // QUARTERS < opens})


def _lines(connection: sqlite3.Connection, first: int, end: int) -> list[Line]:
    found: list[Line] = []
    width = 2 + len(DIMENSIONS)
    for row in connection.execute(_LINES, (first, end)):
        found.append(Line(row[0], Dimensions(*row[2:width]), row[1], amounts_of(row[width:])))
    return sorted(found, key=lambda line: (line.quarter, msgspec.structs.astuple(line.dimensions), line.outcome))


def _put_lines(connection: sqlite3.Connection, lines: list[Line]) -> None:
    for line in lines:
        post(connection, line.quarter, line.dimensions, line.outcome, line.amounts)


def _engines(connection: sqlite3.Connection, first: int, end: int) -> list[Row]:
    return connection.execute(
        "SELECT worker_id, incarnation, quarter, checkpoint, record FROM engines WHERE quarter >= ? AND quarter < ? ORDER BY 1, 2, 3",
        (first, end),
    ).fetchall()


def _state(connection: sqlite3.Connection, opens: int, epoch: int, sequence: int) -> StateContent:
    return StateContent(
        sequence=sequence,
        created=get(connection, "created"),
        open_day=opens,
        epoch=epoch,
        refused=get_number(connection, "refused"),
        days={iso_day(day): digest for day, digest in connection.execute("SELECT day, digest FROM days ORDER BY day")},
        names=connection.execute("SELECT * FROM names ORDER BY 1").fetchall(),
        attempts=connection.execute("SELECT * FROM attempts ORDER BY 1, 2").fetchall(),
        outcomes=connection.execute("SELECT * FROM outcomes ORDER BY 1").fetchall(),
        residency=connection.execute("SELECT * FROM residency ORDER BY 1, 2, 3").fetchall(),
        lines=_lines(connection, opens * QUARTERS, _FOREVER),
        engines=_engines(connection, opens * QUARTERS, _FOREVER),
    )


def _insert(connection: sqlite3.Connection, table: str, rows: list[Row]) -> None:
    if rows:
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
