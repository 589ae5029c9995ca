"""From a resolved request to an answer: attempts, their fences, and the frames of every open answer.

Publishes to the adapter's subject on one worker; a worker that does not hold it, gives it back, dies or stays silent before
anything reached the client is replaced by another attempt. Deadlines, acknowledgements and pings are in tend.py.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from services.router.exchange import Exchange
from services.router.fleet import Fleet
from services.router.metrics import Metrics
from services.router.openai import AnswerTooLarge, ClientTooSlow
from services.router.resolve import Route, resolve
from services.router.routes import RouteTable
from services.router.settings import RouterSettings
from services.router.streams import Answer, Bounced
from shared.bus import Bus, BusUnavailable, Message, NoResponder
from shared.contracts.adapters import PoolWorker
from shared.contracts.inference import (
    Cancel,
    Control,
    FrameBatch,
    InferRequest,
    answer_subject,
    control_subject,
    decode_batch,
    encode,
    infer_subject,
    router_ping_subject,
)
from shared.contracts.workers import REPORTS_SUBJECT, decode_report
from shared.errors import AdapterNotReady, Cancelled, InternalError, Overloaded, TenantryError, WorkerLost, WorkerUnavailable

log = structlog.get_logger()

_PAUSE_S = 0.02  # before the only worker is tried again while the routes stand still; doubles
_LONGEST_PAUSE_S = 0.25

Deliver = Callable[[Answer], Awaitable[bool]]
SideHandler = Callable[[str, Message], None]


class Dispatcher:
    """One per router. `answers` holds the running attempt of each request; frames of anything else are ignored."""

    def __init__(self, bus: Bus, router_id: str, table: RouteTable, fleet: Fleet, settings: RouterSettings, metrics: Metrics) -> None:
        self.bus = bus
        self.router_id = router_id
        self.table = table
        self.fleet = fleet
        self.settings = settings
        self.metrics = metrics
        self.answers: dict[str, Answer] = {}
        self.clock_s = 0.0  # connected time, moved by the tender
        self.resends: dict[str, list[tuple[str, int, int]]] = {}  # by worker_id, for the tender
        self.final_acks: dict[str, list[tuple[str, int, int]]] = {}
        self.urgent = asyncio.Event()  # wakes the tender before its tick
        self.stopping: TenantryError | None = None
        self._answer_subject = answer_subject(router_id)
        self._sides: dict[str, SideHandler] = {"nr": self._no_responder}

    def side_subject(self, kind: str, rest: str) -> str:
        """A reply subject of this router's own, heard by the handler of `kind`."""
        return f"{self._answer_subject}.{kind}.{rest}"

    def on_side(self, kind: str, handler: SideHandler) -> None:
        self._sides[kind] = handler

    async def start(self) -> None:
        """Everything this router listens to stands when it returns."""
        await self.bus.subscribe(self._answer_subject, self._frames)
        await self.bus.subscribe(f"{self._answer_subject}.>", self._side)
        await self.bus.subscribe(REPORTS_SUBJECT, self._report, pending=4096)
        await self.bus.subscribe(router_ping_subject(self.router_id), self._pinged, pending=4096)
        await self.bus.flush()

    async def serve(self, exchange: Exchange, deliver: Deliver) -> None:
        """Runs attempts until `deliver` returns True; it returns False when its attempt was lost before anything reached the client.

        :raises TenantryError: what the client is to be told.
        """
        assert exchange.route is not None
        loop = asyncio.get_running_loop()
        avoid: set[str] = set()
        losses = 0
        bounces = 0
        patience_until_s: float | None = None
        while True:
            worker = self.fleet.pick(exchange.route.workers, avoid)
            if worker is None:
                avoid.clear()
                worker = exchange.route.workers[0]
            version = self.table.version
            last = losses + 1 >= self.settings.attempts
            elsewhere = any(other.worker_id != worker.worker_id for other in exchange.route.workers)
            answer = await self._open(exchange, worker, self._accept_timeout_s(last=last, elsewhere=elsewhere))
            try:
                if await deliver(answer):
                    return
            finally:
                await self._close(exchange, answer)
            if exchange.gone:
                raise Cancelled("the client went away")
            if self.stopping is not None:
                raise self.stopping
            avoid.add(worker.worker_id)
            self.metrics.redispatches += 1
            if patience_until_s is None:
                patience_until_s = loop.time() + self.settings.bounce_patience_s
            if isinstance(answer.error, Bounced | NoResponder):
                pause_s = min(_PAUSE_S * 2**bounces, _LONGEST_PAUSE_S)
                bounces += 1
                exchange.route = await self._reroute(exchange, exchange.route, avoid, version, pause_s, patience_until_s, answer.error)
                continue
            losses += 1
            if losses >= self.settings.attempts:
                raise WorkerUnavailable("no worker that holds this model answers now", retry_after_s=1.0) from answer.error
            exchange.route = await self._resolve_again(exchange, patience_until_s)

    async def _resolve_again(self, exchange: Exchange, until_s: float) -> Route:
        """What the request resolves to now; a model that is on its way back (its worker restarts) is waited for.

        :raises TenantryError: what the client is to be told, e.g. adapter_not_found once it drains.
        """
        loop = asyncio.get_running_loop()
        while True:
            version = self.table.version
            try:
                return resolve(self.table, exchange.secret, exchange.mark, exchange.model, exchange)
            except (AdapterNotReady, WorkerUnavailable):
                left_s = until_s - loop.time()
                if left_s <= 0 or exchange.gone or self.stopping is not None:
                    raise
            await self.table.wait_changed(version, min(left_s, _LONGEST_PAUSE_S))

    async def _reroute(
        self,
        exchange: Exchange,
        route: Route,
        avoid: set[str],
        version: int,
        pause_s: float,
        until_s: float,
        why: TenantryError,
    ) -> Route:
        """The route once it, or a worker of it, is another; or the same again after pause_s.

        :raises TenantryError: as _resolve_again; worker_unavailable after until_s.
        """
        loop = asyncio.get_running_loop()
        pause_until_s = loop.time() + pause_s
        while True:
            fresh = await self._resolve_again(exchange, until_s)
            if fresh.handle != route.handle:
                avoid.clear()
                return fresh
            if any(worker.worker_id not in avoid for worker in fresh.workers):
                return fresh
            now_s = loop.time()
            if now_s >= until_s or exchange.gone:
                raise _unavailable(why)
            if now_s >= pause_until_s:
                avoid.clear()
                return fresh
            await self.table.wait_changed(version, min(until_s, pause_until_s) - now_s)
            version = self.table.version

    def _accept_timeout_s(self, *, last: bool, elsewhere: bool) -> float:
        if last:
            return self.settings.last_accept_timeout_s
        return self.settings.accept_timeout_s if elsewhere else self.settings.lone_accept_timeout_s

    async def _open(self, exchange: Exchange, worker: PoolWorker, accept_timeout_s: float) -> Answer:
        loop = asyncio.get_running_loop()
        route = exchange.route
        assert route is not None
        settings = self.settings
        exchange.attempts += 1
        exchange.worker_id = worker.worker_id
        limit_bytes = settings.answer_buffer_bytes if exchange.stream else settings.answer_limit_bytes
        answer = Answer(
            request_id=exchange.request_id,
            attempt=exchange.attempts,
            worker_id=worker.worker_id,
            stream=exchange.stream,
            now_s=self.clock_s,
            accept_timeout_s=accept_timeout_s,
            expires_s=exchange.started_s + settings.request_budget_s,
            limit_bytes=limit_bytes,
            too_much=_TOO_SLOW if exchange.stream else _TOO_LARGE,
            hang_up=exchange.hang_up,
        )
        self.answers[exchange.request_id] = answer
        self.fleet.peer(worker.worker_id).open += 1
        exchange.answer = answer
        if exchange.gone:
            answer.fail(Cancelled("the client went away"))
        if self.stopping is not None:
            answer.fail(self.stopping)
        request = InferRequest(
            request_id=exchange.request_id,
            attempt=exchange.attempts,
            router_id=self.router_id,
            handle=route.handle,
            path=exchange.path,
            body=exchange.body,
            query=exchange.query,
            stream=exchange.stream,
            budget_s=max(answer.expires_s - loop.time(), 0.0),
            client_label=exchange.client_label,
            key_id=exchange.key_id,
        )
        reply = f"{self._answer_subject}.nr.{exchange.request_id}.{exchange.attempts}"
        try:
            await self.bus.publish(infer_subject(route.handle.subject_id, worker.worker_id), encode(request), reply)
        except BusUnavailable as error:
            answer.ended = True
            answer.fail(error)
        return answer

    async def _close(self, exchange: Exchange, answer: Answer) -> None:
        """The attempt is over for us: its frames are acknowledged, or it is cancelled."""
        if self.answers.get(answer.request_id) is answer:
            del self.answers[answer.request_id]
        exchange.answer = None
        exchange.totals = answer.totals
        self.fleet.peer(answer.worker_id).open -= 1
        if answer.ended:
            if answer.next_seq:
                position = (answer.request_id, answer.attempt, answer.next_seq - 1)
                self.final_acks.setdefault(answer.worker_id, []).append(position)
            return
        await self.cancel(answer, "client_gone" if exchange.gone else "attempt_given_up")

    async def cancel(self, answer: Answer, reason: str) -> None:
        """Tells the worker that nobody wants the attempt any more; once."""
        if answer.cancelled:
            return
        answer.cancelled = True
        if self.stopping is not None and reason == "attempt_given_up":
            reason = "router_stopping"
        await self.control(answer.worker_id, Cancel(request_id=answer.request_id, attempt=answer.attempt, reason=reason))

    async def control(self, worker_id: str, message: Control) -> None:
        try:
            await self.bus.publish(control_subject(worker_id), encode(message))
        except BusUnavailable as error:
            log.warning("dispatch.control_not_sent", worker=worker_id, error=error.message)

    def lose_worker(self, worker_id: str, why: str, incarnation: str = "") -> None:
        """Every answer that it (or one incarnation of it) was giving is lost."""
        for answer in list(self.answers.values()):
            if answer.worker_id != worker_id or (incarnation and answer.incarnation != incarnation):
                continue
            answer.fail(WorkerLost(f"the worker that was answering is gone ({why})"), lost=True)

    def stop(self, error: TenantryError) -> None:
        """Ends every open answer with `error`."""
        self.stopping = error
        for answer in list(self.answers.values()):
            answer.fail(error)

    def _frames(self, message: Message) -> None:
        batch: FrameBatch = decode_batch(message.data)
        now_s = self.clock_s
        worker_id = batch.worker_id
        incarnation = batch.incarnation
        peer = self.fleet.peers.get(worker_id)
        if peer is not None and peer.incarnation == incarnation:
            peer.heard_s = now_s
            peer.missed = 0
        else:
            replaced = self.fleet.heard(worker_id, incarnation, now_s)
            if replaced is None:
                self.metrics.frames_ignored += len(batch.frames)
                return
            if replaced:
                self.lose_worker(worker_id, "restarted", replaced)
        answers = self.answers
        self.metrics.frames += len(batch.frames)
        for frame in batch.frames:
            answer = answers.get(frame.request_id)
            if answer is None or answer.attempt != frame.attempt or answer.worker_id != worker_id:
                self.metrics.frames_ignored += 1
                continue
            if answer.incarnation != incarnation:
                if answer.incarnation:
                    self.metrics.frames_ignored += 1
                    continue
                answer.incarnation = incarnation
            try:
                missing = answer.receive(frame, now_s)
            except (msgspec.MsgspecError, ValueError) as error:
                answer.fail(InternalError(f"a frame from the worker cannot be read: {error}"))
                continue
            if missing:
                self.ask_again(answer)

    def ask_again(self, answer: Answer) -> None:
        """A frame is missing: everything after the last one in order is asked for."""
        self.metrics.resends += 1
        answer.resend_s = self.clock_s
        self.resends.setdefault(answer.worker_id, []).append((answer.request_id, answer.attempt, answer.next_seq - 1))
        self.urgent.set()

    def _side(self, message: Message) -> None:
        kind, _, rest = message.subject[len(self._answer_subject) + 1 :].partition(".")
        handler = self._sides.get(kind)
        if handler is not None:
            handler(rest, message)

    def _no_responder(self, rest: str, message: Message) -> None:
        if message.status != "503":
            return
        request_id, _, attempt = rest.partition(".")
        answer = self.answers.get(request_id)
        if answer is not None and str(answer.attempt) == attempt and not answer.accepted:
            answer.ended = True
            answer.fail(NoResponder("the worker does not hold it any more"), lost=True)

    def _report(self, message: Message) -> None:
        report = decode_report(message.data)
        replaced = self.fleet.reported(report, self.clock_s)
        if replaced:
            self.lose_worker(report.worker_id, "restarted", replaced)

    async def _pinged(self, message: Message) -> None:
        if message.reply:
            await self.bus.publish(message.reply, self.router_id.encode())


def _unavailable(why: TenantryError) -> TenantryError:
    if why.fields.get("reason") == "full":
        return Overloaded("every worker that holds this model runs as many requests as it takes at once", retry_after_s=1.0)
    return WorkerUnavailable("the worker that holds this model takes no requests now", retry_after_s=1.0)


_TOO_SLOW = ClientTooSlow("the client reads more slowly than its answer is made, and what waits for it passed the router's bound")
_TOO_LARGE = AnswerTooLarge("the answer is larger than the router holds back for an answer that is not streamed")
