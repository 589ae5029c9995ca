"""What people are shown: a record and, while it is mounted, its pool's entry, which is the authority on its state."""

import msgspec

from shared.contracts.adapters import PoolEntry
from shared.contracts.admin import AdapterView, KeyView, TenantView
from shared.contracts.state import AdapterRecord, ApiKey, Tenant
from shared.policy.admission import held_bytes


def adapter_view(record: AdapterRecord, pool: PoolEntry | None) -> AdapterView:
    mount = pool.mounts.get(record.adapter_id) if pool else None
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
    )


def tenant_view(tenant: Tenant, pools: list[PoolEntry], nats_password: str = "") -> TenantView:
    """`adapters`: those mounted."""
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
    )


def key_view(key: ApiKey, secret: str = "") -> KeyView:
    return KeyView(
        key_id=key.key_id,
        label=key.label,
        tenants=key.tenants,
        gateway=key.gateway,
        revoked=key.revoked,
        created_at=key.created_at,
        secret=secret,
    )
