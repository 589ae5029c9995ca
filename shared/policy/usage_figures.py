"""Amounts in the units that people read: milliseconds, their means, GB-hours. 1 GB = 1024^3 bytes, as everywhere here."""

from typing import Any

from shared.contracts.usage_query import EngineRow, UsageRow
from shared.policy.usage_rollup import Amounts

GB_HOUR_BYTE_MS = (1 << 30) * 3_600_000


def figures(amounts: Amounts) -> dict[str, Any]:
    """By column. Means are None where there is nothing to take one of."""
    return {
        "requests": amounts.requests,
        "prompt_tokens": amounts.prompt_tokens,
        "cached_tokens": amounts.cached_tokens,
        "output_tokens": amounts.completion_tokens,
        "queue_ms": amounts.queue_us / 1000,
        "queue_ms_mean": _mean_ms(amounts.queue_us, amounts.attempts),
        "first_token_ms": amounts.first_token_us / 1000,
        "first_token_ms_mean": _mean_ms(amounts.first_token_us, amounts.first_tokens),
        "total_ms": amounts.request_us / 1000,
        "total_ms_mean": _mean_ms(amounts.request_us, amounts.requests),
        "gpu_ms": amounts.gpu_us / 1000,
        "kv_gb_hours": gb_hours(amounts.kv_byte_ms),
        "adapter_gb_hours": gb_hours(amounts.adapter_byte_ms),
        "attempts": amounts.attempts,
        "partial": amounts.partial,
    }


def labels(row: UsageRow, group_by: tuple[str, ...]) -> dict[str, Any]:
    """The row's own groups, by column."""
    found: dict[str, Any] = {}
    for group in group_by:
        match group:
            case "day":
                found["day"] = row.day
            case "tenant":
                found |= {"tenant": row.tenant, "tenant_id": row.tenant_id}
            case "adapter" | "version":
                found |= {"tenant": row.tenant, "tenant_id": row.tenant_id, "adapter": adapter_name(row)}
                found |= {"version": row.version, "digest": row.digest} if group == "version" else {}
            case _:
                found["key"] = row.key_id
    return found


def adapter_name(row: UsageRow) -> str:
    """What requests that named no adapter are called: the base's own, or those refused before it was known what they asked for."""
    return row.alias or ("(base)" if row.base else "(none)")


def engine_figures(row: EngineRow) -> dict[str, Any]:
    """Milliseconds, and each part of the wall time in per cent."""
    overhead_us = sum(row.overhead_us.values())
    found: dict[str, Any] = {"worker": row.worker_id, "incarnation": row.incarnation, "pool": row.pool_id, "wall_ms": row.wall_us / 1000}
    for name, value in (("busy", row.busy_us), ("idle", row.idle_us), ("overhead", overhead_us), ("unaccounted", row.unaccounted_us)):
        found |= {f"{name}_ms": value / 1000, f"{name}_percent": round(100 * value / row.wall_us, 3) if row.wall_us else 0.0}
    return found | {"billed_ms": row.billed_us / 1000, "steps": row.steps}


def gb_hours(byte_ms: int) -> float:
    return round(byte_ms / GB_HOUR_BYTE_MS, 9)


def _mean_ms(sum_us: int, count: int) -> float | None:
    return round(sum_us / count / 1000, 3) if count else None
