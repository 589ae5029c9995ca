"""Answers what managers and workers ask over the bus: every operation of shared/contracts/admin.py, and a worker's hello."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from services.registry.adapters import AdapterService
from services.registry.audit import AuditService
from services.registry.canary import CanaryService
from services.registry.canary_watch import CanaryWatch
from services.registry.keys import KeyService
from services.registry.matrix import MatrixService
from services.registry.reports import Reports
from services.registry.tenants import TenantService
from services.registry.usage_service import UsageService
from services.registry.workers import WorkerService
from shared.bus import MAX_PAYLOAD_BYTES, Bus, BusUnavailable, Message, Subscription
from shared.contracts import admin, canary, workers
from shared.contracts.audit import ListAudit
from shared.contracts.errors import ErrorInfo, to_info
from shared.contracts.usage_query import GetEngines, GetUsage
from shared.errors import InvalidRequest, Overloaded, TenantryError
from shared.runtime import end

log = structlog.get_logger()

_QUEUE = "registry"
_PENDING = 1024


class RegistryService:
    """Every request runs in a task of `group`; beyond max_requests the asker is told to come again."""

    def __init__(
        self,
        bus: Bus,
        group: asyncio.TaskGroup,
        max_requests: int,
        tenants: TenantService,
        keys: KeyService,
        matrix: MatrixService,
        adapters: AdapterService,
        canaries: CanaryService,
        watch: CanaryWatch,
        worker_service: WorkerService,
        reports: Reports,
        usage: UsageService,
        audit: AuditService,
    ) -> None:
        self._bus = bus
        self._group = group
        self._max_requests = max_requests
        self._workers = worker_service
        self._reports = reports
        self._watch = watch
        self._audit = audit
        self._under_way: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._operations: dict[type, Callable[[Any], Awaitable[Any]]] = {
            admin.CreateTenant: tenants.create,
            admin.UpdateTenant: tenants.update,
            admin.ListTenants: tenants.listed,
            admin.DeleteTenant: tenants.delete,
            admin.ShowTenant: tenants.show,
            admin.CreateKey: keys.create,
            admin.ListKeys: keys.listed,
            admin.RevokeKey: keys.revoke,
            admin.RotateKey: keys.rotate,
            admin.SetRouting: tenants.set_routing,
            admin.AddAdapter: adapters.add,
            admin.ListAdapters: adapters.listed,
            admin.ShowAdapter: adapters.show,
            admin.UnloadAdapter: adapters.unload,
            admin.RemoveAdapter: adapters.remove,
            admin.ListEvents: adapters.events,
            admin.ListCanaries: canaries.listed,
            admin.ChangeCanary: canaries.change,
            admin.PromoteCanary: canaries.promote,
            admin.RollBackCanary: canaries.roll_back,
            admin.GetMatrix: matrix.get,
            admin.SetLabel: matrix.set_label,
            admin.RemoveLabel: matrix.remove_label,
            admin.SetPair: matrix.set_pair,
            admin.RemovePair: matrix.remove_pair,
            admin.ListPools: worker_service.list_pools,
            admin.RemoveWorker: worker_service.remove,
            GetUsage: usage.usage,
            GetEngines: usage.engines,
            ListAudit: audit.listed,
        }

    async def start(self) -> None:
        self._subscriptions = [
            await self._bus.subscribe(admin.ADMIN_SUBJECT, self._on_admin, queue=_QUEUE, pending=_PENDING),
            await self._bus.subscribe(workers.HELLO_SUBJECT, self._on_hello, queue=_QUEUE, pending=_PENDING),
            await self._bus.subscribe(workers.REPORTS_SUBJECT, self._reports.heard, pending=_PENDING),
            await self._bus.subscribe(canary.COUNTS_SUBJECTS, self._watch.heard, pending=_PENDING),
        ]
        await self._bus.flush()

    async def stop(self, grace_s: float) -> None:
        """No new requests; those under way have grace_s, then they are cut off (their state is in the store)."""
        for subscription in self._subscriptions:
            await subscription.drain()
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=grace_s)
        await end(self._under_way)

    async def _on_admin(self, message: Message) -> None:
        await self._start(message, self._administer)

    async def _on_hello(self, message: Message) -> None:
        await self._start(message, self._greet)

    async def _start(self, message: Message, answer: Callable[[bytes], Awaitable[Any]]) -> None:
        if len(self._under_way) >= self._max_requests:
            busy = Overloaded(
                f"{len(self._under_way)} requests are under way", held=len(self._under_way), allowed=self._max_requests, retry_after_s=1.0
            )
            await self._reply(message, admin.Reply(error=to_info(busy)))
            return
        task = self._group.create_task(self._answer(message, answer))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answer(self, message: Message, answer: Callable[[bytes], Awaitable[Any]]) -> None:
        try:
            reply = admin.Reply(result=msgspec.to_builtins(await answer(message.data)))
        except TenantryError as error:
            log.info("request.refused", code=error.code, message=error.message)
            reply = admin.Reply(error=to_info(error))
        except Exception:
            log.exception("request.failed")
            reply = admin.Reply(error=ErrorInfo(code="internal_error", message="the registry failed at this request; its log says why"))
        await self._reply(message, reply)

    async def _reply(self, message: Message, reply: admin.Reply) -> None:
        if not message.reply:
            return
        data = admin.encode(reply)
        if len(data) > MAX_PAYLOAD_BYTES:
            too_big = InvalidRequest(
                f"the answer would have {len(data)} bytes; ask for less (one tenant, fewer events)",
                asked_bytes=len(data),
                limit_bytes=MAX_PAYLOAD_BYTES,
            )
            data = admin.encode(admin.Reply(error=to_info(too_big)))
        try:
            await self._bus.publish(message.reply, data)
        except BusUnavailable as error:
            log.warning("request.reply_lost", message=error.message)

    async def _administer(self, data: bytes) -> Any:
        try:
            asked = admin.decode_asked(data)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not an operation of this version: {error}") from error
        return await self._audit.carried_out(asked, self._operations[type(asked.request)])

    async def _greet(self, data: bytes) -> Any:
        try:
            hello = workers.decode_hello(data)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a hello of this version: {error}") from error
        return await self._workers.hello(hello)
