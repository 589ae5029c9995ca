"""Onboarding by event: a tenant publishes on its own subject that an archive lies in its own bucket; the outcome is an event.

The tenant is the subject's, which the bus lets no other publish. The steps are those of an upload over HTTP (intake.py).
"""

import asyncio

import msgspec
import structlog

from services.registry.audit import summary
from services.registry.audit_log import AuditLog
from services.registry.intake import IntakeService
from services.registry.mounting import Mounting, now
from services.registry.store import Store
from services.registry.tenants import checked_adapter_name, checked_name
from services.registry.uploads import UploadRecords
from shared.bus import BusUnavailable, Consumer, Delivery, Objects, publish_durable
from shared.contracts import adapters
from shared.contracts.adapters import AdapterEvent, OnboardAdapter
from shared.contracts.audit import AuditRecord, Phase
from shared.contracts.errors import to_info
from shared.contracts.state import AdapterRecord, Intake
from shared.errors import InvalidRequest, NotFound, NotPermitted, Overloaded, TenantryError
from shared.policy.lifecycle import AdapterState
from shared.policy.pace import Pace
from shared.runtime import end

log = structlog.get_logger()

_DURABLE = "registry-onboarding"
_AT_ONCE = 4
_ACK_WAIT_S = 9.0
_RETRY_S = 2.0
_MAX_DELIVERIES = 8
_TOLD_PER_MINUTE = 120  # in the audit, of one tenant's requests that come to nothing


class _Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An object in a tenant's own bucket, as it was when it was looked at."""

    objects: Objects
    name: str
    revision: int


class Onboarding:
    def __init__(self, store: Store, mounting: Mounting, uploads: UploadRecords, intake: IntakeService, audit: AuditLog) -> None:
        self._store = store
        self._mounting = mounting
        self._uploads = uploads
        self._intake = intake
        self._audit = audit
        self._pace = Pace(_TOLD_PER_MINUTE)

    async def consume(self) -> None:
        """For ever; a few at once, the rest wait in the stream."""
        subjects = adapters.ONBOARD_SUBJECTS
        consumer = Consumer(
            self._store.bus, adapters.ONBOARD_STREAM, _DURABLE, subjects, ack_wait_s=_ACK_WAIT_S, max_ack_pending=4 * _AT_ONCE
        )
        turns = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            async for delivery in consumer.messages():
                await turns.acquire()
                task = group.create_task(self._take(delivery))
                task.add_done_callback(lambda _task: turns.release())

    async def _take(self, delivery: Delivery) -> None:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(_keep(delivery))
            try:
                upload = await self._onboard(delivery)
                await delivery.ack()
                if upload is not None:  # after the acknowledgement: until then the message may come again and need it
                    await self._discard(upload)
            except TenantryError as error:  # the bus is away: the same message comes again
                log.warning("onboarding.put_off", code=error.code, message=error.message)
                await delivery.retry(_RETRY_S)
            except Exception:
                log.exception("onboarding.failed")
                await delivery.retry(_RETRY_S)
            finally:
                await end([working])

    async def _onboard(self, delivery: Delivery) -> "_Upload | None":
        """Ends with the outcome's event on its way: told here if refused, or by what follows the load. Gives the upload that was looked at.

        :raises BusUnavailable: to be tried again.
        """
        tenant_id = delivery.subject.rsplit(".", 1)[-1]
        try:
            request = adapters.decode_onboard(delivery.data)
        except msgspec.MsgspecError as error:
            await self._refuse(tenant_id, None, InvalidRequest(f"not an onboarding request: {error}"), delivery)
            return None
        is_told = self._is_told(tenant_id)
        if is_told:
            await self._tell(tenant_id, request, delivery, Phase.ASKED)
        record: AdapterRecord | None = None
        upload: _Upload | None = None
        try:
            if delivery.deliveries > _MAX_DELIVERIES:
                raise BusUnavailable(f"given up after {_MAX_DELIVERIES} attempts", attempts=_MAX_DELIVERIES)
            record = await self._registered(tenant_id, request)
            objects = await self._store.objects(record.intake.bucket)
            upload = _Upload(objects=objects, name=request.object, revision=await objects.revision(request.object))
            taken = await self._intake.take_in(record)
        except BusUnavailable as error:
            if delivery.deliveries <= _MAX_DELIVERIES:
                raise
            await self._refuse(tenant_id, request, error, delivery)
        except TenantryError as error:
            if is_told or record is not None:
                await self._tell(tenant_id, request, delivery, Phase.REFUSED, error.code)
            if record is None or await self._was_silent(record):
                await self._refuse(tenant_id, request, error, delivery)
        else:
            await self._tell(tenant_id, request, delivery, Phase.DONE, adapter_id=taken.adapter_id, version=taken.version)
            if taken.request != request.request or taken.adapter_id != record.adapter_id:
                await self._mounting.announce(taken, request.request)  # an earlier upload of the same bytes: this is what it is now
        return upload

    def _is_told(self, tenant_id: str) -> bool:
        """A tenant publishes as fast as it likes: what comes beyond a minute's measure, and to nothing, is in the log alone."""
        try:
            self._pace.take(tenant_id, asyncio.get_running_loop().time())
        except Overloaded:
            return False
        return True

    async def _tell(
        self, tenant_id: str, request: OnboardAdapter, delivery: Delivery, phase: Phase, error: str = "", **made: str | int
    ) -> None:  # fmt: skip
        tenant = await self._store.tenant_of_id(tenant_id)
        record = AuditRecord(
            id=f"onboard:{delivery.sequence}",
            action="onboard_adapter",
            phase=phase,
            who=f"tenant user {tenant.name if tenant is not None else tenant_id}",
            tenant=tenant.name if tenant is not None else "",
            what=summary(request),
            result=made,
            error=error,
        )
        await self._audit.tell(tenant_id, record)

    async def _discard(self, upload: "_Upload") -> None:
        """Taken or refused, it is needed no more; one that the tenant has put under the same name since is left."""
        try:
            if await upload.objects.delete_revision(upload.name, upload.revision):
                log.info("onboarding.upload_deleted", bucket=upload.objects.name, object=upload.name[:80])
        except TenantryError as error:
            log.warning("onboarding.upload_not_deleted", bucket=upload.objects.name, code=error.code, message=error.message)

    async def _registered(self, tenant_id: str, request: OnboardAdapter) -> AdapterRecord:
        tenant = await self._store.tenant_of_id(tenant_id)
        if tenant is None:
            raise NotFound(f"there is no tenant {tenant_id}", tenant_id=tenant_id)
        if request.tenant_id not in ("", tenant_id):
            raise NotPermitted(
                f"the message names tenant {request.tenant_id}, its subject is {tenant_id}'s", field="tenant_id", got=request.tenant_id
            )
        checked_name(request.name, "adapter")
        if not request.object:
            raise InvalidRequest("object is empty: name the archive in your upload bucket", field="object", got="")
        pool, _ = await self._store.the_pool("")
        checked_adapter_name(request.name, pool.base)
        intake = Intake(bucket=adapters.uploads_bucket(tenant_id), object=request.object, base=request.base)
        return await self._uploads.register(tenant, request.name, pool.pool_id, intake, request.request)

    async def _was_silent(self, record: AdapterRecord) -> bool:
        """Whether the refusal left no rejected record that was announced."""
        found = await self._store.record(record.adapter_id)
        return found is None or found.state is not AdapterState.REJECTED

    async def _refuse(self, tenant_id: str, request: OnboardAdapter | None, error: TenantryError, delivery: Delivery) -> None:
        event = AdapterEvent(
            tenant="",
            name=request.name[:80] if request else "",
            version=0,
            adapter_id="",
            digest="",
            state=AdapterState.REJECTED,
            at=now(),
            error=to_info(error),
            request=request.request if request else "",
        )
        log.info("onboarding.refused", tenant_id=tenant_id, code=error.code, message=error.message)
        await publish_durable(
            self._store.bus, adapters.event_subject(tenant_id), adapters.encode(event), f"onboard:{delivery.sequence}:refused"
        )


async def _keep(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(_ACK_WAIT_S / 3)
        await delivery.working()
