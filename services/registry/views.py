"""What people are shown: a record and, while it is mounted, its pool's entry, which is the authority on its state."""

from collections.abc import Callable

import msgspec

from services.registry.guarantees import guarantee_notes
from services.registry.reports import PoolUses
from shared.contracts.adapters import PoolEntry
from shared.contracts.admin import AdapterView, KeyView, QuotaFigure, TenantView
from shared.contracts.state import AdapterRecord, ApiKey, Tenant
from shared.policy.admission import held_bytes, host_bytes
from shared.policy.canary import trial_of


def adapter_view(record: AdapterRecord, pool: PoolEntry | None) -> AdapterView:
    mount = pool.mounts.get(record.adapter_id) if pool else None
    trial = trial_of(pool, record.tenant, record.name) if pool else None
    serving = pool is not None and pool.aliases.get(record.tenant, {}).get(record.name) == record.adapter_id
    return AdapterView(
        tenant=record.tenant,
        name=record.name,
        version=mount.version if mount else record.version,
        adapter_id=record.adapter_id,
        digest=record.digest,
        state=mount.state if mount else record.state,
        serving=serving,
        pool_id=record.pool_id,
        base=record.base,
        base_label=record.base_label,
        provenance=record.provenance or "",
        worker_id=mount.worker_id if mount else record.worker_id,
        rank=record.rank,
        rank_class=record.rank_class,
        slot_bytes=mount.slot_bytes if mount else record.slot_bytes,
        true_bytes=record.true_bytes,
        size_bytes=record.size_bytes,
        modules=record.modules,
        error=record.error,
        history=tuple(msgspec.to_builtins(step) for step in record.history),
        load_ms=record.load_ms,
        on_trial=trial is not None and trial.adapter_id == record.adapter_id,
    )


def tenant_view(
    tenant: Tenant, pools: list[PoolEntry], nats_password: str = "", figures: tuple[QuotaFigure, ...] | None = None
) -> TenantView:
    """`adapters`: those mounted. Without `figures` only those of VRAM are told."""
    figures = figures if figures is not None else tuple(vram_figure(tenant, pool) for pool in pools)
    return TenantView(
        tenant_id=tenant.tenant_id,
        name=tenant.name,
        vram_quota_bytes=tenant.vram_quota_bytes,
        vram_held_bytes=sum(held_bytes(pool, tenant.tenant_id) for pool in pools),
        upgrade_headroom_bytes=tenant.upgrade_headroom_bytes,
        adapters=sum(mount.tenant_id == tenant.tenant_id for pool in pools for mount in pool.mounts.values()),
        base_allowed=tenant.base_allowed,
        default_adapter=tenant.default_adapter,
        adapter_ceilings=tenant.adapter_ceilings,
        nats_user=tenant.tenant_id if tenant.nats_password_bcrypt else "",
        nats_password=nats_password,
        limits=tenant.limits,
        figures=figures,
        over_quota=tuple(dict.fromkeys(figure.resource for figure in figures if figure.over)),
        notes=tuple(note for pool in pools for note in guarantee_notes(pool, tenant)),
    )


def vram_figure(tenant: Tenant, pool: PoolEntry) -> QuotaFigure:
    """The headroom counts while a name has two versions."""
    names = [mount.name for mount in pool.mounts.values() if mount.tenant_id == tenant.tenant_id]
    headroom = tenant.upgrade_headroom_bytes if len(names) > len(set(names)) else 0
    return QuotaFigure(
        resource="vram_bytes",
        pool_id=pool.pool_id,
        held=held_bytes(pool, tenant.tenant_id),
        allowed=tenant.vram_quota_bytes + headroom,
    )


def figures_of(
    tenant: Tenant, pools: list[PoolEntry], uses: Callable[[PoolEntry], PoolUses], stored_bytes: int, leased: tuple[int, int]
) -> tuple[QuotaFigure, ...]:
    """`leased`: requests and tokens of this minute that routers have taken."""
    limits = tenant.limits
    found: list[QuotaFigure] = []
    for pool in pools:
        found.append(vram_figure(tenant, pool))
        used = uses(pool).of(tenant.tenant_id).values()
        waiting, running, kv_bytes = (sum(getattr(use, name) for use in used) for name in ("waiting", "running", "kv_bytes"))
        found.append(QuotaFigure(resource="concurrent", pool_id=pool.pool_id, asked=waiting, held=running, allowed=limits.max_concurrent))
        most_kv = None if limits.burst else limits.kv_quota_bytes
        found.append(QuotaFigure(resource="kv_bytes", pool_id=pool.pool_id, held=kv_bytes, allowed=most_kv))
        for worker_id in sorted(pool.workers):
            held = host_bytes(pool, tenant.tenant_id, worker_id)
            found.append(
                QuotaFigure(
                    resource="host_cache_bytes", pool_id=pool.pool_id, worker_id=worker_id, held=held, allowed=limits.host_cache_bytes
                )
            )
    found.append(QuotaFigure(resource="artifact_bytes", held=stored_bytes, allowed=limits.artifact_bytes))
    found.append(QuotaFigure(resource="requests_per_minute", held=leased[0], allowed=limits.requests_per_minute))
    found.append(QuotaFigure(resource="tokens_per_minute", held=leased[1], allowed=limits.tokens_per_minute))
    return tuple(found)


def key_view(key: ApiKey, secret: str = "", replaces: str = "") -> KeyView:
    return KeyView(
        key_id=key.key_id,
        label=key.label,
        tenants=key.tenants,
        gateway=key.gateway,
        revoked=key.revoked,
        created_at=key.created_at,
        secret=secret,
        scopes=key.scopes,
        prefix=key.prefix,
        expires_at=key.expires_at,
        replaces=replaces,
    )
