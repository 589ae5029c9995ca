"""Outcomes to the usage stream: off the request's path, pipelined, bounded, sent again until the stream has them.

A repeat is harmless: the consumer upserts by request.
"""

import asyncio
from collections import OrderedDict

import msgspec
import structlog

from services.router.dispatch import Dispatcher
from services.router.metrics import Metrics
from shared.bus import BusUnavailable, Message
from shared.contracts.usage import RequestOutcome, encode, router_usage_subject

log = structlog.get_logger()

_KEPT = 20_000  # outcomes held for a stream that does not answer; beyond, the oldest is dropped and counted
_AGAIN_S = 2.0
_TICK_S = 0.2
_AGAIN_PER_TICK = 256


class _Stored(msgspec.Struct):
    """JetStream's acknowledgement."""

    stream: str = ""
    error: msgspec.Raw | None = None


_decode_stored = msgspec.json.Decoder(_Stored).decode


class Usage:
    """`add` is all that the request path calls."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._subject = router_usage_subject(dispatcher.router_id)
        self._new: list[RequestOutcome] = []
        self._waiting: OrderedDict[str, tuple[bytes, float]] = OrderedDict()  # number -> outcome, when it was sent
        self._number = 0
        dispatcher.on_side("usage", self._answered)

    @property
    def waiting(self) -> int:
        return len(self._new) + len(self._waiting)

    def add(self, outcome: RequestOutcome) -> None:
        self._new.append(outcome)
        if self.waiting > _KEPT:
            self._metrics.usage_dropped += 1
            if self._waiting:
                self._waiting.popitem(last=False)
            else:
                self._new.pop(0)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            await self._turn()

    async def flush(self, timeout_s: float) -> None:
        """Everything is stored, or timeout_s has passed."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self.waiting and loop.time() < until_s:
            await self._turn()
            await asyncio.sleep(0.02)
        if self.waiting:
            log.warning("usage.not_stored", outcomes=self.waiting)

    async def _turn(self) -> None:
        if not self._dispatcher.bus.connected:
            return
        now_s = asyncio.get_running_loop().time()
        new, self._new = self._new, []
        for outcome in new:
            self._number += 1
            self._waiting[str(self._number)] = (encode(outcome), -_AGAIN_S)  # due now
        again = 0
        for number, (data, sent_s) in list(self._waiting.items()):
            if now_s - sent_s < _AGAIN_S:
                continue
            if sent_s > 0:
                again += 1
                if again > _AGAIN_PER_TICK:
                    continue
            try:
                await self._dispatcher.bus.publish(self._subject, data, self._dispatcher.side_subject("usage", number))
            except BusUnavailable as error:
                log.warning("usage.not_sent", error=error.message)
                return
            if number in self._waiting:
                self._waiting[number] = (data, now_s)

    def _answered(self, number: str, message: Message) -> None:
        if message.status == "503":
            return  # no stream yet: sent again later
        try:
            stored = _decode_stored(message.data)
        except msgspec.MsgspecError as error:
            log.warning("usage.answer_unreadable", error=str(error))
            return
        if stored.stream and stored.error is None:
            self._waiting.pop(number, None)
