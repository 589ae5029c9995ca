"""`tenantry tenant`: tenants and their keys."""

from typing import Annotated, Any

import typer

from services.cli import access, keys
from services.cli.limits import of_options, said
from services.cli.output import console, facts, megabytes, print_json, print_line, table
from shared.contracts.admin import TenantView

app = typer.Typer(no_args_is_help=True, help="Tenants and their API keys.")
app.add_typer(keys.app, name="key")

_LIMITS = "Limits (N, or `none` for no limit)"


def _limit(name: str, text: str) -> Any:
    return typer.Option(name, metavar="N", help=text, rich_help_panel=_LIMITS)


KvQuota = Annotated[str | None, _limit("--kv-quota-mb", "KV cache per pool, guaranteed; the most it may hold unless --burst.")]
MaxConcurrent = Annotated[str | None, _limit("--max-concurrent", "Requests at once, per pool.")]
RequestsPerMinute = Annotated[str | None, _limit("--requests-per-minute", "Over all routers.")]
TokensPerMinute = Annotated[str | None, _limit("--tokens-per-minute", "Prompt and output, over all routers.")]
HostCache = Annotated[str | None, _limit("--host-cache-mb", "Its packed adapters in a worker's host memory.")]
Artifacts = Annotated[str | None, _limit("--artifact-mb", "Its stored adapter files, all versions.")]
Burst = Annotated[
    bool | None,
    typer.Option("--burst/--no-burst", help="May borrow KV cache that others' guarantees leave unused.", rich_help_panel=_LIMITS),
]
Weight = Annotated[str | None, _limit("--weight", "Share of the engine's time while several tenants have work.")]
DefaultMaxTokens = Annotated[str | None, _limit("--default-max-tokens", "What a request without max_tokens reserves.")]
QueueLimit = Annotated[str | None, _limit("--queue-limit", "Its requests that may wait on one worker.")]
QueueDeadline = Annotated[str | None, _limit("--queue-deadline-s", "Seconds that one may wait.")]
CacheGroup = Annotated[
    str | None,
    typer.Option(
        "--cache-group",
        metavar="NAME",
        help="Share the prefix cache of base traffic with tenants of the same group, or `none`.",
        rich_help_panel=_LIMITS,
    ),
]


@app.command("add")
def add(
    name: Annotated[str, typer.Argument()],
    quota_mb: Annotated[int, typer.Option("--quota-mb", min=0, help="VRAM that its adapters may hold.")] = 0,
    headroom_mb: Annotated[int, typer.Option("--headroom-mb", min=0, help="Room for a second version while an alias is switched.")] = 0,
    base: Annotated[bool, typer.Option("--base/--no-base", help="May it use the bare base model?")] = True,
    nats_user: Annotated[bool, typer.Option("--nats-user", help="Make a NATS user, to onboard adapters by event.")] = False,
    kv_quota_mb: KvQuota = None,
    max_concurrent: MaxConcurrent = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    host_cache_mb: HostCache = None,
    artifact_mb: Artifacts = None,
    burst: Burst = None,
    weight: Weight = None,
    default_max_tokens: DefaultMaxTokens = None,
    queue_limit: QueueLimit = None,
    queue_deadline_s: QueueDeadline = None,
    cache_group: CacheGroup = None,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Add a tenant."""
    given = of_options(
        {
            "kv_quota_mb": kv_quota_mb,
            "max_concurrent": max_concurrent,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "host_cache_mb": host_cache_mb,
            "artifact_mb": artifact_mb,
            "burst": burst,
            "weight": weight,
            "default_max_tokens": default_max_tokens,
            "queue_limit": queue_limit,
            "queue_deadline_s": queue_deadline_s,
            "cache_group": cache_group,
        }
    )
    with access.client(url, data) as client:
        view = client.add_tenant(
            name,
            vram_quota_mb=quota_mb,
            upgrade_headroom_mb=headroom_mb,
            base_allowed=base,
            nats_user=nats_user,
            limits=given,
        )
    if as_json:
        print_json(view)
        return
    print_line(f"tenant {view.name} added: VRAM quota {megabytes(view.vram_quota_bytes)}")
    _print_notes(view)
    if view.nats_password:
        print_line(f"NATS user {view.nats_user or view.tenant_id}, password (shown once): {view.nats_password}")


@app.command("set", hidden=True)
@app.command("update")
def change(
    name: Annotated[str, typer.Argument()],
    quota_mb: Annotated[int | None, typer.Option("--quota-mb", min=0)] = None,
    headroom_mb: Annotated[int | None, typer.Option("--headroom-mb", min=0)] = None,
    base: Annotated[bool | None, typer.Option("--base/--no-base")] = None,
    default_adapter: Annotated[str | None, typer.Option("--default-adapter")] = None,
    nats_user: Annotated[bool, typer.Option("--nats-user", help="Make a NATS user, or a new password for it.")] = False,
    kv_quota_mb: KvQuota = None,
    max_concurrent: MaxConcurrent = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    host_cache_mb: HostCache = None,
    artifact_mb: Artifacts = None,
    burst: Burst = None,
    weight: Weight = None,
    default_max_tokens: DefaultMaxTokens = None,
    queue_limit: QueueLimit = None,
    queue_deadline_s: QueueDeadline = None,
    cache_group: CacheGroup = None,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Change a tenant; what is not named stays. A quota below what is held evicts nothing and lets nothing new in."""
    given = of_options(
        {
            "kv_quota_mb": kv_quota_mb,
            "max_concurrent": max_concurrent,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "host_cache_mb": host_cache_mb,
            "artifact_mb": artifact_mb,
            "burst": burst,
            "weight": weight,
            "default_max_tokens": default_max_tokens,
            "queue_limit": queue_limit,
            "queue_deadline_s": queue_deadline_s,
            "cache_group": cache_group,
        }
    )
    wanted = {
        "vram_quota_bytes": None if quota_mb is None else quota_mb * 1024 * 1024,
        "upgrade_headroom_bytes": None if headroom_mb is None else headroom_mb * 1024 * 1024,
        "base_allowed": base,
        "default_adapter": default_adapter,
        "nats_password": nats_user or None,
        "limits": given or None,
    }
    with access.client(url, data) as client:
        view = client.update_tenant(name, **{field: value for field, value in wanted.items() if value is not None})
    if as_json:
        print_json(view)
        return
    print_line(f"tenant {view.name} changed")
    _print_notes(view)
    if view.nats_password:
        print_line(f"NATS user {view.nats_user or view.tenant_id}, password (shown once): {view.nats_password}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument()],
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Show what a tenant asks for, holds and is allowed."""
    with access.client(url, data) as client:
        view = client.tenant(name)
    if as_json:
        print_json(view)
        return
    rows = [
        (
            figure.resource.removesuffix("_bytes"),
            "/".join(part for part in (figure.pool_id, figure.worker_id) if part) or "-",
            _amount(figure.resource, figure.asked) if figure.asked else "-",
            _amount(figure.resource, figure.held),
            "not limited" if figure.allowed is None else _amount(figure.resource, figure.allowed) + (" OVER" if figure.over else ""),
        )
        for figure in view.figures
    ]
    console.print(table(("of", "where", "asked", "held", "allowed"), rows, right=("asked", "held", "allowed")))
    console.print(facts([(key, "-" if value is None else str(value)) for key, value in said(view.limits).items()]))
    _print_notes(view)


@app.command("list")
def list_all(data: access.DataOption = access.DATA, url: access.UrlOption = "", as_json: access.JsonOption = False) -> None:
    """List tenants with what they hold and may hold."""
    with access.client(url, data) as client:
        views = client.tenants()
    if as_json:
        print_json(views)
        return
    rows = [
        (
            view.name,
            str(view.adapters),
            f"{megabytes(view.vram_held_bytes)} / {megabytes(view.vram_quota_bytes)}" + (" OVER" if view.over_quota else ""),
            megabytes(view.upgrade_headroom_bytes),
            "yes" if view.base_allowed else "no",
            view.default_adapter or "-",
            view.nats_user or "-",
        )
        for view in views
    ]
    columns = ("tenant", "adapters", "VRAM held / quota", "headroom", "base", "default", "NATS user")
    console.print(table(columns, rows, right=("adapters", "VRAM held / quota", "headroom")))


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument()],
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
) -> None:
    """Remove a tenant that holds no adapters; its keys are revoked."""
    with access.client(url, data) as client:
        client.delete_tenant(name)
    print_line(f"tenant {name} removed")


def _amount(resource: str, value: int) -> str:
    return megabytes(value) if resource.endswith("_bytes") else str(value)


def _print_notes(view: TenantView) -> None:
    if view.over_quota:
        names = ", ".join(name.removesuffix("_bytes") for name in view.over_quota)
        print_line(f"over quota: {names}; nothing is taken away, and nothing new gets in until less is held")
    for note in view.notes:
        print_line(f"note: {note}")
