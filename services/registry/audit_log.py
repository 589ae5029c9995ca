"""Writes the audit: a record is stored when `tell` returns."""

from shared.bus import Bus, publish_durable
from shared.contracts import audit
from shared.contracts.audit import AuditRecord


class AuditLog:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def tell(self, tenant_id: str, record: AuditRecord) -> None:
        """Under its tenant's subject, or the cluster's. Twice within minutes it is one.

        :raises BusUnavailable: it is not stored.
        """
        await publish_durable(self._bus, audit.audit_subject(tenant_id), audit.encode(record), f"{record.id}:{record.phase}")
