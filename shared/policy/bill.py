"""Use turned into money: lines that add up to the total exactly, and the same total by whatever the lines are told apart.

Rounding: each item of a tenant in a price period is rounded once, to the currency's minor unit, half to even. Lines that share such an
item share its rounded amount by largest remainder (equal remainders in the lines' order). All arithmetic is exact before that.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import msgspec

from shared.policy.prices import ITEMS, PriceSheet
from shared.policy.usage_figures import GB_HOUR_BYTE_MS
from shared.policy.usage_rollup import Amounts

UNITS = {
    "prompt_per_1k": 1000,
    "cached_per_1k": 1000,
    "output_per_1k": 1000,
    "gpu_per_s": 1_000_000,
    "kv_per_gb_hour": GB_HOUR_BYTE_MS,
    "adapter_per_gb_hour": GB_HOUR_BYTE_MS,
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's use within one price period. `row`: the caller's own number of what it belongs to."""

    row: int
    period: int
    tenant_id: str
    tenant: str
    amounts: Amounts


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`quantity` in the smallest units: tokens, microseconds, byte-milliseconds; the price is for UNITS[item] of them."""

    part: Part
    item: str
    quantity: int
    price: Decimal
    amount: Decimal


def quantities(amounts: Amounts) -> dict[str, int]:
    """By item."""
    return {
        "prompt_per_1k": max(0, amounts.prompt_tokens - amounts.cached_tokens),
        "cached_per_1k": amounts.cached_tokens,
        "output_per_1k": amounts.completion_tokens,
        "gpu_per_s": amounts.gpu_us,
        "kv_per_gb_hour": amounts.kv_byte_ms,
        "adapter_per_gb_hour": amounts.adapter_byte_ms,
    }


def bill(sheet: PriceSheet, parts: Sequence[Part]) -> list[Line]:
    """In the parts' order, items in theirs; what was not used has no line."""
    asked: dict[tuple[str, int, str], list[tuple[int, int, Decimal, Fraction]]] = {}
    for at, part in enumerate(parts):
        rates = sheet.periods[part.period].rates_of(part.tenant_id, part.tenant)
        for item, quantity in quantities(part.amounts).items():
            if quantity:
                price: Decimal = getattr(rates, item)
                exact = Fraction(price) * quantity / UNITS[item] * 10**sheet.digits
                asked.setdefault((part.tenant_id, part.period, item), []).append((at, quantity, price, exact))
    lines: list[tuple[int, int, Line]] = []
    for (_, _, item), shares in asked.items():
        minor = apportion([exact for _, _, _, exact in shares])
        for (at, quantity, price, _), units in zip(shares, minor, strict=True):
            amount = Decimal(units).scaleb(-sheet.digits)
            lines.append((at, ITEMS.index(item), Line(part=parts[at], item=item, quantity=quantity, price=price, amount=amount)))
    return [line for _, _, line in sorted(lines, key=lambda entry: entry[:2])]


def apportion(exact: Sequence[Fraction]) -> list[int]:
    """Whole numbers that sum to the rounded sum of `exact`, each less than 1 away from its own."""
    floors = [value.__floor__() for value in exact]
    left = round(sum(exact, Fraction(0))) - sum(floors)  # rounds half to even
    order = sorted(range(len(exact)), key=lambda at: (floors[at] - exact[at], at))
    for at in order[:left]:
        floors[at] += 1
    return floors


def total(sheet: PriceSheet, lines: Sequence[Line]) -> Decimal:
    return sum((line.amount for line in lines), Decimal(0).scaleb(-sheet.digits))
