"""The worker on the bus: takes requests for what it holds, answers each one at once with ACCEPTED or BOUNCED, runs and aborts them.

What an answer is, is attempt.py's; what is mounted, lifecycle.py's; how frames travel, frames.py's.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import structlog

from services.worker.attempt import Answering, RequestPolicy
from services.worker.engine import Engine
from services.worker.frames import Outbox
from services.worker.governor import Attempt, Governor
from services.worker.identity import Identity
from services.worker.liveness import FreezeWatch, RouterWatch
from services.worker.usage import UsageMeter
from shared.bus import Bus, BusUnavailable, Message, RequestTimeout, Subscription
from shared.contracts.inference import (
    Ack,
    Cancel,
    FrameKind,
    InferRequest,
    Resend,
    base_subject_id,
    control_subject,
    decode_control,
    decode_request,
    infer_subject,
    worker_ping_subject,
)
from shared.errors import Cancelled, TenantryError, WorkerLost
from shared.policy.compatibility import same_base

log = structlog.get_logger()

_SEEN_LIMIT = 65_536
_CONFIRM_RETRY_S = 0.1
_CLOSE_LIMIT_S = 2.0


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_running: int = 1024  # attempts at once; over it a request is bounced "full", unless its tenant has less than an equal part
    freeze_limit_s: float = 2.0  # after standing still this long, what is read until we have caught up is bounced "stale"
    silence_limit_s: float = 5.0  # routers give up on an attempt after this long; standing still longer aborts it


class Service:
    """Made once the engine runs and the bus is connected."""

    def __init__(
        self,
        *,
        bus: Bus,
        engine: Engine,
        governor: Governor,
        outbox: Outbox,
        usage: UsageMeter,
        policy: RequestPolicy,
        me: Identity,
        limits: ServiceLimits | None = None,
    ) -> None:
        self.stopping = False
        self._bus = bus
        self._me = me
        self._engine = engine
        self._governor = governor
        self._outbox = outbox
        self._usage = usage
        self._policy = policy
        self._limits = limits or ServiceLimits()
        self._running: dict[tuple[str, int], Answering] = {}
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._cancelled_early: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._subscriptions: dict[str, Subscription] = {}
        self._closing: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._routers = RouterWatch(bus, self._routers_in_use, self._router_gone)
        self._freeze = FreezeWatch(bus, self._thawed, limit_s=self._limits.freeze_limit_s)
        bus.on_reconnect(outbox.resend_all)

    @property
    def base_subject(self) -> str:
        return base_subject_id(self._engine.description.identity)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def served_adapters(self) -> frozenset[str]:
        """Adapters that requests are taken for."""
        return frozenset(self._subscriptions.keys() - self._closing - {self.base_subject})

    def has_cancelled(self, request_id: str, attempt: int) -> bool:
        """Whether the attempt was cancelled before its request was read."""
        return (request_id, attempt) in self._cancelled_early

    async def run(self, started: asyncio.Event) -> None:
        """Serves until cancelled; `started` is set once control and pings are heard and `open` may be called."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._outbox.run())
            group.create_task(self._usage.run())
            group.create_task(self._routers.run())
            group.create_task(self._freeze.run())
            await self._bus.subscribe(control_subject(self._me.worker_id), self._on_control)
            await self._bus.subscribe(worker_ping_subject(self._me.worker_id), self._on_ping)
            await self._confirmed()
            started.set()

    async def open(self, subject_id: str) -> None:
        """Requests for the adapter (or the base's subject id) are heard when this returns. Idempotent."""
        if subject_id not in self._subscriptions:
            subject = infer_subject(subject_id, self._me.worker_id)
            self._subscriptions[subject_id] = await self._bus.subscribe(subject, self._on_request)
        await self._confirmed()

    async def close(self, subject_id: str) -> None:
        """Takes none any more: when this returns every message delivered before was answered, the last ones with BOUNCED."""
        subscription = self._subscriptions.get(subject_id)
        if subscription is None:
            return
        self._closing.add(subject_id)
        await subscription.drain()
        self._subscriptions.pop(subject_id, None)
        self._closing.discard(subject_id)

    async def _confirmed(self) -> None:
        """The server knows our interest: until then a request would find no responder."""
        while True:
            try:
                await self._bus.flush()
                return
            except (BusUnavailable, RequestTimeout) as error:
                log.warning("subscription.not_confirmed", error=error.message)
                await asyncio.sleep(_CONFIRM_RETRY_S)

    def abort(self, error: TenantryError, subject_id: str = "") -> int:
        """Ends what runs (of one subject, or all) with the error; how many that were."""
        running = [a for a in self._running.values() if not subject_id or a.attempt.handle.subject_id == subject_id]
        for answering in running:
            answering.abort(error)
        return len(running)

    async def stop(self, grace_s: float) -> None:
        """Bounces what comes, lets the running attempts finish within grace_s, then aborts them, then sees their frames off."""
        self.stopping = True
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S), asyncio.TaskGroup() as group:
                for subject_id in list(self._subscriptions):
                    group.create_task(self.close(subject_id))
        except TimeoutError:
            log.warning("worker.intake_not_confirmed_closed")  # the bus is away; what it still delivers is bounced
        if not await self._idle(grace_s):
            count = self.abort(WorkerLost("the worker is stopping and its grace for running requests is over"))
            log.warning("worker.aborted_at_stop", requests=count)
            await self._idle(2.0)
        await self._usage.flush(5.0)
        await self._delivered(2.0)

    async def _idle(self, timeout_s: float) -> bool:
        return await _until(lambda: not self._running, timeout_s)

    async def _delivered(self, timeout_s: float) -> bool:
        return await _until(lambda: self._outbox.unacknowledged() == 0, timeout_s)

    def _on_request(self, message: Message) -> None:
        try:
            request = decode_request(message.data)
        except msgspec.MsgspecError as error:
            log.error("request.malformed", subject=message.subject, error=type(error).__name__)
            return
        key = (request.request_id, request.attempt)
        if key in self._seen:
            log.info("request.repeated", request_id=request.request_id, attempt=request.attempt)
            return
        self._seen[key] = None
        if len(self._seen) > _SEEN_LIMIT:
            self._seen.popitem(last=False)
        if key in self._cancelled_early:
            del self._cancelled_early[key]
            return
        stream = self._outbox.open(request.request_id, request.attempt, request.router_id)
        reason = self._why_not(request, message.subject)
        if reason:
            log.info("request.bounced", request_id=request.request_id, attempt=request.attempt, reason=reason)
            self._outbox.end(stream, FrameKind.BOUNCED, reason.encode())
            return
        self._outbox.send(stream, FrameKind.ACCEPTED)
        began_s = asyncio.get_running_loop().time()
        attempt = Attempt(
            request.request_id,
            request.attempt,
            request.router_id,
            request.handle,
            request.path,
            key_id=request.key_id,
            began_s=began_s,
        )
        engine_model = request.handle.adapter_id or self._engine.base_model_name
        answering = Answering(
            request, attempt, stream, outbox=self._outbox, app=self._engine.app, policy=self._policy, engine_model=engine_model
        )
        self._governor.begin(attempt)
        self._running[key] = answering
        assert self._group is not None
        self._group.create_task(self._answer(answering))

    def _why_not(self, request: InferRequest, subject: str) -> str:
        """Why the request cannot be started here; empty: it can."""
        subject_id = request.handle.subject_id
        if self._freeze.stale():
            return "stale"
        if self.stopping:
            return "stopping"
        if subject_id in self._closing:
            return "draining"
        if infer_subject(subject_id, self._me.worker_id) != subject or not same_base(
            request.handle.base, self._engine.description.identity
        ):
            return "not_here"
        if not self._governor.has_room(request.handle.tenant_id, self._limits.max_running):
            return "full"
        return ""

    async def _answer(self, answering: Answering) -> None:
        attempt = answering.attempt
        structlog.contextvars.bind_contextvars(
            request_id=attempt.request_id, attempt=attempt.attempt, tenant=attempt.handle.tenant, model=attempt.handle.public_model
        )
        try:
            await answering.run()
        finally:
            self._running.pop(attempt.key, None)
            self._governor.end(attempt)
            self._usage.finish(attempt, answering.outcome)
            log.info(
                "attempt.ended",
                outcome=answering.outcome,
                prompt_tokens=attempt.prompt_tokens,
                completion_tokens=attempt.completion_tokens,
                engine_ms=round(attempt.engine_ms, 1),
            )

    def _on_control(self, message: Message) -> None:
        try:
            control = decode_control(message.data)
        except msgspec.MsgspecError as error:
            log.error("control.malformed", error=type(error).__name__)
            return
        if isinstance(control, Ack):
            self._outbox.acknowledge(control)
        elif isinstance(control, Resend):
            self._outbox.resend(control)
        else:
            self._cancel(control)

    def _cancel(self, cancel: Cancel) -> None:
        key = (cancel.request_id, cancel.attempt)
        answering = self._running.get(key)
        if answering is not None:
            answering.abort(Cancelled(f"cancelled: {cancel.reason}"), cancel.reason)
        elif key not in self._seen:  # overtook its request: another subject, no order between the two
            self._cancelled_early[key] = None
            if len(self._cancelled_early) > 1024:
                self._cancelled_early.popitem(last=False)

    async def _on_ping(self, message: Message) -> None:
        if message.reply:
            await self._bus.publish(message.reply, self._me.incarnation.encode())

    def _routers_in_use(self) -> set[str]:
        return {answering.attempt.router_id for answering in self._running.values()}

    def _router_gone(self, router_id: str) -> None:
        for answering in self._running.values():
            if answering.attempt.router_id == router_id:
                answering.abort(Cancelled("the router is gone"), "router_gone")
        self._outbox.forget_router(router_id)

    def _thawed(self, frozen_s: float) -> None:
        if frozen_s > self._limits.silence_limit_s:
            self.abort(WorkerLost(f"the worker stood still for {frozen_s:.1f} s"))


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True
