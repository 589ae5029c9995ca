"""Workers' memory reports as Prometheus's gauges: parts of the device, slots, KV cache by tenant, the host tier."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily

from services.router.routes import RouteTable
from shared.contracts.workers import WorkerReport

PARTS = {
    "weights": "weights_bytes",
    "slots": "slots_bytes",
    "kv_cache": "kv_cache_bytes",
    "graphs": "graphs_bytes",
    "activations": "workspace_bytes",
    "context": "context_bytes",
    "other_processes": "foreign_bytes",
    "free": "free_bytes",
    "total": "total_bytes",
    "used_by_driver": "used_bytes",
}
"""Label `part` and the report's field. On a CPU graphs, activations and context are one figure, under `other`."""


def names_of(table: RouteTable) -> dict[str, str]:
    """What people call tenants and mounted adapters, by their ids."""
    tenants = {tenant.tenant_id: name for name, tenant in table.tenants.items()}
    mounts = (mount for pool in table.pools.values() for mount in pool.entry.mounts.values())
    return tenants | {mount.adapter_id: f"{mount.tenant}/{mount.name}@{mount.version}" for mount in mounts}


def families(reports: Iterable[WorkerReport], names: Mapping[str, str]) -> Iterator[GaugeMetricFamily]:
    """`names`: adapter_id and tenant_id to what people call them; an unknown one is shown as it is."""
    parts = GaugeMetricFamily("tenantry_worker_memory_bytes", "The engine's device by what holds it.", labels=["worker", "part"])
    slots = GaugeMetricFamily(
        "tenantry_worker_slot_bytes", "A slot: allocated, and of it its adapter's own.", labels=["worker", "slot", "adapter", "kind"]
    )
    tenants = GaugeMetricFamily("tenantry_worker_kv_bytes", "KV cache that running requests fill.", labels=["worker", "tenant"])
    host = GaugeMetricFamily("tenantry_worker_host_tier_bytes", "Packed adapters in host memory.", labels=["worker", "kind"])
    for report in reports:
        worker, memory = report.worker_id, report.memory
        for part, field in PARTS.items():
            parts.add_metric([worker, part], getattr(memory, field))
        split = memory.graphs_bytes + memory.workspace_bytes + memory.context_bytes
        parts.add_metric([worker, "other"], memory.other_bytes - split)
        for slot in memory.slots:
            adapter = names.get(slot.adapter_id, slot.adapter_id)
            slots.add_metric([worker, str(slot.index), adapter, "reserved"], slot.reserved_bytes)
            slots.add_metric([worker, str(slot.index), adapter, "true"], slot.true_bytes)
        for tenant_id, in_use_bytes in memory.kv_in_use.items():
            tenants.add_metric([worker, names.get(tenant_id, tenant_id)], in_use_bytes)
        host.add_metric([worker, "allocated"], memory.host_tier_bytes)
        host.add_metric([worker, "held"], memory.host_tier_held_bytes)
    yield from (parts, slots, tenants, host)
