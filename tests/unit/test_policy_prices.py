"""Price sheets and bills: every bad sheet a clear error, every bill's lines its total exactly, whatever they are told apart by."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.price_file import read_prices
from shared.errors import ConfigInvalid
from shared.policy.bill import Part, apportion, bill, quantities, total
from shared.policy.currencies import MINOR_DIGITS
from shared.policy.prices import ITEMS, PriceSheet, parse_sheet
from shared.policy.usage_figures import GB_HOUR_BYTE_MS
from shared.policy.usage_rollup import Amounts, minus, plus

RATES = {
    "prompt_per_1k": "0.0004",
    "cached_per_1k": "0.0001",
    "output_per_1k": "0.0016",
    "gpu_per_s": "0.0006",
    "kv_per_gb_hour": "0.002",
    "adapter_per_gb_hour": "0.004",
}


def sheet(**changes: Any) -> dict[str, Any]:
    return {"currency": "EUR", "zone": "Europe/Berlin", "periods": [{"from": "2026-01-01", **RATES}]} | changes


def periods(*spans: tuple[str, str | None]) -> list[dict[str, Any]]:
    return [{"from": begin, **({} if end is None else {"to": end}), **RATES} for begin, end in spans]


def one(**changes: Any) -> list[dict[str, Any]]:
    return [{"from": "2026-01-01", **RATES} | changes]


@pytest.mark.parametrize(
    ("raw", "where", "problem"),
    [
        ([], "the price sheet", "names with values"),
        ({"currency": "EUR"}, "the price sheet", "`periods` is missing"),
        (sheet(currency="EURO"), "currency", "ISO 4217"),
        (sheet(currency=["EUR"]), "currency", "ISO 4217"),
        (sheet(currency="eur"), "currency", "ISO 4217"),
        (sheet(zone="Europe/Atlantis"), "zone", "no time zone"),
        (sheet(extra="1"), "the price sheet", "'extra' is not known"),
        (sheet(periods=[]), "periods", "at least one"),
        (sheet(periods="now"), "periods", "at least one"),
        (sheet(periods=["now"]), "periods[0]", "names with values"),
        (sheet(periods=[{"from": "2026-01-01", **RATES, "per_token": "1"}]), "periods[0]", "'per_token' is not known"),
        (sheet(periods=[{"from": "2026-01-01", "prompt_per_1k": "1"}]), "periods[0]", "is missing (what costs nothing is written as 0)"),
        (sheet(periods=one(gpu_per_s="-0.01")), "periods[0].gpu_per_s", "negative"),
        (sheet(periods=one(gpu_per_s="nan")), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s="sNaN")), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s="Infinity")), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s="cheap")), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s=True)), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s=0.1)), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s=None)), "periods[0].gpu_per_s", "no price"),
        (sheet(periods=one(gpu_per_s="1e40")), "periods[0].gpu_per_s", "more than"),
        (sheet(periods=one(gpu_per_s="1e-40")), "periods[0].gpu_per_s", "digits after the point"),
        (sheet(periods=one(tenants={"sales": {"gpu_per_s": "-1"}})), "periods[0].tenants.sales.gpu_per_s", "negative"),
        (sheet(periods=one(tenants={"sales": {"gpu": "1"}})), "periods[0].tenants.sales", "not known"),
        (sheet(periods=one(tenants=["sales"])), "periods[0].tenants", "names with values"),
        (sheet(periods=periods(("soon", None))), "periods[0].from", "no date"),
        (sheet(periods=periods(("2026-13-01", None))), "periods[0].from", "no date"),
        (sheet(periods=periods(("0001-01-01", None))), "periods[0].from", "out of reach"),
        (sheet(periods=periods(("2026-02-01", "2026-02-01"))), "periods[0].to", "ends before it begins"),
        (sheet(periods=periods(("2026-01-01", "2026-03-01"), ("2026-02-01", None))), "periods[1].from", "overlaps"),
        (sheet(periods=periods(("2026-01-01", None), ("2026-02-01", None))), "periods[1].from", "overlaps"),
        (sheet(periods=periods(("2026-02-01", "2026-03-01"), ("2026-01-01", "2026-02-01"))), "periods[1].from", "overlaps"),
        (sheet(periods=periods(("2026-01-01", "2026-02-01"), ("2026-02-02", None))), "periods[1].from", "gap"),
    ],
)
def test_a_bad_sheet_is_refused_with_what_and_where(raw: Any, where: str, problem: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_sheet(raw)
    assert caught.value.fields["where"] == where
    assert problem in caught.value.message


def test_time_without_prices_is_refused_and_edges_are_midnights_of_the_sheets_zone() -> None:
    made = parse_sheet(sheet(periods=periods(("2026-01-01", "2026-04-01"), ("2026-04-01", "2026-11-01"))))
    april_ms = 1_774_994_400_000  # 2026-04-01 00:00 in Berlin, summer time
    assert made.spans(april_ms - 900_000, april_ms + 900_000) == [
        (0, april_ms - 900_000, april_ms),
        (1, april_ms, april_ms + 900_000),
    ]
    for begin, end in ((made.periods[0].from_ms - 1, april_ms), (april_ms, (made.periods[1].to_ms or 0) + 1)):
        with pytest.raises(ConfigInvalid, match="they hold from 2026-01-01 to 2026-11-01"):
            made.spans(begin, end)


def test_a_tenants_own_rates_hold_for_it_alone_by_name_or_id() -> None:
    own = {"sales": {"output_per_1k": "1"}, "tn_cs": {"output_per_1k": "2"}}
    (period,) = parse_sheet(sheet(periods=one(tenants=own))).periods
    assert period.rates_of("tn_sales", "sales").output_per_1k == 1
    assert period.rates_of("tn_sales", "sales").gpu_per_s == Decimal("0.0006")
    assert period.rates_of("tn_cs", "renamed").output_per_1k == 2
    assert period.rates_of("tn_other", "other").output_per_1k == Decimal("0.0016")


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_both_forms_of_file_say_the_same_with_numbers_as_they_are_written(tmp_path: Path, suffix: str) -> None:
    if suffix == "yaml":
        rates = "\n".join(f"    {name}: {price}" for name, price in RATES.items())
        text = f"currency: EUR\nzone: Europe/Berlin\nperiods:\n  - from: 2026-01-01\n{rates}\n"
    else:
        rates = "\n".join(f"{name} = {price}" for name, price in RATES.items())
        text = f'currency = "EUR"\nzone = "Europe/Berlin"\n[[periods]]\nfrom = 2026-01-01\n{rates}\n'
    file = tmp_path / f"prices.{suffix}"
    file.write_text(text)
    assert read_prices(file) == parse_sheet(sheet())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.yaml", b"currency: [", "expected"),
        ("a.yaml", b"currency: EUR\ncurrency: USD\n", "given twice"),
        ("a.yaml", b"? [a]\n: b\n", "price sheet"),
        ("a.yaml", b"\xff\xfe\xff", "UTF-8"),
        ("a.yaml", b"- 1", "names with values"),
        ("a.yaml", b"a: &x [*x]", "recursive"),
        ("a.toml", b"currency = ", "Invalid value"),
        ("a.toml", b"x = nan", "not known"),
        ("missing.yaml", None, "No such file"),
    ],
)
def test_a_file_that_is_no_price_sheet_is_one_clear_error(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigInvalid, match=problem):
        read_prices(file)


def part(row: int, amounts: Amounts, *, tenant: str = "sales", period: int = 0) -> Part:
    return Part(row=row, period=period, tenant_id=f"tn_{tenant}", tenant=tenant, amounts=amounts)


def test_a_bill_by_hand() -> None:
    amounts = Amounts(
        prompt_tokens=1_000_000,
        cached_tokens=400_000,
        completion_tokens=250_000,
        gpu_us=90_000_000,
        kv_byte_ms=3 * GB_HOUR_BYTE_MS,
        adapter_byte_ms=720 * GB_HOUR_BYTE_MS,
    )
    lines = bill(parse_sheet(sheet()), [part(0, amounts)])
    assert [(line.item, str(line.amount)) for line in lines] == [
        ("prompt_per_1k", "0.24"),
        ("cached_per_1k", "0.04"),
        ("output_per_1k", "0.40"),
        ("gpu_per_s", "0.05"),
        ("kv_per_gb_hour", "0.01"),
        ("adapter_per_gb_hour", "2.88"),
    ]
    assert str(total(parse_sheet(sheet()), lines)) == "3.62"


@pytest.mark.parametrize(("gpu_us", "amount"), [(5_000, "0.00"), (5_001, "0.01"), (15_000, "0.02"), (14_999, "0.01"), (25_000, "0.02")])
def test_half_a_minor_unit_goes_to_the_even_one(gpu_us: int, amount: str) -> None:
    made = parse_sheet(sheet(periods=one(gpu_per_s="1")))
    (line,) = bill(made, [part(0, Amounts(gpu_us=gpu_us))])
    assert str(line.amount) == amount


@pytest.mark.parametrize(("currency", "amount"), [("JPY", "1235"), ("EUR", "1234.57"), ("KWD", "1234.568"), ("CLF", "1234.5679")])
def test_amounts_have_the_currencys_own_digits(currency: str, amount: str) -> None:
    made = parse_sheet(sheet(currency=currency, periods=one(gpu_per_s="1234.56789")))
    (line,) = bill(made, [part(0, Amounts(gpu_us=1_000_000))])
    assert str(line.amount) == amount
    assert len(amount.partition(".")[2]) == MINOR_DIGITS[currency]


def test_parts_share_a_rounded_amount_by_largest_remainder() -> None:
    made = parse_sheet(sheet(periods=one(gpu_per_s="1")))
    lines = bill(made, [part(row, Amounts(gpu_us=us)) for row, us in enumerate((3_000, 4_000, 3_000))])
    assert [str(line.amount) for line in lines] == ["0.00", "0.01", "0.00"]


small = st.integers(0, 10**9)
amounts_strategy = st.builds(
    lambda prompt, cached, output, gpu, kv, adapter: Amounts(
        prompt_tokens=prompt + cached, cached_tokens=cached, completion_tokens=output, gpu_us=gpu, kv_byte_ms=kv, adapter_byte_ms=adapter
    ),
    small, small, small, small, st.integers(0, 10**18), st.integers(0, 10**20),
)  # fmt: skip
prices = st.decimals(0, 1000, places=6, allow_nan=False).map(str)
sheets = st.builds(
    lambda currency, rates, later, own: parse_sheet(
        {
            "currency": currency,
            "periods": [
                {"from": "2026-01-01", "to": "2026-02-01"} | dict(zip(ITEMS, rates, strict=True)),
                {"from": "2026-02-01", "tenants": {"cs": {"gpu_per_s": own}}} | dict(zip(ITEMS, later, strict=True)),
            ],
        }
    ),
    st.sampled_from(["EUR", "JPY", "KWD", "CLF"]),
    st.tuples(*[prices] * 6), st.tuples(*[prices] * 6), prices,
)  # fmt: skip
uses = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1), st.sampled_from(["sales", "cs"]), amounts_strategy), max_size=12)


@settings(max_examples=150, deadline=None)
@given(made=sheets, used=uses)
def test_lines_add_up_to_the_total_and_the_total_is_the_same_by_whatever_they_are_told_apart(
    made: PriceSheet, used: list[tuple[int, int, str, Amounts]]
) -> None:
    parts = [part(row, amounts, tenant=tenant, period=period) for row, period, tenant, amounts in used]
    lines = bill(made, parts)
    whole = total(made, lines)
    by_row = {row: sum((line.amount for line in lines if line.part.row == row), Decimal(0)) for row in range(5)}
    assert sum(by_row.values(), Decimal(0)) == whole
    joined: dict[tuple[int, str], Amounts] = {}
    for each in parts:
        key = (each.period, each.tenant)
        joined[key] = plus(joined.get(key, Amounts()), each.amounts)
    at_once = bill(made, [part(0, amounts, tenant=tenant, period=period) for (period, tenant), amounts in joined.items()])
    assert total(made, at_once) == whole
    exact = sum(
        (
            Fraction(getattr(made.periods[line.part.period].rates_of(line.part.tenant_id, line.part.tenant), line.item))
            * line.quantity
            / {"gpu_per_s": 10**6, "kv_per_gb_hour": GB_HOUR_BYTE_MS, "adapter_per_gb_hour": GB_HOUR_BYTE_MS}.get(line.item, 1000)
            for line in at_once
        ),
        Fraction(0),
    )
    assert abs(Fraction(whole) - exact) <= Fraction(len(at_once), 2 * 10**made.digits)
    assert all(-line.amount.as_tuple().exponent == made.digits for line in lines)  # type: ignore[operator]


@given(st.lists(st.fractions(min_value=-1000, max_value=1000), max_size=20))
def test_apportioned_numbers_sum_to_the_rounded_sum_and_each_is_less_than_one_from_its_own(exact: list[Fraction]) -> None:
    found = apportion(exact)
    assert sum(found) == round(sum(exact, Fraction(0)))
    assert all(abs(whole - value) < 1 for whole, value in zip(found, exact, strict=True))


@given(amounts_strategy, amounts_strategy)
def test_quantities_are_additive(one_use: Amounts, other: Amounts) -> None:
    both = quantities(plus(one_use, other))
    assert both == {item: quantities(one_use)[item] + quantities(other)[item] for item in ITEMS}
    assert minus(plus(one_use, other), other) == one_use


def test_every_price_has_a_way_into_the_bill() -> None:
    maker: Callable[..., Amounts] = Amounts
    assert set(quantities(maker())) == set(ITEMS)
