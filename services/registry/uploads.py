"""An upload's record, from its first line until it is rejected or reserved: each move is one compare-and-set."""

import base64
import secrets

import msgspec

from services.registry.mounting import Mounting, stepped
from services.registry.store import Store
from shared.contracts import state
from shared.contracts.adapters import STAGING_BUCKET
from shared.contracts.errors import to_info
from shared.contracts.state import AdapterRecord, Intake, Tenant
from shared.errors import Conflict, TenantryError
from shared.policy.lifecycle import HOLDS_RESERVATION, AdapterState, LifecycleEvent, step

COMING_IN = frozenset({AdapterState.UPLOADED, AdapterState.VALIDATING})


class AnotherRegistry(TenantryError):
    """The validation was taken over by another registry, which will end it."""

    code = "conflict_of_registries"


def new_adapter_id() -> str:
    """Opaque and unguessable: 130 random bits."""
    return "ad_" + base64.b32encode(secrets.token_bytes(17)).decode().lower()[:26]


class UploadRecords:
    """Writes no record that has left COMING_IN."""

    def __init__(self, store: Store, mounting: Mounting) -> None:
        self._store = store
        self._mounting = mounting

    async def register(self, tenant: Tenant, name: str, pool_id: str, intake: Intake, request: str) -> AdapterRecord:
        """A record for an upload whose content nobody has looked at yet."""
        record = AdapterRecord(
            adapter_id=new_adapter_id(),
            tenant_id=tenant.tenant_id,
            tenant=tenant.name,
            name=name,
            version=0,
            digest="",
            pool_id=pool_id,
            state=AdapterState.UPLOADED,
            intake=intake,
            request=request,
        )
        record = stepped(record, AdapterState.UPLOADED)
        await self._store.catalog.create(state.ADAPTER_PREFIX + record.adapter_id, state.encode(record))
        await self._mounting.announce(record)
        return record

    async def remount(self, record: AdapterRecord, intake: Intake, request: str) -> AdapterRecord:
        """A version at rest on its way in again, from its own artifact or a new upload of the same bytes.

        :raises Conflict: it is not at rest.
        """

        def start(now: AdapterRecord) -> AdapterRecord | None:
            if now.state in HOLDS_RESERVATION or now.state in COMING_IN:
                return None
            new = step(now.state, LifecycleEvent.REMOUNT_ORDERED)
            # an identity that the uploader once declared for the stored artifact still holds
            kept = intake if intake.bucket or intake.base else msgspec.structs.replace(intake, base=now.intake.base)
            return stepped(msgspec.structs.replace(now, intake=kept, request=request, error=None), new, "mounted again")

        changed = await self._store.change_record(record.adapter_id, start)
        if changed is None:
            raise Conflict(f"{record.name} version {record.version} is not at rest; try again", adapter=record.name, retry_after_s=1.0)
        await self._mounting.announce(changed)
        return changed

    async def checkpoint(self, record: AdapterRecord, new: AdapterState | None = None, **changes: object) -> AdapterRecord:
        """The record with the progress written into it.

        :raises AnotherRegistry: it is no longer ours to write.
        """

        def write(now: AdapterRecord) -> AdapterRecord | None:
            if now.state not in COMING_IN:
                return None
            changed = msgspec.structs.replace(now, **changes)
            return stepped(changed, new) if new is not None and new is not now.state else changed

        changed = await self._store.change_record(record.adapter_id, write)
        if changed is None:
            raise AnotherRegistry("the record has gone on without us")
        if new is not None:
            await self._mounting.announce(changed)
        return changed

    async def beat(self, adapter_id: str) -> None:
        """A sign in the record that it is worked on."""

        def bump(now: AdapterRecord) -> AdapterRecord | None:
            if now.state not in COMING_IN:
                return None
            return msgspec.structs.replace(now, intake=msgspec.structs.replace(now.intake, beat=now.intake.beat + 1))

        await self._store.change_record(adapter_id, bump)

    async def reject(self, record: AdapterRecord, error: TenantryError) -> TenantryError:
        """The record's end, unless it has gone on meanwhile; returns the error to raise."""

        def refuse(now: AdapterRecord) -> AdapterRecord | None:
            if now.state not in COMING_IN:
                return None
            new = step(now.state, LifecycleEvent.VALIDATION_REFUSED)
            return stepped(msgspec.structs.replace(now, error=to_info(error)), new, error.message)

        rejected = await self._store.change_record(record.adapter_id, refuse)
        if rejected is not None:
            await self._mounting.announce(rejected)
            await self.discard_upload(rejected)
        return error

    async def discard_upload(self, record: AdapterRecord) -> None:
        """What the staging bucket held for it; of a tenant's own bucket onboarding.py deletes, once the message cannot come again."""
        if record.intake.bucket == STAGING_BUCKET and record.intake.object:
            await self._store.staging.delete(record.intake.object)

    async def forget(self, record: AdapterRecord, keep_upload: bool = False) -> None:
        """It was only the way in to an earlier version."""
        if not keep_upload:
            await self.discard_upload(record)
        await self._store.catalog.delete(state.ADAPTER_PREFIX + record.adapter_id)

    async def erase(self, record: AdapterRecord) -> None:
        """A version at rest: its claim, its record, its stored files.

        :raises Conflict: it has moved on meanwhile.
        """
        key = state.ADAPTER_PREFIX + record.adapter_id
        entry = await self._store.catalog.get(key)
        if entry is None:
            return
        if state.decode_record(entry.value).state is not record.state:
            raise Conflict(f"{record.name} version {record.version} is not at rest any more", adapter=record.name)
        await self._store.catalog.delete(key, entry.revision)
        claim = f"{state.UPLOAD_PREFIX}{record.tenant_id}.{record.name}.{record.digest.rsplit(':', 1)[-1]}"
        held = await self._store.catalog.get(claim) if record.digest else None
        if held is not None and held.value.decode() == record.adapter_id:
            await self._store.catalog.delete(claim, held.revision)
        if record.artifact:
            await self._store.artifacts.delete(record.artifact)
