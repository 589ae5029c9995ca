"""What happens to open answers as time passes: deadlines, acknowledgements, asking again, pings.

One task for all answers, so that no token costs a timer. Silence is counted in connected time: it stands still while the bus
is away, and a stall of our own counts for one tick only.
"""

import asyncio

import structlog

from services.router.dispatch import Dispatcher
from services.router.streams import Answer
from shared.bus import BusUnavailable, Message
from shared.contracts.inference import Ack, Resend, worker_ping_subject
from shared.errors import DeadlineExceeded, StreamGap, TenantryError, WorkerLost, WorkerUnavailable

log = structlog.get_logger()

_TICK_S = 0.05
_ACK_EVERY_S = 0.2
_LONGEST_STEP_S = 0.25
_ASK_AGAIN_S = 0.25
_BREAK_OFF_S = 5.0  # for a blocked client to take the error that ended its stream
_QUIET_S = 1.5  # something comes about every answer each second: quiet may be a lost end


class Tender:
    """Owns the dispatcher's clock."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._bus = dispatcher.bus
        self._settings = dispatcher.settings
        self._away_since_s: float | None = None
        self._connected_at_s = 0.0  # clock
        self._acked_at_s = 0.0
        self._to_cancel: list[Answer] = []
        dispatcher.on_side("ping", self._pinged)
        self._bus.on_reconnect(self._reconnected)

    async def run(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        dispatcher = self._dispatcher
        last_s = loop.time()
        while True:
            try:
                async with asyncio.timeout(_TICK_S):
                    await dispatcher.urgent.wait()
            except TimeoutError:
                pass
            dispatcher.urgent.clear()
            now_s = loop.time()
            if self._bus.connected:
                dispatcher.clock_s += min(now_s - last_s, _LONGEST_STEP_S)
                self._away_since_s = None
            elif self._away_since_s is None:
                self._away_since_s = now_s
            last_s = now_s
            self._check(now_s)
            await self._speak(now_s)

    def _check(self, now_s: float) -> None:
        dispatcher = self._dispatcher
        away = self._away_since_s is not None and now_s - self._away_since_s > self._settings.inter_token_timeout_s
        for answer in list(dispatcher.answers.values()):
            if answer.over:
                self._look_after(answer, now_s)
                continue
            if away:
                answer.fail(WorkerLost("the bus has been away for longer than a stream may stand still"))
                continue
            verdict = self._overdue(answer, dispatcher.clock_s, now_s)
            if verdict is not None:
                error, lost = verdict
                answer.fail(error, lost=lost)
            elif answer.accepted and self._ask_again(answer, dispatcher.clock_s):
                dispatcher.ask_again(answer)

    def _look_after(self, answer: Answer, now_s: float) -> None:
        """An answer that is over and still here: its client's side is blocked, or about to end it."""
        if answer.stalled_s is None or answer.taken != answer.taken_then:
            answer.taken_then = answer.taken
            answer.stalled_s = now_s
            return
        if not answer.ended and not answer.cancelled:
            self._to_cancel.append(answer)
        patience_s = _BREAK_OFF_S if answer.error is not None else self._settings.client_stall_timeout_s
        if now_s - answer.stalled_s > patience_s and answer.hang_up is not None:
            log.warning("request.client_stalled", request_id=answer.request_id)
            answer.hang_up()
            answer.hang_up = None

    def _ask_again(self, answer: Answer, clock_s: float) -> bool:
        asked_for_s = clock_s - answer.resend_s
        if answer.gap_s is not None:
            return asked_for_s > _ASK_AGAIN_S
        return clock_s - answer.heard_s > _QUIET_S and asked_for_s > _QUIET_S

    def _overdue(self, answer: Answer, clock_s: float, now_s: float) -> tuple[TenantryError, bool] | None:
        """The error that ends it now, and whether another attempt may be made."""
        settings = self._settings
        if now_s > answer.expires_s:
            return DeadlineExceeded(f"the request took longer than {settings.request_budget_s:g} s"), False
        if not answer.accepted:
            if clock_s - answer.started_s > answer.accept_timeout_s:
                return WorkerUnavailable("the worker did not take the request in time", retry_after_s=1.0), True
            return None
        if answer.gap_s is not None and clock_s - answer.gap_s > settings.gap_timeout_s:
            return StreamGap("a part of the answer was lost on the way and could not be had again"), True
        if clock_s - answer.heard_s > settings.progress_timeout_s:
            return WorkerLost(f"the worker said nothing for {settings.progress_timeout_s:g} s"), True
        if answer.stream:
            if answer.body_s is None:
                if clock_s - answer.started_s > settings.first_token_timeout_s:
                    return DeadlineExceeded(f"nothing was answered in {settings.first_token_timeout_s:g} s"), False
            elif clock_s - answer.body_s > settings.inter_token_timeout_s:
                return DeadlineExceeded(f"nothing more came for {settings.inter_token_timeout_s:g} s"), False
        return None

    async def _speak(self, now_s: float) -> None:
        dispatcher = self._dispatcher
        if not self._bus.connected:
            return
        to_cancel, self._to_cancel = self._to_cancel, []
        for answer in to_cancel:
            await dispatcher.cancel(answer, "attempt_given_up")
        if dispatcher.resends:
            resends, dispatcher.resends = dispatcher.resends, {}
            for worker_id, positions in resends.items():
                await dispatcher.control(worker_id, Resend(router_id=dispatcher.router_id, positions=tuple(positions)))
        if now_s - self._acked_at_s >= _ACK_EVERY_S:
            self._acked_at_s = now_s
            for worker_id, positions in self._positions().items():
                await dispatcher.control(worker_id, Ack(router_id=dispatcher.router_id, positions=tuple(positions)))
        for peer in dispatcher.fleet.to_ping(dispatcher.clock_s):
            reply = dispatcher.side_subject("ping", peer.worker_id)
            try:
                await self._bus.publish(worker_ping_subject(peer.worker_id), b"", reply)
            except BusUnavailable as error:
                log.warning("tend.ping_not_sent", worker=peer.worker_id, error=error.message)

    def _positions(self) -> dict[str, list[tuple[str, int, int]]]:
        """What has come since the last acknowledgement, by worker."""
        dispatcher = self._dispatcher
        found, dispatcher.final_acks = dispatcher.final_acks, {}
        for answer in dispatcher.answers.values():
            seq = answer.next_seq - 1
            if seq > answer.acked_seq:
                answer.acked_seq = seq
                found.setdefault(answer.worker_id, []).append((answer.request_id, answer.attempt, seq))
        return found

    def _pinged(self, worker_id: str, message: Message) -> None:
        dispatcher = self._dispatcher
        if message.status == "503":
            if dispatcher.fleet.missed_ping(worker_id, dispatcher.clock_s - self._connected_at_s):
                dispatcher.lose_worker(worker_id, "nobody answers for it")
            return
        replaced = dispatcher.fleet.heard(worker_id, message.data.decode(errors="replace"), dispatcher.clock_s)
        if replaced:
            dispatcher.lose_worker(worker_id, "restarted", replaced)

    def _reconnected(self) -> None:
        """Frames may have been lost: everything open is asked for again from where it stands."""
        dispatcher = self._dispatcher
        self._connected_at_s = dispatcher.clock_s
        for answer in dispatcher.answers.values():
            if answer.accepted and not answer.over:
                dispatcher.ask_again(answer)
            elif not answer.accepted:  # the request itself may be lost: no long patience
                answer.started_s = dispatcher.clock_s
                answer.accept_timeout_s = min(answer.accept_timeout_s, self._settings.accept_timeout_s)
