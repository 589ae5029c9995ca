"""Sums by day of any time zone: each quarter of an hour in exactly one day, days of 23, 24 and 25 hours, edges that are no UTC midnight."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.registry import usage_query
from services.registry.usage_book import UsageBook
from services.registry.usage_tables import post
from shared.contracts.usage_query import GetEngines, GetUsage
from shared.errors import InvalidRequest
from shared.policy.periods import begin_of_day, day_at, moment, month, shown, zone_of
from shared.policy.usage_rollup import DAY_MS, QUARTER_MS, Amounts, Dimensions
from tests.usage_records import NOON_MS, Stream, engine

SALES = Dimensions(tenant_id="t_sales", alias="tone", version=1, key_id="k1")


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


@pytest.fixture
def book(tmp_path: Path) -> Iterator[UsageBook]:
    found = UsageBook(tmp_path / "usage.sqlite")
    yield found
    found.close()


def each_quarter(book: UsageBook, begin: str, end: str) -> None:
    """One request in every quarter of an hour."""
    for quarter in range(at(begin) // QUARTER_MS, at(end) // QUARTER_MS):
        post(book.connection, quarter, SALES, "complete", Amounts(requests=1, adapter_byte_ms=1 << 40))


def by_day(book: UsageBook, begin: int, end: int, zone: str, **changes: Any) -> dict[str, int]:
    request = GetUsage(from_ms=begin, to_ms=end, group_by=("day",), zone=zone, **changes)
    return {row.day: row.amounts.requests for row in usage_query.answer(book.path, request, None).rows}


def test_one_moment_is_in_the_day_that_its_zone_says(book: UsageBook) -> None:
    each_quarter(book, "2026-11-30T23:30:00+00:00", "2026-12-01T00:30:00+00:00")
    begin, end = at("2026-11-29T00:00:00+00:00"), at("2026-12-03T00:00:00+00:00")
    assert by_day(book, begin, end, "UTC") == {"2026-11-30": 2, "2026-12-01": 2}
    assert by_day(book, begin, end, "Europe/Berlin") == {"2026-12-01": 4}
    assert by_day(book, begin, end, "America/New_York") == {"2026-11-30": 4}
    assert by_day(book, begin, end, "Asia/Kathmandu") == {"2026-12-01": 4}


@pytest.mark.parametrize(
    ("day", "zone", "quarters"),
    [
        ("2026-03-29", "Europe/Berlin", 92),
        ("2026-10-25", "Europe/Berlin", 100),
        ("2026-10-26", "Europe/Berlin", 96),
        ("2026-11-30", "Asia/Kathmandu", 96),
        ("2026-10-04", "Australia/Lord_Howe", 94),
        ("2026-09-06", "America/Santiago", 92),  # has no midnight
    ],
)
def test_days_have_the_hours_that_their_zone_gives_them(book: UsageBook, day: str, zone: str, quarters: int) -> None:
    each_quarter(book, f"{day[:8]}01T00:00:00+00:00", f"{day[:5]}{int(day[5:7]) + 1:02d}-01T00:00:00+00:00")
    each_quarter(book, "2025-12-31T00:00:00+00:00", "2026-01-01T00:00:00+00:00")
    found = by_day(book, moment(day, zone_of(zone), "from") - DAY_MS, moment(day, zone_of(zone), "from") + 2 * DAY_MS, zone)
    assert found[day] == quarters


@given(
    zone=st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu", "America/St_Johns", "Pacific/Chatham", "Africa/Casablanca"]),
    begin=st.integers(1_700_000, 1_950_000),
    length=st.integers(1, 2000),
)
def test_days_part_any_span_without_gap_or_overlap(zone: str, begin: int, length: int) -> None:
    request = GetUsage(from_ms=begin * QUARTER_MS, to_ms=(begin + length) * QUARTER_MS, group_by=("day",), zone=zone)
    spans = usage_query._spans(request, by_day=True)
    assert spans[0][1] == begin
    assert spans[-1][2] == begin + length
    assert all(before[2] == after[1] for before, after in pairwise(spans))
    for day, first, _ in spans:
        assert day_at(first * QUARTER_MS, ZoneInfo(zone)).isoformat() == day


def test_a_month_is_as_long_as_its_zone_makes_it() -> None:
    begin, end = month("2026-10", zone_of("Europe/Berlin"))
    assert (end - begin) // 3_600_000 == 31 * 24 + 1
    assert shown(begin, zone_of("Europe/Berlin")) == "2026-10-01"
    assert shown(begin, zone_of("UTC")) == "2026-09-30T22:00:00+00:00"
    begin, end = month("2026-12", zone_of("UTC"))
    assert (end - begin) // DAY_MS == 31


@pytest.mark.parametrize("text", ["2026-13", "2026", "2026-1", "0000-01", "9999-12", "november"])
def test_what_is_no_month_is_told(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no month"):
        month(text, zone_of("UTC"))


@given(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_what_is_shown_is_read_back(found: datetime) -> None:
    moment_ms = round(found.timestamp()) // 900 * QUARTER_MS
    for name in ("UTC", "Europe/Berlin", "Asia/Kathmandu"):
        assert moment(shown(moment_ms, zone_of(name)), zone_of(name), "from") == moment_ms
    assert begin_of_day(found.date(), zone_of("UTC")) % DAY_MS == 0


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 0), (QUARTER_MS, 0), (-QUARTER_MS, QUARTER_MS), (0, QUARTER_MS + 1), (1, QUARTER_MS), (0, 1 << 60)],
)
def test_a_span_that_is_none_is_refused(book: UsageBook, begin: int, end: int) -> None:
    with pytest.raises(InvalidRequest):
        usage_query.answer(book.path, GetUsage(from_ms=begin, to_ms=end), None)
    with pytest.raises(InvalidRequest):
        usage_query.engines(book.path, GetEngines(from_ms=begin, to_ms=end))


def test_engines_time_over_days_is_the_sum_of_its_days(book: UsageBook) -> None:
    stream = Stream()
    for hour in range(60):
        stream.add(engine(hour + 1), at_ms=NOON_MS + hour * 3_600_000)
    book.apply(stream.messages)
    first = NOON_MS - NOON_MS % DAY_MS
    days = [
        usage_query.engines(book.path, GetEngines(from_ms=first + day * DAY_MS, to_ms=first + (day + 1) * DAY_MS)).rows for day in range(4)
    ]
    whole = usage_query.engines(book.path, GetEngines(from_ms=first, to_ms=first + 4 * DAY_MS)).rows
    assert sum(row.wall_us for rows in days for row in rows) == whole[0].wall_us == 60_000_000
    assert sum(row.overhead_us["schedule"] for rows in days for row in rows) == whole[0].overhead_us["schedule"]
