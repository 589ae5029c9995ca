"""`tenantry apply -f FILE`: makes the registry hold what the file says, and says what changed."""

from pathlib import Path
from typing import Annotated

import typer

from services.cli import access
from services.cli.apply import Outcome, apply, read
from services.cli.client import ClientError
from services.cli.output import console, print_json
from services.cli.progress import ApplyProgress

_NAMED = 5  # of those left alone
_MARKS = {"added": "+", "changed": "~", "loaded": "+", "unchanged": "=", "failed": "!"}
_STYLES = {"added": "green", "changed": "yellow", "loaded": "green", "unchanged": "dim", "failed": "red"}


def apply_file(
    file: Annotated[Path, typer.Option("-f", "--file", help="The YAML file; folders are read beside it.")],
    drain_first: Annotated[
        bool, typer.Option("--drain-first", help="Where a new version finds no room: take the old one down first.")
    ] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for each adapter.")] = 300.0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Apply a YAML file. Twice changes nothing; what the file does not name is left alone."""
    manifest = read(file)
    with access.client(url, data) as client:
        if as_json:
            outcome = apply(client, manifest, file.parent, drain_first=drain_first, wait_s=wait_s)
            print_json(outcome)
        else:
            with ApplyProgress() as listener:
                outcome = apply(client, manifest, file.parent, drain_first=drain_first, wait_s=wait_s, listener=listener)
            print_outcome(outcome)
    if outcome.failed:
        names = ", ".join(change.what for change in outcome.failed)
        raise ClientError(f"{len(outcome.failed)} of the file's adapters do not serve: {names}", peer_code="apply_failed")


def print_outcome(outcome: Outcome) -> None:
    for change in outcome.changes:
        if change.kind == "left_alone":
            continue
        line = f"{_MARKS[change.kind]} {change.what}" + (f": {change.detail}" if change.detail else "")
        console.print(line, style=_STYLES[change.kind], markup=False, soft_wrap=True)
    others = [change.what for change in outcome.changes if change.kind == "left_alone"]
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        console.print(f"  left alone, not in the file: {', '.join(others[:_NAMED])}{more}", style="dim", markup=False, soft_wrap=True)
    if not outcome.changed and not outcome.failed:
        console.print("nothing to change", style="dim")
