"""`tenantry statement`: what one tenant owes for one month, as a page to print and as CSV."""

import re
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import access
from services.cli.output import print_json, print_line
from services.cli.price_file import read_prices
from services.cli.priced import Bill, bill_of
from services.cli.statement_page import Statement, page
from services.cli.usage import as_csv
from shared.errors import ConfigInvalid, NotFound
from shared.policy.bill import UNITS, Line
from shared.policy.periods import day_at, month, zone_of
from shared.policy.prices import ITEMS
from shared.policy.usage_figures import adapter_name

ITEM_NAMES = {
    "prompt_per_1k": ("prompt tokens, not cached", "1,000 tokens"),
    "cached_per_1k": ("prompt tokens from the cache", "1,000 tokens"),
    "output_per_1k": ("output tokens", "1,000 tokens"),
    "gpu_per_s": ("GPU time", "second"),
    "kv_per_gb_hour": ("KV cache", "GB-hour"),
    "adapter_per_gb_hour": ("adapter memory", "GB-hour"),
}
_GROUPS = ("day", "version", "key")
_SAFE = re.compile(r"[^A-Za-z0-9_-]+")


def statement(
    tenant: Annotated[str, typer.Argument(help="Its name; a deleted one's last name, or its id.")],
    month_text: Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="In the price sheet's time zone.")],
    prices: Annotated[Path, typer.Option("--prices", help="The price sheet (YAML or TOML).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the two files.")] = Path(),
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Write a tenant's statement of a month: HTML and CSV."""
    sheet = read_prices(prices)
    span = month(month_text, zone_of(sheet.zone))
    with access.client(url, data) as client:
        bill = bill_of(client, sheet, span, _GROUPS, sheet.zone, tenant)
    if len({row.tenant_id for row in bill.reply.rows}) > 1:
        ids = ", ".join(sorted({row.tenant_id for row in bill.reply.rows}))
        raise NotFound(f"several tenants have been called {tenant}: name one by its id ({ids})", tenant=tenant)
    made = statement_of(bill, tenant, month_text, span)
    name = f"statement-{_SAFE.sub('_', made.tenant)[:64]}-{month_text}"
    files = {out / f"{name}.html": page(made), out / f"{name}.csv": as_csv(_csv_rows(bill))}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"{out} cannot be written: {error.strerror}", where="--out") from error
    if as_json:
        print_json({"files": [str(path) for path in files], "total": str(bill.total), "currency": bill.currency})
        return
    print_line(f"{made.tenant}, {month_text}: {bill.total} {bill.currency}")
    for path in files:
        print_line(f"  {path}")


def statement_of(bill: Bill, tenant: str, month_text: str, span: tuple[int, int]) -> Statement:
    zone = zone_of(bill.reply.zone)
    first, after = day_at(span[0], zone), day_at(span[1], zone)
    days = {(first + timedelta(days=at)).isoformat(): Decimal(0) for at in range((after - first).days)}
    rows = bill.reply.rows
    for line in bill.lines:
        days[rows[line.part.row].day] += line.amount
    by_adapter = _summed(bill, lambda line: (_adapter(bill, line), line.item, line.price))
    by_key = _summed(bill, lambda line: (rows[line.part.row].key_id or "(none: memory held by adapters)",))
    outcomes: dict[str, int] = {}
    for row in rows:
        for name, count in row.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    return Statement(
        tenant=rows[0].tenant if rows else tenant,
        tenant_id=rows[0].tenant_id if rows else "",
        month=month_text,
        zone=bill.reply.zone,
        currency=bill.currency,
        total=bill.total,
        lines=[
            (adapter, *ITEM_NAMES[item], quantity_of(item, quantity), price, amount)
            for (adapter, item, price), (quantity, amount) in sorted(by_adapter.items(), key=lambda entry: _order(entry[0]))
        ],
        days=days,
        keys=[(key[0], amount) for key, (_, amount) in sorted(by_key.items())],
        outcomes=dict(sorted(outcomes.items(), key=lambda entry: (entry[0] != "complete", entry[0]))),
        partial=sum(row.amounts.partial for row in rows),
        sequence=bill.reply.sequence,
        incomplete=bill.reply.missing + bill.reply.refused,
    )


def quantity_of(item: str, quantity: int) -> str:
    """In the item's own unit: tokens as they are, seconds and GB-hours with six digits."""
    if item.endswith("_per_1k"):
        return f"{quantity:,}"
    return f"{Decimal(quantity) / UNITS[item]:,.6f}"


def _summed(bill: Bill, key_of: Callable[[Line], tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[int, Decimal]]:
    found: dict[tuple[Any, ...], tuple[int, Decimal]] = {}
    for line in bill.lines:
        key = key_of(line)
        quantity, amount = found.get(key, (0, Decimal(0)))
        found[key] = (quantity + line.quantity, amount + line.amount)
    return found


def _adapter(bill: Bill, line: Line) -> str:
    row = bill.reply.rows[line.part.row]
    return f"{row.alias}@{row.version}" if row.alias else adapter_name(row)


def _order(key: tuple[Any, ...]) -> tuple[str, int, Decimal]:
    return key[0], ITEMS.index(key[1]), key[2]


def _csv_rows(bill: Bill) -> list[dict[str, Any]]:
    """One row for each line; their amounts add up to the statement's total."""
    found: list[dict[str, Any]] = []
    for line in bill.lines:
        row = bill.reply.rows[line.part.row]
        found.append(
            {
                "day": row.day,
                "tenant": row.tenant,
                "tenant_id": row.tenant_id,
                "adapter": adapter_name(row),
                "version": row.version,
                "digest": row.digest,
                "key": row.key_id,
                "item": line.item.rpartition("_per_")[0],
                "quantity": quantity_of(line.item, line.quantity).replace(",", ""),
                "unit": ITEM_NAMES[line.item][1].replace("1,000 ", ""),
                "price": f"{line.price:f}",
                "per": ITEM_NAMES[line.item][1].replace(",", ""),
                "amount": str(line.amount),
                "currency": bill.currency,
            }
        )
    return found
