"""A price sheet: what each kind of use costs, in which currency, from when to when; and everything that may be wrong with one.

Prices are decimals as they were written; nothing of money is ever a float.
"""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from typing import Any, NoReturn, cast
from zoneinfo import ZoneInfo

import msgspec

from shared.errors import ConfigInvalid, InvalidRequest
from shared.policy.currencies import MINOR_DIGITS
from shared.policy.periods import begin_of_day, shown, zone_of

_MOST = Decimal(10) ** 9
_DIGITS = 12  # after the point
_TENANTS = 10_000
_PERIODS = 1_000


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per 1,000 tokens (those of a prompt that the cache did not hold, those it did, those that were made), GPU second, GB-hour."""

    prompt_per_1k: Decimal
    cached_per_1k: Decimal
    output_per_1k: Decimal
    gpu_per_s: Decimal
    kv_per_gb_hour: Decimal
    adapter_per_gb_hour: Decimal


ITEMS = Rates.__struct_fields__


class PricePeriod(msgspec.Struct, frozen=True, kw_only=True):
    """`to_ms` None: until further notice. `tenants`: other rates of some, by name or id."""

    from_ms: int
    to_ms: int | None
    rates: Rates
    tenants: dict[str, Rates] = {}

    def rates_of(self, tenant_id: str, tenant: str) -> Rates:
        return self.tenants.get(tenant_id) or self.tenants.get(tenant) or self.rates


class PriceSheet(msgspec.Struct, frozen=True, kw_only=True):
    """Periods in order, each beginning where the one before ends. `zone`: whose midnights those are."""

    currency: str
    digits: int  # of the currency's minor unit
    zone: str
    periods: tuple[PricePeriod, ...]

    def spans(self, from_ms: int, to_ms: int) -> list[tuple[int, int, int]]:
        """(period, begin, end): the time asked for, cut at the periods' edges.

        :raises ConfigInvalid: some of it has no prices.
        """
        zone = zone_of(self.zone)
        first, last = self.periods[0], self.periods[-1]
        if from_ms < first.from_ms or (last.to_ms is not None and to_ms > last.to_ms):
            until = "on" if last.to_ms is None else f"to {shown(last.to_ms, zone)}"
            asked = f"{shown(from_ms, zone)} to {shown(to_ms, zone)}"
            raise ConfigInvalid(
                f"prices: they hold from {shown(first.from_ms, zone)} {until}, and {asked} is asked for", where="periods"
            )  # fmt: skip
        cut = [
            (at, max(from_ms, period.from_ms), min(to_ms, to_ms if period.to_ms is None else period.to_ms))
            for at, period in enumerate(self.periods)
        ]
        return [(at, begin, end) for at, begin, end in cut if begin < end]


def parse_sheet(raw: Any) -> PriceSheet:
    """Of what a YAML or TOML file holds, numbers as text, integers or decimals.

    :raises ConfigInvalid: what is wrong, and where.
    """
    sheet = _mapping(raw, "the price sheet", {"currency", "zone", "periods"}, {"currency", "periods"})
    currency = sheet["currency"]
    if not isinstance(currency, str) or currency not in MINOR_DIGITS:
        _fail("currency", f"{_short(currency)} is no currency of ISO 4217, e.g. EUR")
    zone_name = sheet.get("zone", "UTC")
    try:
        zone = zone_of(str(zone_name))
    except InvalidRequest as error:
        raise ConfigInvalid(f"zone: {error.message}", where="zone") from error
    given = sheet["periods"]
    if not isinstance(given, list) or not given:
        _fail("periods", "a list of at least one period is expected")
    listed = cast("list[Any]", given)
    if len(listed) > _PERIODS:
        _fail("periods", f"{len(listed)} periods are more than anyone needs ({_PERIODS})")
    periods = [_period(each, f"periods[{at}]", zone) for at, each in enumerate(listed)]
    for at, (before, after) in enumerate(pairwise(periods), 1):
        if before.to_ms is None or before.to_ms > after.from_ms:
            _fail(f"periods[{at}].from", f"overlaps with the period before: that one ends {_end(before, zone)}")
        if before.to_ms < after.from_ms:
            _fail(
                f"periods[{at}].from",
                f"leaves a gap: the period before ends {_end(before, zone)}, this begins {shown(after.from_ms, zone)}",
            )
    return PriceSheet(currency=currency, digits=MINOR_DIGITS[currency], zone=str(zone_name), periods=tuple(periods))


def _period(raw: Any, where: str, zone: ZoneInfo) -> PricePeriod:
    period = _mapping(raw, where, {"from", "to", "tenants", *ITEMS}, {"from", *ITEMS})
    from_ms = begin_of_day(_date(period["from"], f"{where}.from"), zone)
    to_ms = begin_of_day(_date(period["to"], f"{where}.to"), zone) if "to" in period else None
    if to_ms is not None and to_ms <= from_ms:
        _fail(f"{where}.to", "ends before it begins (the day of `to` is not included)")
    rates = {item: _price(period[item], f"{where}.{item}") for item in ITEMS}
    others = _mapping(period.get("tenants", {}), f"{where}.tenants", None, set())
    if len(others) > _TENANTS:
        _fail(f"{where}.tenants", f"{len(others)} tenants are more than there can be ({_TENANTS})")
    tenants: dict[str, Rates] = {}
    for name, given in others.items():
        there = f"{where}.tenants.{name[:64]}"
        own = _mapping(given, there, set(ITEMS), set())
        tenants[name] = Rates(**rates | {item: _price(value, f"{there}.{item}") for item, value in own.items()})
    return PricePeriod(from_ms=from_ms, to_ms=to_ms, rates=Rates(**rates), tenants=tenants)


def _mapping(raw: Any, where: str, known: set[str] | None, needed: set[str]) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        _fail(where, f"names with values are expected, not {_short(raw)}")
    found = {str(key): value for key, value in cast("Mapping[Any, Any]", raw).items()}
    unknown = sorted(set(found) - known) if known is not None else []
    if unknown:
        _fail(where, f"{unknown[0][:64]!r} is not known here; known are {', '.join(sorted(known or ()))}")
    missing = sorted(needed - set(found))
    if missing:
        _fail(where, f"`{missing[0]}` is missing" + (" (what costs nothing is written as 0)" if missing[0] in ITEMS else ""))
    return found


def _price(raw: Any, where: str) -> Decimal:
    if isinstance(raw, bool) or not isinstance(raw, str | int | Decimal):
        _fail(where, f"{_short(raw)} is no price")
    try:
        price = Decimal(raw)
    except InvalidOperation:
        _fail(where, f"{_short(raw)} is no price")
    if not price.is_finite():
        _fail(where, f"{_short(raw)} is no price")
    if price < 0:
        _fail(where, f"{_short(raw)} is negative")
    if price > _MOST:
        _fail(where, f"{_short(raw)} is more than {_MOST:f}")
    exponent = price.as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent < -_DIGITS:
        _fail(where, f"{_short(raw)} has more than {_DIGITS} digits after the point")
    return price


def _date(raw: Any, where: str) -> date:
    if isinstance(raw, date) and type(raw) is date:
        found = raw
    else:
        try:
            found = date.fromisoformat(raw if isinstance(raw, str) else "")
        except ValueError:
            _fail(where, f"{_short(raw)} is no date, e.g. 2026-11-01")
    if not 1970 <= found.year < 9999:
        _fail(where, f"{found} is out of reach")
    return found


def _end(period: PricePeriod, zone: ZoneInfo) -> str:
    return "never" if period.to_ms is None else shown(period.to_ms, zone)


def _short(value: Any) -> str:
    return repr(value if not isinstance(value, Decimal) else str(value))[:60]


def _fail(where: str, problem: str) -> NoReturn:
    raise ConfigInvalid(f"prices: {where}: {problem}", where=where)
