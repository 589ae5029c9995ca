"""The registry's process: `python -m services.registry`."""

import asyncio
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import structlog
from ulid import ULID

from services.registry import acks
from services.registry.adapters import AdapterService
from services.registry.audit import AuditService
from services.registry.audit_log import AuditLog
from services.registry.canary import CanaryService
from services.registry.canary_watch import CanaryWatch
from services.registry.guarantees import GuaranteeService
from services.registry.intake import IntakeService
from services.registry.keys import KeyService
from services.registry.matrix import MatrixService
from services.registry.mounting import Mounting
from services.registry.onboarding import Onboarding
from services.registry.reconciler import Reconciler
from services.registry.reports import Reports
from services.registry.service import RegistryService
from services.registry.settings import RegistrySettings
from services.registry.shares import SharesService
from services.registry.store import open_store
from services.registry.stored import StoredLedger
from services.registry.tenants import TenantService
from services.registry.uploads import UploadRecords
from services.registry.usage_keeper import UsageKeeper
from services.registry.usage_service import UsageService
from services.registry.usage_snapshots import Snapshots
from services.registry.workers import WorkerService
from services.registry.workspace import PREFIX, emptied
from shared.bus import Bus, connect_with_patience, open_objects, settings_from
from shared.contracts.usage import SNAPSHOTS_BUCKET
from shared.runtime import Stop, end, run_service

log = structlog.get_logger()


async def serve(bus: Bus, settings: RegistrySettings, stop: Stop) -> None:
    """Runs until `stop` is set."""
    registry_id = settings.registry_id or f"registry-{ULID()}"
    folder = Path(settings.work_dir or tempfile.gettempdir()) / (PREFIX + registry_id)
    store = await open_store(
        bus,
        usage_max_bytes=settings.usage_max_bytes,
        usage_max_age_s=settings.usage_max_age_s,
        audit_kept_days=settings.audit_kept_days,
    )
    closed_days = await open_objects(bus, SNAPSHOTS_BUCKET, create=True)
    mounting = Mounting(store)
    matrix = MatrixService(store)
    with emptied(folder) as work_dir, emptied(folder.with_name(folder.name + "-usage")) as usage_dir, ExitStack() as at_end:
        uploads = UploadRecords(store, mounting)
        stored = StoredLedger(store)
        intake = IntakeService(store, mounting, uploads, stored, settings, work_dir)
        reports = Reports()
        shares = SharesService(store, reports, settings.abandoned_s)
        guarantees = GuaranteeService(store, mounting, settings.abandoned_s)
        reconciler = Reconciler(store, mounting, intake, guarantees, stored, settings, registry_id)
        workers = WorkerService(store, mounting, matrix, reports, shares)
        keys = KeyService(store)
        tenants = TenantService(store, keys, shares, guarantees, stored, reports, settings.tenant_uploads_limit_bytes)
        adapters = AdapterService(store, mounting, uploads, intake, stored)
        watch = CanaryWatch(store, mounting, settings.canary_watch_s)
        canaries = CanaryService(store, mounting, watch)
        audit = AuditService(store, AuditLog(bus))
        snapshots = Snapshots(closed_days, usage_dir)
        usage = UsageService(store, snapshots, Path(settings.usage_db or usage_dir / "usage.sqlite"))
        keeper = UsageKeeper(store, usage, snapshots, reports, settings, registry_id)
        at_end.callback(usage.close)
        async with store.mirrored(), asyncio.TaskGroup() as group:
            service = RegistryService(
                bus, group, settings.max_requests, tenants, keys, matrix, adapters, canaries, watch, workers, reports, usage, audit
            )
            running = [
                group.create_task(work)
                for work in (
                    reconciler.beat(),
                    reconciler.run(),
                    shares.run(settings.shares_s),
                    watch.run(),
                    usage.run(),
                    keeper.run(),
                    acks.consume(store, mounting),
                    Onboarding(store, mounting, uploads, intake, AuditLog(bus)).consume(),
                )
            ]
            await service.start()
            log.info("registry.ready", registry_id=registry_id)
            await stop.wait()
            log.info("registry.stopping", reason=stop.reason)
            await service.stop(settings.grace_s)
            await end(running)


async def main(settings: msgspec.Struct, stop: Stop) -> None:
    assert isinstance(settings, RegistrySettings)
    bus = await connect_with_patience(settings_from(os.environ, "registry"), settings.bus_patience_s)
    try:
        await serve(bus, settings, stop)
    finally:
        await bus.close()


if __name__ == "__main__":
    run_service("registry", RegistrySettings, main)
