"""Moments and spans of time as people write them: dates in a time zone, RFC 3339, a month."""

import re
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shared.errors import InvalidRequest
from shared.policy.usage_rollup import QUARTER_MS

_MONTH = re.compile(r"(\d{4})-(\d{2})")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def zone_of(name: str) -> ZoneInfo:
    """:raises InvalidRequest: there is no such time zone."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidRequest(f"{name[:64]!r} is no time zone known here, e.g. UTC or Europe/Berlin", field="zone") from error


def begin_of_day(day: date, zone: ZoneInfo) -> int:
    """Milliseconds since 1970; where midnight does not exist, what the zone's clock shows then."""
    return round(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1000


def day_at(moment_ms: int, zone: ZoneInfo) -> date:
    return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment_ms)).astimezone(zone).date()


def moment(text: str, zone: ZoneInfo, field: str) -> int:
    """Of a date (its midnight in the zone) or an RFC 3339 time with its offset, on a quarter of an hour.

    :raises InvalidRequest: it is neither.
    """
    try:
        if _DATE.fullmatch(text):
            return begin_of_day(date.fromisoformat(text), zone)
        found = datetime.fromisoformat(text)
        if found.tzinfo is None:
            raise InvalidRequest(f"{field}: {text[:40]!r} has no offset: write 2026-11-30, or 2026-11-30T12:00:00+01:00", field=field)
        found_ms = round(found.timestamp() * 1000)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidRequest(f"{field}: {text[:40]!r} is neither a date (2026-11-30) nor an RFC 3339 time", field=field) from error
    if found_ms % QUARTER_MS:
        raise InvalidRequest(f"{field}: usage is kept by quarters of an hour, and {text[:40]} lies on none", field=field)
    return found_ms


def month(text: str, zone: ZoneInfo) -> tuple[int, int]:
    """Its begin and its end, which is the next one's begin.

    :raises InvalidRequest: it is no month.
    """
    found = _MONTH.fullmatch(text)
    try:
        if found is None:
            raise ValueError(text)
        first = date(int(found[1]), int(found[2]), 1)
        after = (first + timedelta(days=32)).replace(day=1)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"month: {text[:40]!r} is no month, e.g. 2026-11", field="month") from error
    return begin_of_day(first, zone), begin_of_day(after, zone)


def shown(moment_ms: int, zone: ZoneInfo) -> str:
    """The date where it is a midnight of the zone, else the time with its offset."""
    day = day_at(moment_ms, zone)
    if begin_of_day(day, zone) == moment_ms:
        return day.isoformat()
    return (datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=moment_ms)).astimezone(zone).isoformat()
