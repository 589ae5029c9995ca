"""`tenantry audit`: what was done, by whom, from where."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from services.cli import access
from services.cli.client import Client
from services.cli.output import console, print_json, print_line, table
from shared.contracts.audit import AuditLine, AuditRecord, Phase
from shared.errors import ConfigInvalid

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_PAGE = 1000
_PHASE_STYLES = {Phase.DONE: "green", Phase.REFUSED: "yellow", Phase.FAILED: "red", Phase.ASKED: "cyan"}
_WHAT_CHARS = 160


def audit(
    since: Annotated[str, typer.Option("--since", help="90m, 24h, 7d ago, or a time like 2026-11-30T12:00:00Z.")] = "24h",
    until: Annotated[str, typer.Option("--until", help="The same; left out: now.")] = "",
    tenant: Annotated[str, typer.Option("--tenant")] = "",
    action: Annotated[str, typer.Option("--action", help="An operation or a step: create_key, promote_canary, adapter.*")] = "",
    own: Annotated[bool, typer.Option("--own", help="As the tenant itself sees it; for a team with a key of its own.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Lines at most.")] = 200,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """What was done, by whom and from where, oldest first."""
    if own and not tenant:
        raise ConfigInvalid("--own needs --tenant", where="--own")
    now = datetime.now(UTC)
    with access.client(url, data) as client:
        lines, more = read(
            client, limit, tenant=tenant, own=own, action=action, since=_time("--since", since, now), until=_time("--until", until, now)
        )  # fmt: skip
    if as_json:
        print_json(lines)
        return
    if not lines:
        print_line("nothing was done in that time")
        return
    console.print(audit_table(lines))
    if more:
        print_line(f"there is more after {lines[-1].at}: go on with --since {lines[-1].at}, or raise --limit")


def read(client: Client, limit: int, **wanted: Any) -> tuple[list[AuditLine], bool]:
    """The first `limit` lines over as many pages as it takes, and whether there are more."""
    lines: list[AuditLine] = []
    after = 0
    while True:
        page = client.audit(**wanted, after=after, limit=min(_PAGE, limit - len(lines)))
        lines += page.lines
        after = page.next
        if not after or len(lines) >= limit:
            return lines, bool(after)


def audit_table(lines: list[AuditLine]) -> Any:
    rows = [
        (
            line.at[:19].replace("T", " "),
            line.record.who,
            line.record.address,
            line.record.tenant,
            line.record.action,
            _what(line.record),
            _outcome(line.record),
        )
        for line in lines
    ]
    return table(("at (UTC)", "who", "from", "tenant", "action", "detail", "outcome"), rows)


def _what(record: AuditRecord) -> str:
    """The adapter's version, else the fields that say something."""
    what = {**record.what, **{name: value for name, value in record.result.items() if name in ("version", "key_id", "prefix")}}
    name, version = what.pop("name", ""), what.pop("version", "")
    what = {field: value for field, value in what.items() if field not in ("tenant", "adapter_id", "digest", "worker", "request")}
    said = f"{name}@{version}" if name and version else str(name)
    said = " ".join([said, *(f"{field}={_short(value)}" for field, value in what.items())]).strip()
    said = f"{said}: {record.note}" if record.note and record.phase is Phase.HAPPENED else said
    return said if len(said) <= _WHAT_CHARS else said[: _WHAT_CHARS - 1] + "…"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + " ".join(f"{field}={_short(inner)}" for field, inner in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType]
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _outcome(record: AuditRecord) -> Text:
    if record.phase is Phase.HAPPENED:
        return Text(record.error, style="red")
    said = f"{record.phase} ({record.error})" if record.error else str(record.phase)
    return Text(said, style=_PHASE_STYLES.get(record.phase, ""))


def _time(option: str, text: str, now: datetime) -> str:
    """RFC 3339, UTC.

    :raises ConfigInvalid: neither a time nor how long ago.
    """
    if not text:
        return ""
    ago = re.fullmatch(r"(\d+)([smhd])", text)
    try:
        at = now - timedelta(seconds=int(ago[1]) * _UNITS_S[ago[2]]) if ago else datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError) as error:
        raise ConfigInvalid(f"{option} {text!r}: expected 90m, 24h, 7d or a time like 2026-11-30T12:00:00Z", where=option) from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).isoformat()
