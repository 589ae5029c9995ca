"""The usage projection's own SQLite file: its tables, and the few statements that everything of it shares.

The file is a cache of the stream: it may be deleted at any time, and is made anew where its form is another version's.
"""

import sqlite3
from pathlib import Path

from shared.policy.usage_rollup import AMOUNTS, Amounts, Dimensions

_VERSION = "1"
# sums of these pass 64 bits: their columns hold the upper and the lower 32 bits of every posting, summed apart
WIDE = ("kv_byte_ms", "adapter_byte_ms")
COLUMNS = tuple(
    column for name in AMOUNTS for column in ((f"{name}_upper", f"{name}_lower") if name in WIDE else (name,))
)  # fmt: skip
DIMENSIONS = Dimensions.__struct_fields__
SUMS = ", ".join(f"SUM({column})" for column in COLUMNS)

_TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE names (tenant_id TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    request_id TEXT, attempt INTEGER, closed INTEGER NOT NULL, epoch INTEGER NOT NULL, checkpoint INTEGER NOT NULL,
    worker_id TEXT NOT NULL, incarnation TEXT NOT NULL, stamp_ms INTEGER NOT NULL, record BLOB, posted BLOB,
    PRIMARY KEY (request_id, attempt)
) WITHOUT ROWID;
CREATE INDEX open_attempts ON attempts (worker_id, incarnation) WHERE closed = 0;
CREATE INDEX ended_attempts ON attempts (epoch) WHERE closed > 0;
CREATE TABLE outcomes (request_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX ended_outcomes ON outcomes (epoch);
CREATE TABLE residency (
    pool_id TEXT, adapter_id TEXT, since_ms INTEGER, until_ms INTEGER NOT NULL, final INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (pool_id, adapter_id, since_ms)
) WITHOUT ROWID;
CREATE TABLE dimensions (id INTEGER PRIMARY KEY, {", ".join(DIMENSIONS)}, UNIQUE ({", ".join(DIMENSIONS)}));
CREATE TABLE lines (
    quarter INTEGER, dimension INTEGER, outcome TEXT, {", ".join(f"{column} INTEGER NOT NULL" for column in COLUMNS)},
    PRIMARY KEY (quarter, dimension, outcome)
) WITHOUT ROWID;
CREATE TABLE engines (
    worker_id TEXT, incarnation TEXT, quarter INTEGER, checkpoint INTEGER NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (worker_id, incarnation, quarter)
) WITHOUT ROWID;
CREATE TABLE days (
    day INTEGER PRIMARY KEY, sequence INTEGER NOT NULL, digest TEXT NOT NULL, content BLOB, stored INTEGER NOT NULL
);
CREATE TABLE states (sequence INTEGER PRIMARY KEY, digest TEXT NOT NULL, content BLOB NOT NULL, stored INTEGER NOT NULL);
"""
_POST = (
    f"INSERT INTO lines VALUES ({', '.join('?' * (3 + len(COLUMNS)))}) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{column} = {column} + excluded.{column}" for column in COLUMNS)
)  # fmt: skip


def open_tables(path: Path) -> sqlite3.Connection:
    """For one thread at a time. Statements outside an explicit transaction stand alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = _connected(path)
    if found.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
        _make(found)
    elif get(found, "version") != _VERSION:
        found.close()
        remove(path)
        found = _connected(path)
        _make(found)
    return found


def open_reader(path: Path) -> sqlite3.Connection:
    """One consistent view of what has been committed, for as long as its transaction lasts."""
    found = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
    found.execute("PRAGMA busy_timeout = 5000")
    found.execute("BEGIN")
    return found


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connected(path: Path) -> sqlite3.Connection:
    found = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 5000"):
        found.execute(f"PRAGMA {pragma}")
    return found


def _make(connection: sqlite3.Connection) -> None:
    connection.executescript(f"BEGIN; {_TABLES} COMMIT;")
    put(connection, "version", _VERSION)


def get(connection: sqlite3.Connection, name: str) -> str:
    """ "" if it was never put."""
    found = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return found[0] if found else ""


def get_number(connection: sqlite3.Connection, name: str) -> int:
    return int(get(connection, name) or 0)


def put(connection: sqlite3.Connection, name: str, value: str | int) -> None:
    connection.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (name, str(value)))


def post(connection: sqlite3.Connection, quarter: int, dimensions: Dimensions, outcome: str, amounts: Amounts) -> None:
    """Adds to the line; `outcome` is empty for what attempts and residency come to."""
    connection.execute(_POST, (quarter, _dimension_id(connection, dimensions), outcome, *columns_of(amounts)))


def _dimension_id(connection: sqlite3.Connection, dimensions: Dimensions) -> int:
    values = tuple(getattr(dimensions, name) for name in DIMENSIONS)
    where = " AND ".join(f"{name} = ?" for name in DIMENSIONS)
    found = connection.execute(f"SELECT id FROM dimensions WHERE {where}", values).fetchone()
    if found is None:
        marks = ", ".join("?" * len(DIMENSIONS))
        found = connection.execute(f"INSERT INTO dimensions ({', '.join(DIMENSIONS)}) VALUES ({marks}) RETURNING id", values).fetchone()
    return found[0]


def columns_of(amounts: Amounts) -> list[int]:
    found: list[int] = []
    for name in AMOUNTS:
        value: int = getattr(amounts, name)
        found += (value >> 32, value & 0xFFFFFFFF) if name in WIDE else (value,)
    return found


def amounts_of(columns: "tuple[int, ...]") -> Amounts:
    """Of columns, or of sums of them."""
    at = iter(columns)
    return Amounts(**{name: (next(at) << 32) + next(at) if name in WIDE else next(at) for name in AMOUNTS})
