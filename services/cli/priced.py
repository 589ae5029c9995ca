"""Usage with prices: asked for period by period, and turned into lines that add up."""

from decimal import Decimal

import msgspec

from services.cli.client import Client
from shared.contracts.usage_query import UsageReply, UsageRow
from shared.policy.bill import Line, Part, bill, total
from shared.policy.periods import shown, zone_of
from shared.policy.prices import PriceSheet
from shared.policy.usage_rollup import plus


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """`reply`: the use that is billed, row by row; `amounts` of its rows. Lines' `part.row` is such a row's number."""

    currency: str
    total: Decimal
    reply: UsageReply
    amounts: tuple[Decimal, ...]
    lines: tuple[Line, ...]


def bill_of(client: Client, sheet: PriceSheet, span: tuple[int, int], group_by: tuple[str, ...], zone: str, tenant: str) -> Bill:
    """:raises ConfigInvalid: the sheet has no prices for some of the time."""
    rows: dict[tuple[object, ...], tuple[int, UsageRow]] = {}
    parts: list[Part] = []
    reply: UsageReply | None = None
    for period, begin, end in sheet.spans(*span):
        edge = zone_of(zone)
        found = client.usage(shown(begin, edge), shown(end, edge), group_by=(*group_by, "tenant"), zone=zone, tenant=tenant)
        reply = found if reply is None else msgspec.structs.replace(
            found, from_ms=reply.from_ms, refused=max(reply.refused, found.refused), missing=max(reply.missing, found.missing)
        )  # fmt: skip
        for row in found.rows:
            label = row if _by_tenant(group_by) else msgspec.structs.replace(row, tenant_id="", tenant="")
            key = (label.day, label.tenant_id, label.alias, label.base, label.version, label.digest, label.key_id)
            at, known = rows.get(key, (len(rows), None))
            rows[key] = (at, label if known is None else _joined(known, row))
            parts.append(Part(row=at, period=period, tenant_id=row.tenant_id, tenant=row.tenant, amounts=row.amounts))
    assert reply is not None
    lines = bill(sheet, parts)
    amounts = [Decimal(0).scaleb(-sheet.digits)] * len(rows)
    for line in lines:
        amounts[line.part.row] += line.amount
    billed = msgspec.structs.replace(reply, group_by=group_by, rows=[row for _, row in rows.values()])
    return Bill(currency=sheet.currency, total=total(sheet, lines), reply=billed, amounts=tuple(amounts), lines=tuple(lines))


def _by_tenant(group_by: tuple[str, ...]) -> bool:
    return not {"tenant", "adapter", "version"}.isdisjoint(group_by)


def _joined(known: UsageRow, more: UsageRow) -> UsageRow:
    outcomes = {name: known.outcomes.get(name, 0) + more.outcomes.get(name, 0) for name in {**known.outcomes, **more.outcomes}}
    return msgspec.structs.replace(known, amounts=plus(known.amounts, more.amounts), outcomes=outcomes)
