"""A statement's page: well-formed, escaped, self-contained, its numbers those that were given."""

import re
from decimal import Decimal
from html.parser import HTMLParser
from typing import Any

from services.cli.statement import quantity_of
from services.cli.statement_page import Statement, page

_VOID = frozenset({"meta", "br", "link", "img", "line"})


class Strict(HTMLParser):
    """Remembers text and fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(made: Statement) -> Strict:
    parser = Strict()
    parser.feed(page(made))
    parser.close()
    assert parser.open == []
    return parser


def statement(**changes: Any) -> Statement:
    fields: dict[str, Any] = {
        "tenant": "sales",
        "tenant_id": "tn_1",
        "month": "2026-11",
        "zone": "UTC",
        "currency": "EUR",
        "total": Decimal("1234.50"),
        "lines": [
            ("tone@1", "output tokens", "1,000 tokens", "10", Decimal("0.1"), Decimal("1200.00")),
            ("tone@1", "GPU time", "second", "3.5", Decimal("0.2"), Decimal("34.50")),
        ],
        "days": {f"2026-11-{day:02d}": Decimal(0) for day in range(1, 31)} | {"2026-11-03": Decimal("1234.50")},
        "keys": [("k1", Decimal("1234.50"))],
        "outcomes": {"complete": 7},
        "partial": 0,
        "sequence": 99,
        "incomplete": 0,
    } | changes
    return Statement(**fields)


def test_the_page_shows_each_line_a_sum_for_each_adapter_and_the_total() -> None:
    parser = read(statement())
    assert [text for text in parser.text if re.fullmatch(r"[\d,]+\.\d\d", text)][:4] == ["1,234.50", "1,200.00", "34.50", "1,234.50"]
    assert "1,234.50 EUR" in "".join(parser.text)
    assert {"svg", "rect"} <= parser.tags
    assert not parser.tags & {"script", "link", "img", "iframe"}


def test_names_of_tenants_adapters_and_keys_are_text_and_nothing_else() -> None:
    evil = '"><script>alert(1)</script>'
    line = (evil, "output tokens", "1,000 tokens", "10", Decimal("0.1"), Decimal("1234.50"))
    parser = read(statement(tenant=evil, tenant_id=evil, lines=[line], keys=[(evil, Decimal("1234.50"))], outcomes={evil: 1}))
    assert "script" not in parser.tags
    assert sum(evil in text for text in parser.text) >= 4


def test_a_month_without_use_and_one_with_corrections_are_pages_too() -> None:
    nothing = statement(total=Decimal("0.00"), lines=[], keys=[], outcomes={}, days={"2026-11-01": Decimal(0)})
    assert "Nothing." in read(nothing).text
    less = statement(days={"2026-11-01": Decimal("-2.00"), "2026-11-02": Decimal("5.00")})
    assert "-2.00" in read(less).text


def test_a_currency_without_minor_units_is_shown_without_them() -> None:
    yen = statement(total=Decimal("1234"), currency="JPY", lines=[], days={"2026-11-01": Decimal("1234")}, keys=[("k1", Decimal("1234"))])
    assert "1,234 JPY" in "".join(read(yen).text)


def test_what_could_not_be_counted_and_what_was_cut_short_is_told() -> None:
    text = "".join(read(statement(incomplete=3, partial=2)).text)
    assert "Incomplete: 3 messages" in text
    assert "2 were cut short by a lost engine" in text


def test_quantities_are_in_the_units_that_their_prices_are_for() -> None:
    assert quantity_of("output_per_1k", 1_234_567) == "1,234,567"
    assert quantity_of("gpu_per_s", 1_234_567_890) == "1,234.567890"
    assert quantity_of("kv_per_gb_hour", (1 << 30) * 3_600_000 * 3 // 2) == "1.500000"
