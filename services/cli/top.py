"""`tenantry top`: adapters, workers, what is in flight, memory and tokens per second, live."""

import time
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from services.cli import access
from services.cli.client import ClientError
from services.cli.output import MB, console, megabytes, print_json, state_text, table
from shared.contracts.adapters import Mount
from shared.contracts.workers import AdapterUse, WorkerReport

Rates = dict[str, float]  # tokens per second by adapter id


def top(
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between pictures.")] = 1.0,
    data: access.DataOption = access.DATA,
    url: access.UrlOption = "",
    as_json: access.JsonOption = False,
) -> None:
    """Watch the cluster; Ctrl-C ends."""
    with access.client(url, data) as client:
        view = client.top()
        if as_json:
            print_json(view)
            return
        if once or not console.is_terminal:
            console.print(picture(view, {}))
            return
        tokens, seen_at = _tokens(view), time.monotonic()
        with Live(picture(view, {}), console=console, screen=False, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(every_s)
                    try:
                        view = client.top()
                    except ClientError as error:
                        live.update(Text(f"tenantry: {error.message}", style="red"), refresh=True)
                        continue
                    now, before = time.monotonic(), tokens
                    tokens = _tokens(view)
                    rates = {key: max(0, tokens[key] - before.get(key, tokens[key])) / (now - seen_at) for key in tokens}
                    seen_at = now
                    live.update(picture(view, rates), refresh=True)
            except KeyboardInterrupt:
                return


def picture(view: dict[str, Any], rates: Rates) -> Group:
    """Of one answer of /admin/v1/top."""
    parts: list[Any] = []
    for pool in view.get("pools", []):
        parts.append(Text.assemble(("base ", "bold"), _short_base(str(pool.get("base", "")))))
        parts.append(
            table(_WORKER_COLUMNS, [_worker_row(worker) for worker in pool.get("workers", [])], right=_WORKER_COLUMNS[2:], spare=_SPARE)
        )
        memory = _memory_rows(pool)
        if memory:
            parts += [Text(""), table(_MEMORY_COLUMNS, memory, right=_MEMORY_COLUMNS[1:], spare=_MEMORY_SPARE)]
        rows = [_mount_row(mount, rates) for mount in _sorted(pool.get("mounts", []))]
        rows.append(_base_row(pool.get("workers", []), rates))
        parts += [Text(""), table(_ADAPTER_COLUMNS, rows, right=_ADAPTER_COLUMNS[3:], spare=_SPARE)]
    return Group(*(parts or [Text("no worker has come up yet")]))


_WORKER_COLUMNS = ("worker", "state", "in flight", "waiting", "slots", "free memory", "tokens/s")
_MEMORY_COLUMNS = ("memory, MB", "weights", "slots", "KV cache", "graphs", "activations", "context", "others", "host tier", "free")
_SPARE = ("waiting", "requests", "slots", "free memory")  # first what a narrow terminal misses least
_MEMORY_SPARE = ("context", "graphs", "others", "activations", "host tier")
_ADAPTER_COLUMNS = ("tenant", "adapter", "state", "in flight", "waiting", "requests", "tokens", "tokens/s", "VRAM")


def _worker_row(worker: dict[str, Any]) -> tuple[str | Text, ...]:
    name = str(worker.get("worker_id", ""))
    limits: dict[str, Any] = worker.get("limits") or {}
    slots = str(limits.get("slots", ""))
    report = _report(worker)
    if report is None:
        return (name, Text("silent", style="red"), "", "", slots, "", "")
    memory = report.memory
    held = sum(1 for slot in memory.slots if slot.adapter_id)
    return (
        name,
        state_text(report.state),
        f"{report.in_flight} / {report.capacity}",
        str(report.waiting),
        f"{held} / {slots}",
        f"{megabytes(memory.free_bytes)} / {megabytes(memory.total_bytes)}",
        f"{report.completion_tokens_per_s:.0f}",
    )


def _memory_rows(pool: dict[str, Any]) -> list[tuple[str | Text, ...]]:
    """MB: a row for each worker that says where its memory is, and under it one for each tenant whose requests fill KV cache."""
    tenants = {mount["tenant_id"]: mount["tenant"] for mount in pool.get("mounts", [])}
    rows: list[tuple[str | Text, ...]] = []
    for report in filter(None, map(_report, pool.get("workers", []))):
        memory = report.memory
        in_use = sum(memory.kv_in_use.values())
        true_bytes = sum(slot.true_bytes for slot in memory.slots)
        # Where there is no split, on a CPU, everything else is one figure.
        workspace_bytes = memory.workspace_bytes or memory.other_bytes - memory.graphs_bytes - memory.context_bytes
        rows.append(
            (
                report.worker_id,
                _mb(memory.weights_bytes),
                f"{_mb(true_bytes)}/{_mb(memory.slots_bytes)}",
                f"{_mb(in_use)}/{_mb(memory.kv_cache_bytes)}",
                _mb(memory.graphs_bytes),
                _mb(workspace_bytes),
                _mb(memory.context_bytes),
                _mb(memory.foreign_bytes),
                f"{_mb(memory.host_tier_held_bytes)}/{_mb(memory.host_tier_bytes)}",
                f"{_mb(memory.free_bytes)}/{_mb(memory.total_bytes)}",
            )
        )
        for tenant_id, in_use_bytes in sorted(memory.kv_in_use.items(), key=lambda used: -used[1]):
            rows.append((f"  {tenants.get(tenant_id, tenant_id)}", "", "", _mb(in_use_bytes), *[""] * 6))
    return rows


def _mb(size_bytes: int) -> str:
    size = size_bytes / MB
    return f"{size:,.0f}" if size >= 10 or not size_bytes else f"{size:.1f}"


def _mount_row(shown: dict[str, Any], rates: Rates) -> tuple[str | Text, ...]:
    mount = msgspec.convert(shown, Mount)
    use = msgspec.convert(shown["use"], AdapterUse) if shown.get("use") else None
    counts = (str(use.in_flight), str(use.waiting), str(use.requests), str(use.completion_tokens)) if use else ("", "", "", "")
    mark = " *" if shown.get("serving") else ""
    return (
        mount.tenant,
        f"{mount.name}@{mount.version}{mark}",
        state_text(mount.state),
        *counts,
        f"{rates.get(mount.adapter_id, 0.0):.0f}",
        megabytes(mount.slot_bytes),
    )


def _base_row(workers: list[dict[str, Any]], rates: Rates) -> tuple[str | Text, ...]:
    uses = [report.base for report in map(_report, workers) if report is not None]
    return (
        "-", "(base)", "",
        str(sum(use.in_flight for use in uses)),
        str(sum(use.waiting for use in uses)),
        str(sum(use.requests for use in uses)),
        str(sum(use.completion_tokens for use in uses)),
        f"{rates.get('', 0.0):.0f}",
        "",
    )  # fmt: skip


def _short_base(identity: str) -> str:
    label, _, digest = identity.rpartition("@")
    return f"{label}@{digest[:12]}"


def _report(worker: dict[str, Any]) -> WorkerReport | None:
    return msgspec.convert(worker["report"], WorkerReport) if worker.get("report") else None


def _sorted(mounts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(mounts, key=lambda mount: (mount["tenant"], mount["name"], mount["version"]))


def _tokens(view: dict[str, Any]) -> dict[str, int]:
    """Completion tokens so far by adapter id; "" is the base."""
    found: dict[str, int] = {"": 0}
    for pool in view.get("pools", []):
        for mount in pool.get("mounts", []):
            found[mount["adapter_id"]] = (mount.get("use") or {}).get("completion_tokens", 0)
        for report in map(_report, pool.get("workers", [])):
            found[""] += report.base.completion_tokens if report is not None else 0
    return found
