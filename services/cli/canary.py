"""`tenantry canary`: a new version answers a part of its alias's requests, beside the one that serves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli import access
from services.cli.client import Client, ClientError
from services.cli.output import adapters_table, console, facts, print_json, print_line, state_text, table
from services.cli.progress import upload_progress
from shared.contracts.admin import CanaryView, TrialFigures
from shared.errors import ConfigInvalid

app = typer.Typer(no_args_is_help=True, help="Trials of new versions on a part of the requests.")

Name = Annotated[str, typer.Argument(help="The adapter's name.")]
OfTenant = Annotated[str, typer.Option("--tenant", help="Needed only where several tenants have a trial of this name.")]
Share = Annotated[str, typer.Option("--share", help="10% or 0.1 of the requests; with --by header of those that carry it.")]
By = Annotated[str, typer.Option("--by", help="request, session (x-tenantry-session, else `user`), or header (x-tenantry-canary: 1).")]
Window = Annotated[float | None, typer.Option("--window", help="Seconds that a stop looks back.")]
MinRequests = Annotated[int | None, typer.Option("--min-requests", help="Answers of the trial before it is judged.")]
Margin = Annotated[str, typer.Option("--error-margin", help="By how much its errors may pass the stable version's, e.g. 5%.")]
Ratio = Annotated[float | None, typer.Option("--latency-ratio", help="How many times the stable version's p95 to the first byte.")]
OfVersion = Annotated[int, typer.Option("--version", min=0, help="Only if this one is on trial.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0, help="With --on-deadline abort: seconds that what runs still gets.")]
OnDeadline = Annotated[str, typer.Option("--on-deadline", help="wait until they end, or abort (with an error).")]


@app.command("start")
def start(
    tenant: Annotated[str, typer.Argument()],
    name: Name,
    path: Annotated[Path | None, typer.Argument(help="Folder or archive; left out: a stored version that is at rest.")] = None,
    share: Share = "0",
    by: By = "request",
    version: Annotated[int, typer.Option("--version", min=0, help="Which stored version; 0: the newest.")] = 0,
    window_s: Window = None,
    min_requests: MinRequests = None,
    error_margin: Margin = "",
    latency_ratio: Ratio = None,
    base: Annotated[str, typer.Option("--base", help="A base identity, where the artifact names none or a wrong one.")] = "",
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until it is ready.")] = 300.0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Mount a version beside the one that serves, and send it a share of the requests."""
    stop = _stop(window_s, min_requests, error_margin, latency_ratio)
    part = _part("--share", share)
    if path is not None and not path.exists():
        raise ClientError(f"there is no {path}", peer_code="not_found")
    with access.client(url, data) as client:
        with upload_progress(f"{tenant}/{name}", shown=path is not None and not as_json) as progress:
            view = client.start_canary(
                tenant, name, path, share=part, by=by, version=version, base=base, wait_s=wait_s, progress=progress, **stop
            )  # fmt: skip
        if view.state != "ready":
            raise ClientError(f"version {view.version} of {name} is {view.state} still", peer_code="not_ready")
        trial = client.canary(name, tenant)
    if as_json:
        print_json(trial)
    else:
        console.print(adapters_table([view]))
        console.print()
        console.print(canaries_table([trial]))


@app.command("status")
def status(
    name: Annotated[str, typer.Argument(help="One of them, with its terms.")] = "",
    tenant: Annotated[str, typer.Option("--tenant")] = "",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """What is on trial, and what both versions did in its window."""
    with access.client(url, data) as client:
        found = [trial for trial in client.canaries(tenant) if name in ("", trial.name)]
    if as_json:
        print_json(found)
        return
    if not found:
        print_line(f"no version{f' of {name}' if name else ''} is on trial")
        return
    console.print(canaries_table(found))
    if name:
        for trial in found:
            console.print()
            console.print(_terms(trial))


@app.command("set")
def change(
    name: Name,
    tenant: OfTenant = "",
    share: Share = "",
    by: By = "",
    window_s: Window = None,
    min_requests: MinRequests = None,
    error_margin: Margin = "",
    latency_ratio: Ratio = None,
    resume: Annotated[bool, typer.Option("--resume", help="Let a trial that was stopped run again.")] = False,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Change share, rule or stop while it runs; what is not named stays."""
    stop = _stop(window_s, min_requests, error_margin, latency_ratio)
    part = _part("--share", share) if share else None
    with access.client(url, data) as client:
        trial = client.change_canary(name, tenant or _owner(client, name), share=part, by=by or None, resume=resume, **stop)
    if as_json:
        print_json(trial)
    else:
        console.print(canaries_table([trial]))


@app.command("promote")
def promote(
    name: Name,
    tenant: OfTenant = "",
    version: OfVersion = 0,
    deadline_s: Deadline = 300.0,
    on_deadline: OnDeadline = "wait",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Make the version on trial the one that serves; the other one drains."""
    with access.client(url, data) as client:
        owner = tenant or _owner(client, name)
        was = client.promote_canary(name, owner, version=version, deadline_s=deadline_s, on_deadline=on_deadline)
    if as_json:
        print_json(was)
    else:
        drains = f"; version {was.stable_version} drains" if was.stable_version else ""
        print_line(f"{owner}/{name}: version {was.version} serves now{drains}")


@app.command("rollback")
def roll_back(
    name: Name,
    tenant: OfTenant = "",
    version: OfVersion = 0,
    deadline_s: Deadline = 300.0,
    on_deadline: OnDeadline = "wait",
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """End the trial; its version drains, and the other one goes on serving."""
    with access.client(url, data) as client:
        owner = tenant or _owner(client, name)
        was = client.roll_back_canary(name, owner, version=version, deadline_s=deadline_s, on_deadline=on_deadline)
    if as_json:
        print_json(was)
    else:
        serves = f"; version {was.stable_version} serves on" if was.stable_version else ""
        print_line(f"{owner}/{name}: version {was.version} drains{serves}")


def canaries_table(trials: list[CanaryView]) -> Any:
    """Two lines of each trial: the stable version, and the one on trial."""
    rows: list[tuple[Any, ...]] = []
    for trial in trials:
        rest = "" if trial.by == "header" else f"{100 - trial.share_ppm / 10_000:g}%"
        stable = f"{trial.name}@{trial.stable_version}" if trial.stable_version else f"{trial.name} (gone)"
        rows.append((trial.tenant, stable, "stable", rest, *_shown(trial.stable), ""))
        share = f"{trial.share_ppm / 10_000:g}% by {trial.by}"
        state = state_text("stopped" if trial.stopped else trial.state)
        rows.append((trial.tenant, f"{trial.name}@{trial.version}", state, share, *_shown(trial.trial), trial.stopped))
    columns = ["tenant", "adapter", "state", "share", "requests", "errors", "refused", "p50", "p95", "reason"]
    said = {"refused", "reason"} - {column for at, column in enumerate(columns) if any(row[at] not in ("", "0") for row in rows)}
    kept = [at for at, column in enumerate(columns) if column not in said]
    return table(
        [columns[at] for at in kept],
        [[row[at] for at in kept] for row in rows],
        right=("requests", "errors", "refused", "p50", "p95"),
    )


def _shown(figures: TrialFigures) -> tuple[str, str, str, str, str]:
    errors = f"{figures.errors} ({figures.errors / figures.requests:.1%})" if figures.errors and figures.requests else str(figures.errors)
    return str(figures.requests), errors, str(figures.refused), _ms(figures.p50_ms), _ms(figures.p95_ms)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value else ""


def _terms(trial: CanaryView) -> Any:
    stop = trial.stop
    rows = [
        ("started", trial.started_at[:19].replace("T", " ") + " UTC"),
        ("judged over", f"{stop.window_s:g} s, from {stop.min_requests} requests on"),
        ("stops above", f"{stop.error_rate_margin:.1%} more errors, or {stop.latency_ratio:g} times the p95 to the first byte"),
    ]
    return facts(rows)


def _owner(client: Client, name: str) -> str:
    owners = sorted({trial.tenant for trial in client.canaries() if trial.name == name})
    if not owners:
        raise ClientError(f"no version of {name} is on trial", status=404, peer_code="not_found")
    if len(owners) > 1:
        raise ClientError(f"several tenants have a trial of {name}: say which ({', '.join(owners)})", status=409, peer_code="conflict")
    return owners[0]


def _part(option: str, text: str) -> float:
    """`10%` or `0.1`.

    :raises ConfigInvalid: neither, or not between nothing and the whole.
    """
    try:
        part = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise ConfigInvalid(f"{option} {text!r}: expected 0% to 100%, or 0 to 1", where=option, got=text)
    return part


def _stop(window_s: float | None, min_requests: int | None, error_margin: str, latency_ratio: float | None) -> dict[str, Any]:
    given: dict[str, Any] = {"window_s": window_s, "min_requests": min_requests, "latency_ratio": latency_ratio}
    if error_margin:
        given["error_rate_margin"] = _part("--error-margin", error_margin)
    return {name: value for name, value in given.items() if value is not None}
