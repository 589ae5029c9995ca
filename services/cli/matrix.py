"""`tenantry matrix`: which adapters go with which base."""

from typing import Annotated

import typer

from services.cli import access
from services.cli.output import console, print_json, print_line, short_digest

app = typer.Typer(no_args_is_help=True, help="Which adapters go with which base.")

Label = Annotated[str, typer.Argument(help="What adapters name as their base: label, or label@revision.")]
Base = Annotated[str, typer.Argument(help="A full base identity, as `tenantry matrix show` lists them.")]
Digest = Annotated[str, typer.Argument(help="An adapter version's digest.")]


@app.command("show")
def show(data: access.DataOption = access.DATA, url: access.UrlOption = "", as_json: access.JsonOption = False) -> None:
    """Show the bases in service, the label aliases and the explicit pairs."""
    with access.client(url, data) as client:
        matrix, pools = client.matrix(), client.pools()
    if as_json:
        print_json({"matrix": matrix, "bases": [pool.get("base", "") for pool in pools]})
        return
    console.print("bases in service", style="bold")
    for pool in pools:
        print_line(f"  {pool.get('base', '')}")
    console.print("labels", style="bold")
    for label, bases in sorted(matrix.labels.items()):
        print_line(f"  {label}")
        for base in bases:
            print_line(f"    -> {base}")
    if matrix.pairs:
        console.print("pairs", style="bold")
    for pair in matrix.pairs:
        verdict = "allowed" if pair.allowed else "refused"
        print_line(f"  {pair.adapter_digest} {verdict} on {pair.base}" + (f" ({pair.note})" if pair.note else ""))


@app.command("alias")
def alias(label: Label, base: Base, data: access.DataOption = access.DATA, url: access.UrlOption = "") -> None:
    """Take adapters that name LABEL as made for BASE."""
    with access.client(url, data) as client:
        client.set_label(label, base)
    print_line(f"{label} -> {base}")


@app.command("unalias")
def unalias(
    label: Label,
    base: Annotated[str, typer.Argument(help="Only this identity; default: all of the label's.")] = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
) -> None:
    """Forget a label, or one identity of it."""
    with access.client(url, data) as client:
        client.remove_label(label, base)
    print_line(f"{label} forgotten")


@app.command("allow")
def allow(
    digest: Digest, base: Base, note: Annotated[str, typer.Option("--note")] = "",
    data: access.DataOption = access.DATA, url: access.UrlOption = "",
) -> None:  # fmt: skip
    """Allow one adapter version on a base that it does not name."""
    with access.client(url, data) as client:
        client.set_pair(digest, base, allowed=True, note=note)
    print_line(f"{short_digest(digest)} allowed on {base}")


@app.command("deny")
def deny(
    digest: Digest, base: Base, note: Annotated[str, typer.Option("--note")] = "",
    data: access.DataOption = access.DATA, url: access.UrlOption = "",
) -> None:  # fmt: skip
    """Refuse one adapter version on a base, whatever it names."""
    with access.client(url, data) as client:
        client.set_pair(digest, base, allowed=False, note=note)
    print_line(f"{short_digest(digest)} refused on {base}")


@app.command("forget")
def forget(digest: Digest, base: Base, data: access.DataOption = access.DATA, url: access.UrlOption = "") -> None:
    """Remove an explicit pair."""
    with access.client(url, data) as client:
        client.remove_pair(digest, base)
    print_line("pair removed")
