"""Adapters as people manage them: add (upload or mount again), list, show, unload by draining, remove, events."""

import asyncio

import msgspec
import structlog

from services.registry.intake import IntakeService
from services.registry.mounting import Mounting
from services.registry.store import Store
from services.registry.stored import StoredLedger
from services.registry.tenants import checked_adapter_name, checked_name
from services.registry.uploads import COMING_IN, UploadRecords
from services.registry.views import adapter_view
from shared.bus import read_last
from shared.contracts import adapters, admin
from shared.contracts.adapters import STAGING_BUCKET, AdapterEvent, DrainOrder, PoolEntry
from shared.contracts.errors import to_error
from shared.contracts.state import AdapterRecord, Intake, Tenant
from shared.contracts.subjects import ROOT
from shared.errors import Conflict, InvalidRequest, LoadFailed, NotFound, TenantryError, Unsupported
from shared.policy.canary import TermsChange, changed_terms, leaves_trial_alone, trial_of
from shared.policy.lifecycle import HOLDS_RESERVATION, AdapterState
from shared.policy.limits import MAX_BYTES
from shared.policy.mounts import Change, order_drain

log = structlog.get_logger()

_ENDS = frozenset({AdapterState.READY, AdapterState.FAILED, AdapterState.REJECTED, AdapterState.UNLOADED})
_MAX_WAIT_S = 3600.0
_MAX_EVENTS = 10_000


class AdapterService:
    def __init__(self, store: Store, mounting: Mounting, uploads: UploadRecords, intake: IntakeService, stored: StoredLedger) -> None:
        self._store = store
        self._mounting = mounting
        self._uploads = uploads
        self._intake = intake
        self._ledger = stored

    async def add(self, request: admin.AddAdapter) -> admin.AdapterView:
        """Ready, or as far as it came in wait_s.

        :raises TenantryError: refused, or failed on its worker, with the reason.
        """
        try:
            tenant = await self._tenant_for(request)
            pool, _ = await self._store.the_pool(request.pool_id)
            checked_adapter_name(request.name, pool.base)
            _checked_trial(request, pool)
        except TenantryError:
            if request.object:
                await self._store.staging.delete(request.object)
            raise
        intake = Intake(
            bucket=STAGING_BUCKET if request.object else "",
            object=request.object,
            base=request.base,
            drain_first=request.drain_first,
            trial=request.trial,
        )
        if request.object:
            record = await self._uploads.register(tenant, request.name, pool.pool_id, intake, request.request)
            record = await self._intake.take_in(record)
        else:
            record = await self._stored(tenant, request)
            if record.state not in HOLDS_RESERVATION:
                record = await self._intake.take_in(await self._uploads.remount(record, intake, request.request))
        if request.make_default:
            await self._store.change_tenant(tenant.name, lambda t: msgspec.structs.replace(t, default_adapter=request.name))
        view = await self._when_settled(record, request.wait_s)
        if request.trial is not None and view.serving:
            raise Conflict(f"these are the files of version {view.version}, which serves {view.name} already", adapter=view.name)
        return view

    async def _tenant_for(self, request: admin.AddAdapter) -> Tenant:
        checked_name(request.name, "adapter")
        tenant = await self._store.tenant(request.tenant)
        if request.ceiling_bytes is None:
            return tenant
        if not 0 <= request.ceiling_bytes <= MAX_BYTES:
            raise InvalidRequest(
                f"ceiling_bytes is {request.ceiling_bytes}; expected 0 to {MAX_BYTES}", field="ceiling_bytes", got=request.ceiling_bytes
            )
        ceiling = {request.name: request.ceiling_bytes}
        return await self._store.change_tenant(
            tenant.name, lambda t: msgspec.structs.replace(t, adapter_ceilings={**t.adapter_ceilings, **ceiling})
        )

    async def _stored(self, tenant: Tenant, request: admin.AddAdapter) -> AdapterRecord:
        """The version whose artifact is kept: for a trial one at rest, else the newest.

        :raises NotFound: none. :raises Conflict: it is draining still.
        """
        name = request.name
        kept = [record for record in await self._store.records_of(tenant.tenant_id, name) if record.artifact]
        mounted = [record for record in kept if record.state in HOLDS_RESERVATION and record.state is not AdapterState.DRAINING]
        if request.trial is not None:
            kept = [record for record in kept if record not in mounted and request.version in (0, record.version)]
            mounted = []
        if not kept:
            which = f"{tenant.name}/{name}" + (f" version {request.version}" if request.version else "")
            at_rest = " that does not serve already" if request.trial is not None else ""
            raise NotFound(f"nothing is uploaded under {which}{at_rest}", tenant=tenant.name, adapter=name)
        newest = max(mounted or kept, key=lambda record: (record.version, record.history[0].at))
        if newest.state is AdapterState.DRAINING:
            raise Conflict(
                f"{name} version {newest.version} is still draining; mount it again when it has drained",
                adapter=name,
                version=newest.version,
                state=newest.state.value,
            )
        return newest

    async def _when_settled(self, record: AdapterRecord, wait_s: float) -> admin.AdapterView:
        """As it is when it is ready, refused or failed, or after wait_s.

        :raises TenantryError: refused or failed.
        """

        await self._end_of([record.adapter_id], _ENDS, wait_s)
        found = await self._store.record(record.adapter_id) or record
        if found.state in (AdapterState.REJECTED, AdapterState.FAILED):
            raise to_error(found.error) if found.error else LoadFailed(f"{found.name} is {found.state}")
        return adapter_view(found, await self._pool_of(found))

    async def listed(self, request: admin.ListAdapters) -> list[admin.AdapterView]:
        """Without all_versions only what is coming in or mounted."""
        pools = {pool_id: pool for pool_id, (pool, _) in (await self._store.pools()).items()}
        if request.tenant:
            await self._store.tenant(request.tenant)
        views = [
            adapter_view(record, pools.get(record.pool_id)) for record in self._store.records() if request.tenant in ("", record.tenant)
        ]
        ends = {AdapterState.UNLOADED.value, AdapterState.REJECTED.value, AdapterState.FAILED.value}
        shown = [view for view in views if request.all_versions or view.state not in ends]
        return sorted(shown, key=lambda view: (view.tenant, view.name, view.version, view.adapter_id))

    async def show(self, request: admin.ShowAdapter) -> admin.AdapterView:
        """:raises NotFound: no such adapter of this tenant."""
        tenant = await self._store.tenant(request.tenant)
        found = [
            adapter_view(record, await self._pool_of(record)) for record in await self._store.records_of(tenant.tenant_id, request.name)
        ]
        if request.version:
            found = [view for view in found if view.version == request.version]
        if not found:
            version = f" version {request.version}" if request.version else ""
            raise NotFound(f"tenant {tenant.name} has no adapter {request.name}{version}", tenant=tenant.name, adapter=request.name)
        return next((view for view in found if view.serving), max(found, key=lambda view: view.history[-1]["at"]))

    async def unload(self, request: admin.UnloadAdapter) -> list[admin.AdapterView]:
        """The versions that drain now; once they have drained if wait_s allows.

        :raises Unsupported: another mode than draining.
        :raises NotFound: nothing of that name is mounted.
        :raises Conflict: the version that serves, and another one is on trial.
        """
        if request.mode != "draining":
            raise Unsupported(
                f"mode {request.mode!r}: an adapter is only ever unloaded by draining, so that no answer is cut off or empty",
                field="mode",
                got=request.mode,
                expected="draining",
            )
        if not request.deadline_s > 0:
            raise InvalidRequest(f"deadline_s is {request.deadline_s}; expected more than 0", field="deadline_s", got=request.deadline_s)
        tenant = await self._store.tenant(request.tenant)
        drain = DrainOrder(deadline_s=request.deadline_s, on_deadline=request.on_deadline)
        drained: list[str] = []
        for pool_id in await self._store.pools():

            async def order(pool: PoolEntry, revision: int) -> Change | TenantryError | None:
                ids = [
                    mount.adapter_id
                    for mount in pool.mounts.values()
                    if (mount.tenant_id, mount.name) == (tenant.tenant_id, request.name) and request.version in (0, mount.version)
                ]
                refusal = leaves_trial_alone(pool, ids)
                if refusal is not None:
                    return refusal
                drained[:] = [*drained, *(adapter_id for adapter_id in ids if adapter_id not in drained)]
                return order_drain(pool, ids, drain, revision) if ids else None

            await self._mounting.change(pool_id, order)
        if not drained:
            what = f"{request.name} version {request.version}" if request.version else request.name
            raise NotFound(f"tenant {tenant.name} has no {what} mounted", tenant=tenant.name, adapter=request.name)
        await self._end_of(drained, _ENDS - {AdapterState.READY}, request.wait_s)
        records = [record for adapter_id in drained if (record := await self._store.record(adapter_id)) is not None]
        return [adapter_view(record, await self._pool_of(record)) for record in records]

    async def remove(self, request: admin.RemoveAdapter) -> list[admin.AdapterView]:
        """The versions that are forgotten now, with their stored files.

        :raises NotFound: none of that name. :raises Conflict: one of them is mounted or coming in.
        """
        tenant = await self._store.tenant(request.tenant)
        records = await self._store.records_of(tenant.tenant_id, request.name)
        found = [record for record in records if request.version in (0, record.version)]
        if not found:
            raise NotFound(f"tenant {tenant.name} has no adapter {request.name}", tenant=tenant.name, adapter=request.name)
        for record in found:
            if record.state in HOLDS_RESERVATION or record.state in COMING_IN:
                raise Conflict(
                    f"{record.name} version {record.version} is {record.state}; unload it first",
                    adapter=record.name,
                    state=record.state.value,
                )
        for record in found:
            await self._uploads.erase(record)
            await self._ledger.release(record.tenant_id, record.adapter_id)
            log.info("adapter.removed", adapter=record.adapter_id, tenant=record.tenant, name=record.name, version=record.version)
        return [adapter_view(record, None) for record in found]

    async def _end_of(self, adapter_ids: list[str], ends: frozenset[AdapterState], wait_s: float) -> None:
        """Returns when all of these records are in one of `ends` (or gone), or after wait_s.

        A record is read again when the mirror shows that it moved, and every second in case the mirror is silent.
        """
        loop = asyncio.get_running_loop()
        read: dict[str, tuple[int, float]] = {}
        left = set(adapter_ids)

        async def ended() -> bool | None:
            for adapter_id in sorted(left):
                seen = self._store.seen_revision(adapter_id)
                known = read.get(adapter_id)
                if known is not None and known[0] == seen and loop.time() - known[1] < 1.0:
                    continue
                read[adapter_id] = (seen, loop.time())
                record = await self._store.record(adapter_id)
                if record is None or record.state in ends:
                    left.discard(adapter_id)
            return None if left else True

        if wait_s > 0:
            await self._store.changes.until(ended, min(wait_s, _MAX_WAIT_S))

    async def events(self, request: admin.ListEvents) -> list[AdapterEvent]:
        """The newest `limit`, oldest first."""
        subject = f"{ROOT}.adapter.event.*"
        if request.tenant:
            subject = adapters.event_subject((await self._store.tenant(request.tenant)).tenant_id)
        raw = await read_last(self._store.bus, adapters.EVENTS_STREAM, subject, _MAX_EVENTS)
        found = [event for event in map(adapters.decode_event, raw) if request.name in ("", event.name)]
        return found[-max(1, min(request.limit, _MAX_EVENTS)) :]

    async def _pool_of(self, record: AdapterRecord) -> PoolEntry | None:
        found = await self._store.pool(record.pool_id) if record.pool_id else None
        return found[0] if found else None


def _checked_trial(request: admin.AddAdapter, pool: PoolEntry) -> None:
    """Before anything is unpacked; the reservation decides.

    :raises InvalidRequest: terms out of bounds. :raises Conflict: the name has a trial.
    """
    if trial_of(pool, request.tenant, request.name) is not None:
        raise Conflict(f"a version of {request.name} is on trial: promote it or roll it back first", adapter=request.name)
    if request.trial is None:
        if request.version:
            raise InvalidRequest("version: only a trial chooses among stored versions", field="version", got=request.version)
        return
    if request.drain_first:
        raise InvalidRequest("a version on trial stands beside the one that serves: drain_first is none", field="drain_first")
    terms = changed_terms(request.trial, TermsChange(stop=msgspec.to_builtins(request.trial.stop)))
    if isinstance(terms, InvalidRequest):
        raise terms
    if not pool.aliases.get(request.tenant, {}).get(request.name):
        raise Conflict(f"nothing serves {request.name} yet that a version on trial could be compared with: add it", adapter=request.name)
