"""How results look: tables for people, JSON for programs, one line for an error."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.client import ClientError
from shared.contracts.admin import AdapterView
from shared.errors import TenantryError

MB = 1024 * 1024

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

_STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "loading": "cyan",
    "rejected": "red",
    "failed": "red",
    "stopped": "red",
    "unloaded": "dim",
}


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_error(error: TenantryError, *, as_json: bool = False) -> None:
    """One line on stderr; for programs the code and fields too."""
    if as_json:
        code = error.peer_code if isinstance(error, ClientError) and error.peer_code else error.code
        body = {"error": {"message": error.message, "code": code, **error.fields}}
        sys.stderr.write(msgspec.json.encode(body).decode() + "\n")
        return
    errors.print(f"tenantry: {error.message}", style="red", markup=False, soft_wrap=True)


def print_line(text: str) -> None:
    """Never wrapped, so that it can be pasted."""
    console.print(text, markup=False, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, right: Sequence[str] = (), spare: Sequence[str] = ()) -> Table:
    """`spare`: columns to leave out, the first one first, while the table is wider than the terminal."""
    cells = [list(row) for row in rows]
    widths = {name: max(len(name), *(len(row[at]) for row in cells), 0) + 2 for at, name in enumerate(columns)}
    left_out: set[str] = set()
    for name in spare:
        if sum(width for column, width in widths.items() if column not in left_out) - 2 > console.width:
            left_out.add(name)
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        if column not in left_out:
            made.add_column(column, justify="right" if column in right else "left", no_wrap=column not in {"reason", "detail"})
    for row in cells:
        made.add_row(*(cell for cell, column in zip(row, columns, strict=True) if column not in left_out))
    return made


def facts(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Names on the left, values on the right, no heading."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def megabytes(size_bytes: int) -> str:
    size = size_bytes / MB
    return f"{size:.0f} MB" if size >= 100 or size_bytes % MB == 0 else f"{size:.1f} MB"


def short_digest(digest: str) -> str:
    """`sha256:` and 12 of its hex digits: enough to tell versions apart by eye."""
    kind, _, value = digest.rpartition(":")
    return f"{kind}:{value[:12]}" if kind else value[:12]


def adapters_table(views: Iterable[AdapterView]) -> Table:
    rows = [
        (
            view.tenant,
            f"{view.name}@{view.version}" + (" *" if view.serving else " (trial)" if view.on_trial else ""),
            state_text(view.state),
            str(view.rank),
            megabytes(view.slot_bytes),
            f"{view.load_ms:.0f} ms" if view.load_ms else "",
            short_digest(view.digest),
            view.error.message if view.error else "",
        )
        for view in views
    ]
    columns = ["tenant", "adapter", "state", "rank", "VRAM", "load", "digest", "reason"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows, right=("rank", "VRAM", "load"))
