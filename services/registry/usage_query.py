"""Sums over what the book holds: by tenant, adapter, version, key and day, between two quarters of an hour; engines' time likewise."""

import sqlite3
from datetime import timedelta
from pathlib import Path

import msgspec

from services.registry.usage_tables import COLUMNS, amounts_of, get_number, open_reader
from shared.contracts.usage import EngineTime
from shared.contracts.usage_query import GROUPS, MAX_DAYS, EngineRow, EnginesReply, GetEngines, GetUsage, UsageReply, UsageRow
from shared.errors import InvalidRequest
from shared.policy.periods import begin_of_day, day_at, zone_of
from shared.policy.usage_rollup import QUARTER_MS, Amounts, plus

_KEYS = {
    "tenant": ("tenant_id",),
    "adapter": ("tenant_id", "alias", "base"),
    "version": ("tenant_id", "alias", "base", "version", "digest"),
    "key": ("key_id",),
}
_SUMS = ", ".join(f"SUM({column})" for column in COLUMNS)
_MAX_ROWS = 20_000
_decode_engine = msgspec.msgpack.Decoder(EngineTime).decode


def answer(path: Path, request: GetUsage, tenant_ids: tuple[str, ...] | None) -> UsageReply:
    """`tenant_ids` None: everybody's.

    :raises InvalidRequest: what is wrong with the question, or that its answer is too large.
    """
    groups = _groups(request.group_by)
    spans = _spans(request, by_day="day" in groups)
    connection = open_reader(path)
    try:
        rows: dict[tuple[str, ...], _Row] = {}
        columns = tuple(dict.fromkeys(column for group in groups if group != "day" for column in _KEYS[group]))
        for day, first, end in spans:
            _sum(connection, rows, columns, tenant_ids, day, first, end)
            if len(rows) > _MAX_ROWS:
                raise InvalidRequest(f"the answer has more than {_MAX_ROWS} rows: ask for less time or fewer groups", limit=_MAX_ROWS)
        names = dict(connection.execute("SELECT tenant_id, name FROM names"))
        return UsageReply(
            from_ms=request.from_ms,
            to_ms=request.to_ms,
            zone=request.zone,
            group_by=groups,
            rows=[
                row.shown(dict(zip(("day", *columns), key, strict=True)), names, by_day="day" in groups)
                for key, row in sorted(rows.items())
            ],
            sequence=get_number(connection, "sequence"),
            refused=get_number(connection, "refused"),
            missing=get_number(connection, "missing"),
        )
    finally:
        connection.close()


def engines(path: Path, request: GetEngines) -> EnginesReply:
    """Each incarnation's time between two quarters: what it had counted by the end, less what it had counted before."""
    _check_span(request.from_ms, request.to_ms)
    connection = open_reader(path)
    try:
        last, before = (
            {
                (worker_id, incarnation): _decode_engine(record)
                for worker_id, incarnation, record, _ in connection.execute(
                    "SELECT worker_id, incarnation, record, MAX(quarter) FROM engines WHERE quarter < ? GROUP BY worker_id, incarnation",
                    (until_ms // QUARTER_MS,),
                )
            }
            for until_ms in (request.to_ms, request.from_ms)
        )
        rows = [_engine_row(record, before.get(key)) for key, record in sorted(last.items())]
        sequence = get_number(connection, "sequence")
    finally:
        connection.close()
    return EnginesReply(from_ms=request.from_ms, to_ms=request.to_ms, rows=[row for row in rows if row.wall_us], sequence=sequence)


def ids_of_name(path: Path, name: str) -> tuple[str, ...]:
    """Every tenant that was last called this, or has it as its id; deleted ones too."""
    connection = open_reader(path)
    try:
        return tuple(row[0] for row in connection.execute("SELECT tenant_id FROM names WHERE name = ? OR tenant_id = ?", (name, name)))
    finally:
        connection.close()


class _Row:
    """One group's sums while they are gathered."""

    def __init__(self) -> None:
        self.amounts = Amounts()
        self.outcomes: dict[str, int] = {}

    def shown(self, values: dict[str, str], names: dict[str, str], *, by_day: bool) -> UsageRow:
        tenant_id = values.get("tenant_id", "")
        return UsageRow(
            tenant_id=tenant_id,
            tenant=names.get(tenant_id, tenant_id),
            alias=values.get("alias", ""),
            base=values.get("base", ""),
            version=int(values.get("version", 0)),
            digest=values.get("digest", ""),
            key_id=values.get("key_id", ""),
            day=values["day"] if by_day else "",
            outcomes=dict(sorted(self.outcomes.items())),
            amounts=self.amounts,
        )


def _sum(
    connection: sqlite3.Connection,
    rows: "dict[tuple[str, ...], _Row]",
    columns: tuple[str, ...],
    tenant_ids: tuple[str, ...] | None,
    day: str,
    first: int,
    end: int,
) -> None:
    where, values = "quarter >= ? AND quarter < ?", [first, end]
    if tenant_ids is not None:
        where += f" AND tenant_id IN ({', '.join('?' * len(tenant_ids))})"
    grouped = ", ".join((*columns, "outcome"))
    found = connection.execute(
        f"SELECT {grouped}, {_SUMS} FROM lines JOIN dimensions ON id = dimension WHERE {where} GROUP BY {grouped}",
        (*values, *(tenant_ids or ())),
    )
    for record in found:
        row = rows.setdefault((day, *record[: len(columns)]), _Row())
        outcome, amounts = record[len(columns)], amounts_of(record[len(columns) + 1 :])
        row.amounts = plus(row.amounts, amounts)
        if outcome:
            row.outcomes[outcome] = row.outcomes.get(outcome, 0) + amounts.requests


def _groups(asked: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [group for group in asked if group not in GROUPS]
    if unknown:
        raise InvalidRequest(f"group_by: {unknown[0][:40]!r} is not one of {', '.join(GROUPS)}", field="group_by", got=unknown[0][:40])
    return tuple(group for group in GROUPS if group in asked)


def _check_span(from_ms: int, to_ms: int) -> None:
    if not 0 <= from_ms < to_ms <= 1 << 48:
        raise InvalidRequest("the time asked for ends before it begins, or is none", field="from")
    if from_ms % QUARTER_MS or to_ms % QUARTER_MS:
        raise InvalidRequest("usage is kept by quarters of an hour: times must lie on one (12:00, 12:15, 12:30, 12:45)", field="from")


def _spans(request: GetUsage, *, by_day: bool) -> list[tuple[str, int, int]]:
    """(day, first quarter, quarter after the last): one for each day of the zone, or one without a day for all."""
    _check_span(request.from_ms, request.to_ms)
    if not by_day:
        return [("", request.from_ms // QUARTER_MS, request.to_ms // QUARTER_MS)]
    zone = zone_of(request.zone)
    found: list[tuple[str, int, int]] = []
    day = day_at(request.from_ms, zone)
    at = request.from_ms // QUARTER_MS
    while at * QUARTER_MS < request.to_ms:
        end = min(begin_of_day(day + timedelta(days=1), zone), request.to_ms) // QUARTER_MS
        if end > at:
            found.append((day.isoformat(), at, end))
            at = end
        day += timedelta(days=1)
        if len(found) > MAX_DAYS:
            raise InvalidRequest(f"by day at most {MAX_DAYS} days can be asked for at once", limit=MAX_DAYS, field="from")
    return found


def _engine_row(last: EngineTime, before: EngineTime | None) -> EngineRow:
    def grown(name: str) -> int:
        return getattr(last, name) - (getattr(before, name) if before is not None else 0)

    earlier = before.overhead_us if before is not None else {}
    return EngineRow(
        worker_id=last.worker_id,
        incarnation=last.incarnation,
        pool_id=last.pool_id,
        wall_us=grown("wall_us"),
        busy_us=grown("busy_us"),
        idle_us=grown("idle_us"),
        overhead_us={name: value - earlier.get(name, 0) for name, value in sorted(last.overhead_us.items())},
        unaccounted_us=grown("unaccounted_us"),
        billed_us=grown("billed_us"),
        steps=grown("steps"),
    )
