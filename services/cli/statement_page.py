"""A statement as one HTML page: no script, no external asset, every text escaped, fit for paper."""

from decimal import Decimal
from html import escape

import msgspec

_STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --bar: #2f6f9f; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 58rem; color: var(--ink); background: #fff;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header { display: flex; justify-content: space-between; align-items: flex-end; gap: 1rem; border-bottom: 2px solid var(--ink);
         padding-bottom: 1rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; break-after: avoid; }
.soft { color: var(--soft); margin: .2rem 0 0; overflow-wrap: anywhere; }
.total { font-size: 1.9rem; font-weight: 650; white-space: nowrap; text-align: right; font-variant-numeric: tabular-nums; }
.total small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .85rem; }
th, td { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child { overflow-wrap: anywhere; }
th.n, td.n { text-align: right; white-space: nowrap; padding-right: 0; padding-left: .8rem; }
tr.sum td { border-bottom: 0; border-top: 2px solid var(--ink); font-weight: 650; }
tr.group td { font-weight: 600; padding-top: .9rem; border-bottom-color: var(--soft); }
td.wraps { white-space: normal; }
tr { break-inside: avoid; }
tr.group { break-after: avoid; }
@media (max-width: 32rem) { body { padding: 1.5rem 1rem; } header { display: block; } .total { text-align: left; margin-top: .8rem; } }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--soft); }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
.warn { border-left: 4px solid #b3541e; padding: .4rem .8rem; background: #fdf3ec; }
@media print { body { padding: 0; max-width: none; font-size: 11pt; } @page { margin: 18mm; }
  header { display: flex; } .total { text-align: right; } svg rect { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """`lines`: (adapter@version, item, per what, quantity, price, amount); they, `days` and `keys` each add up to `total`."""

    tenant: str
    tenant_id: str
    month: str
    zone: str
    currency: str
    total: Decimal
    lines: list[tuple[str, str, str, str, Decimal, Decimal]]
    days: dict[str, Decimal]
    keys: list[tuple[str, Decimal]]
    outcomes: dict[str, int]
    partial: int
    sequence: int
    incomplete: int  # messages and records that could not be counted


def page(made: Statement) -> str:
    """The whole document."""
    parts = [
        _head(made),
        _warning(made),
        "<h2>What was used</h2>",
        _lines(made),
        "<h2>Day by day</h2>",
        _plot(made),
        "<h2>By key</h2>",
        _table(("key", "amount"), [(key, money(amount, made)) for key, amount in made.keys], money(made.total, made)),
        "<h2>Requests by how they ended</h2>",
        _table(
            ("outcome", "requests"), [(name, f"{count:,}") for name, count in made.outcomes.items()], f"{sum(made.outcomes.values()):,}"
        ),
        _foot(made),
    ]
    title = escape(f"{made.tenant}, {made.month}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title><style>{_STYLE}</style></head>'
        "\n<body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"
    )


def money(amount: Decimal, made: Statement) -> str:
    return f"{amount.quantize(made.total):,f}"


def _head(made: Statement) -> str:
    return (
        f"<header><div><h1>{escape(made.tenant)}</h1>"
        f'<p class="soft">Statement for {escape(made.month)}{" · " + escape(made.tenant_id) if made.tenant_id else ""}</p></div>'
        f'<div class="total">{money(made.total, made)} {escape(made.currency)}<small>total</small></div></header>'
    )


def _warning(made: Statement) -> str:
    if not made.incomplete:
        return ""
    return f'<p class="warn">Incomplete: {made.incomplete:,} messages or records of the usage stream could not be counted.</p>'


def _lines(made: Statement) -> str:
    if not made.lines:
        return '<p class="soft">Nothing.</p>'
    sums: dict[str, Decimal] = {}
    for line in made.lines:
        sums[line[0]] = sums.get(line[0], Decimal(0)) + line[-1]
    rows: list[str] = []
    before = None
    for adapter, item, per, quantity, price, amount in made.lines:
        if adapter != before:
            rows.append(f'<tr class="group"><td colspan="3">{escape(adapter)}</td>{_number(money(sums[adapter], made))}</tr>')
        priced = f'<td class="n wraps">{escape(f"{price:f}")} <span class="soft">per {escape(per)}</span></td>'
        rows.append(f"<tr><td>{escape(item)}</td>{_number(quantity)}{priced}{_number(money(amount, made))}</tr>")
        before = adapter
    total = f'<tr class="sum"><td colspan="3">Total in {escape(made.currency)}</td>{_number(money(made.total, made))}</tr>'
    heads = _heads(("adapter and item", "quantity", "price", "amount"), 1)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}{total}</tbody></table>"


def _table(heads: tuple[str, str], rows: list[tuple[str, str]], total: str) -> str:
    if not rows:
        return '<p class="soft">None.</p>'
    body = "".join(f"<tr><td>{escape(name)}</td>{_number(value)}</tr>" for name, value in rows)
    return (
        f"<table><thead><tr>{_heads(heads, 1)}</tr></thead><tbody>{body}"
        f'<tr class="sum"><td>Total</td>{_number(total)}</tr></tbody></table>'
    )  # fmt: skip


def _heads(names: tuple[str, ...], text: int) -> str:
    return "".join(f"<th{'' if at < text else ' class=n'}>{escape(name)}</th>" for at, name in enumerate(names))


def _number(text: str) -> str:
    return f'<td class="n">{escape(text)}</td>'


def _plot(made: Statement) -> str:
    """A bar for each day, negative ones (corrections of earlier days) below the line."""
    width, height, left, top = 840, 170, 70, 14
    values = list(made.days.values())
    highest, lowest = max([*values, Decimal(0)]), min([*values, Decimal(0)])
    span = highest - lowest or Decimal(1)
    step = (width - left) / len(values)
    zero = top + float(highest / span) * height
    parts = [f'<line x1="{left}" x2="{width}" y1="{zero:.1f}" y2="{zero:.1f}"/>']
    for at, (day, value) in enumerate(made.days.items()):
        tall = float(abs(value) / span) * height
        x, y = left + at * step, zero - (tall if value > 0 else 0)
        bar = f'<rect x="{x + step * 0.12:.1f}" y="{y:.1f}" width="{step * 0.76:.1f}" height="{tall:.1f}">'
        parts.append(f"{bar}<title>{escape(day)}: {money(value, made)} {escape(made.currency)}</title></rect>")
        if at % 5 == 0:
            parts.append(f'<text x="{x + step / 2:.1f}" y="{top + height + 18}" text-anchor="middle">{escape(day[-2:])}</text>')
    for value in {highest, Decimal(0), lowest}:
        y = top + float((highest - value) / span) * height
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{money(value, made)}</text>')
    label = f"Amount of each day in {escape(made.currency)}"
    return f'<svg viewBox="0 0 {width} {top + height + 26}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _foot(made: Statement) -> str:
    partial = f" {made.partial:,} were cut short by a lost engine and are billed as far as they had come." if made.partial else ""
    return (
        f"<footer><p>Days begin at midnight in {escape(made.zone)}. A request counts on the day on which its end was recorded.{partial} "
        "Each item is rounded once for the month and price, half to even; lines that share it share its rounded amount, so that all of the "
        "above add up exactly. 1 GB is 1024³ bytes. "
        f"Usage recorded up to message {made.sequence:,} of the stream.</p></footer>"
    )
