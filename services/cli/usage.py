"""`tenantry usage`: what tenants used and what it costs; where the engines' time went."""

import csv
import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import access
from services.cli.output import console, print_json, print_line, table
from services.cli.price_file import read_prices
from services.cli.priced import Bill, bill_of
from shared.contracts.usage_query import UsageReply
from shared.policy.usage_figures import engine_figures, figures, labels
from shared.policy.usage_rollup import Amounts, plus


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


app = typer.Typer(help="What tenants used, and what it costs.")

From = Annotated[str, typer.Option("--from", metavar="DATE|TIME", help="A date of the zone, or RFC 3339; default: the month's first day.")]
To = Annotated[str, typer.Option("--to", metavar="DATE|TIME", help="Not included; default: the end of today.")]
Zone = Annotated[str, typer.Option("--zone", help="Whose midnights part days, e.g. Europe/Berlin.")]
FormatOption = Annotated[Format, typer.Option("--format")]


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    begin: From = "",
    end: To = "",
    group_by: Annotated[str, typer.Option("--group-by", help="Some of tenant, adapter, version, key, day, with commas.")] = "tenant",
    tenant: Annotated[str, typer.Option("--tenant", help="Of this one only; a deleted one by its last name or its id.")] = "",
    zone: Zone = "UTC",
    prices: Annotated[Path | None, typer.Option("--prices", help="A price sheet (YAML or TOML): adds what each row costs.")] = None,
    form: FormatOption = Format.TABLE,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """What was used between two moments, summed by what is asked for."""
    if context.invoked_subcommand is not None:
        return
    groups = tuple(part.strip() for part in group_by.split(",") if part.strip())
    sheet = read_prices(prices) if prices is not None else None
    with access.client(url, data) as client:
        reply = client.usage(begin, end, group_by=groups, zone=zone, tenant=tenant)
        bill = None
        if sheet is not None:
            bill = bill_of(client, sheet, (reply.from_ms, reply.to_ms), reply.group_by, zone, tenant)
            reply = bill.reply
    if as_json or form is Format.JSON:
        print_json(bill if bill is not None else reply)
    elif form is Format.CSV:
        sys.stdout.write(as_csv([_flat(row, reply) | _cost(bill, at) for at, row in enumerate(reply.rows)]))
    else:
        _print(reply, bill)


@app.command("engines")
def engines(
    begin: From = "",
    end: To = "",
    zone: Zone = "UTC",
    form: FormatOption = Format.TABLE,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Where each engine's time went: busy, idle, overhead by name, and what nothing accounts for."""
    with access.client(url, data) as client:
        reply = client.engines_time(begin, end, zone=zone)
    shown = [engine_figures(row) for row in reply.rows]
    if as_json or form is Format.JSON:
        print_json(reply)
        return
    if form is Format.CSV:
        sys.stdout.write(as_csv(shown))
        return
    if not shown:
        print_line("no engine has told of its time between these moments")
        return
    columns = ("worker", "incarnation", "wall s", "busy", "idle", "overhead", "unaccounted", "billed of busy", "steps")
    rows = [
        (
            row["worker"],
            row["incarnation"],
            f"{row['wall_ms'] / 1000:.1f}",
            *(f"{row[f'{name}_percent']:.2f}%" for name in ("busy", "idle", "overhead", "unaccounted")),
            f"{100 * row['billed_ms'] / row['busy_ms']:.2f}%" if row["busy_ms"] else "-",
            str(row["steps"]),
        )
        for row in shown
    ]
    console.print(table(columns, rows, right=columns[2:], spare=("incarnation",)))
    for row in reply.rows:
        parts = ", ".join(f"{name} {value / 1000:.0f} ms" for name, value in row.overhead_us.items())
        if parts:
            print_line(f"overhead of {row.worker_id}: {parts}")


def as_csv(rows: list[dict[str, Any]]) -> str:
    """With a heading. Text that a spreadsheet would take for a formula is quoted as text."""
    if not rows:
        return ""
    out = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _safe(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").removesuffix(".")
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _flat(row: Any, reply: UsageReply) -> dict[str, Any]:
    ends = {f"requests_{name.replace(':', '_')}": count for name, count in row.outcomes.items()}
    return labels(row, reply.group_by) | figures(row.amounts) | ends


def _cost(bill: Bill | None, at: int) -> dict[str, Any]:
    return {} if bill is None else {"amount": str(bill.amounts[at]), "currency": bill.currency}


_SHOWN = (
    ("requests", "requests"), ("ok", ""), ("failed", ""), ("prompt", "prompt_tokens"), ("cached", "cached_tokens"),
    ("output", "output_tokens"), ("queue ms", "queue_ms_mean"), ("first ms", "first_token_ms_mean"), ("total ms", "total_ms_mean"),
    ("gpu ms", "gpu_ms"), ("kv GB-h", "kv_gb_hours"), ("adapter GB-h", "adapter_gb_hours"), ("partial", "partial"),
)  # fmt: skip
_SPARE = ("cached", "queue ms", "partial", "total ms", "first ms", "failed", "ok", "kv GB-h", "gpu ms", "adapter GB-h", "prompt")


def _print(reply: UsageReply, bill: Bill | None) -> None:
    names = [name for name in (labels(reply.rows[0], reply.group_by) if reply.rows else {}) if name not in {"tenant_id", "digest"}]
    amounts, outcomes = Amounts(), dict[str, int]()
    rows: list[tuple[str, ...]] = []
    for at, row in enumerate(reply.rows):
        label = labels(row, reply.group_by)
        rows.append(
            (*(str(label[name] or "-") for name in names), *_cells(row.amounts, row.outcomes), *([str(bill.amounts[at])] if bill else []))
        )
        amounts = plus(amounts, row.amounts)
        for name, count in row.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    if names:
        total = ("total", *[""] * (len(names) - 1))
        rows.append((*total, *_cells(amounts, outcomes), *([f"{bill.total} {bill.currency}"] if bill else [])))
    right = tuple(name for name, _ in _SHOWN) + (("cost",) if bill else ())
    console.print(table((*names, *right), rows, right=right, spare=_SPARE))
    failed = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()) if name != "complete")
    if failed:
        print_line(f"not complete: {failed}")
    if reply.missing or reply.refused:
        print_line(f"incomplete: {reply.missing} messages were gone before they were read, {reply.refused} records could not be counted")


def _cells(amounts: Amounts, outcomes: dict[str, int]) -> list[str]:
    values = figures(amounts)
    complete = outcomes.get("complete", 0)
    found: list[str] = []
    for name, field in _SHOWN:
        if name == "ok":
            found.append(str(complete))
        elif name == "failed":
            found.append(str(amounts.requests - complete))
        else:
            value = values[field]
            found.append(_number(value, 3 if name.endswith("GB-h") else 0))
    return found


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
