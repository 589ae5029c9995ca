"""Outcomes to the usage stream: off the request's path, pipelined, bounded, sent again until the stream has them.

A repeat is harmless: the consumer upserts by request.
"""

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec
import structlog

from services.router.dispatch import Dispatcher
from services.router.exchange import Exchange
from services.router.metrics import Metrics
from shared.bus import BusUnavailable, Message
from shared.contracts.usage import BATCH_LIMIT, RequestOutcome, encode, router_usage_subject

log = structlog.get_logger()

_KEPT = 20_000  # outcomes held for a stream that does not answer; beyond, the oldest are dropped and counted
_AGAIN_S = 2.0
_TICK_S = 0.2
_AGAIN_PER_TICK = 16  # batches


def outcome_of(exchange: Exchange, router_id: str, now_s: float) -> RequestOutcome:
    """Of a request that has ended and whose tenant is known; what refused it may have come before it had a handle."""
    tenant, handle = exchange.tenant, exchange.handle
    assert tenant is not None
    first_byte_s = exchange.first_byte_s - exchange.started_s if exchange.first_byte_s else 0.0
    return RequestOutcome(
        request_id=exchange.request_id,
        attempts=exchange.attempts,
        tenant_id=tenant.tenant_id,
        tenant=tenant.name,
        adapter_id=handle.adapter_id if handle else "",
        digest=handle.digest if handle else "",
        pool_id=handle.pool_id if handle else "",
        alias=handle.alias if handle else "",
        version=handle.version if handle else 0,
        base=handle.base if handle else "",
        key_id=exchange.key_id,
        router_id=router_id,
        path=exchange.path,
        status=exchange.status,
        outcome=exchange.outcome,
        delivered_bytes=exchange.delivered_bytes,
        delivered_events=exchange.delivered_events,
        client_label=exchange.client_label,
        first_byte_ms=round(first_byte_s * 1000.0, 3),
        total_ms=round((now_s - exchange.started_s) * 1000.0, 3),
    )


class _Stored(msgspec.Struct):
    """JetStream's acknowledgement."""

    stream: str = ""
    error: dict[str, Any] | None = None


_decode_stored = msgspec.json.Decoder(_Stored).decode


class _Batch(msgspec.Struct):
    data: bytes
    outcomes: int
    sent_s: float


class Usage:
    """`add` is all that the request path calls."""

    def __init__(self, dispatcher: Dispatcher, metrics: Metrics) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._subject = router_usage_subject(dispatcher.router_id)
        self._new: list[RequestOutcome] = []
        self._waiting: OrderedDict[str, _Batch] = OrderedDict()  # by number
        self._waiting_outcomes = 0
        self._number = 0
        dispatcher.on_side("usage", self._answered)

    @property
    def waiting(self) -> int:
        return len(self._new) + self._waiting_outcomes

    def add(self, outcome: RequestOutcome) -> None:
        self._new.append(outcome)
        if self.waiting > _KEPT:
            if self._waiting:
                self._metrics.usage_dropped += self._settle(next(iter(self._waiting)))
            else:
                self._new.pop(0)
                self._metrics.usage_dropped += 1

    def _settle(self, number: str) -> int:
        """The batch waits no more; how many outcomes it held."""
        batch = self._waiting.pop(number, None)
        if batch is None:
            return 0
        self._waiting_outcomes -= batch.outcomes
        return batch.outcomes

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
        for start in range(0, len(new), BATCH_LIMIT):
            batch = new[start : start + BATCH_LIMIT]
            self._number += 1
            self._waiting[str(self._number)] = _Batch(encode(batch), len(batch), -_AGAIN_S)  # due now
            self._waiting_outcomes += len(batch)
        again = 0
        for number, batch in list(self._waiting.items()):
            if now_s - batch.sent_s < _AGAIN_S:
                continue
            if batch.sent_s > 0:
                again += 1
                if again > _AGAIN_PER_TICK:
                    continue
            try:
                await self._dispatcher.bus.publish(self._subject, batch.data, self._dispatcher.side_subject("usage", number))
            except BusUnavailable as error:
                log.warning("usage.not_sent", error=error.message)
                return
            batch.sent_s = now_s

    def _answered(self, number: str, message: Message) -> None:
        if message.status == "503":
            return  # no stream yet: sent again later
        try:
            stored = _decode_stored(message.data)
        except msgspec.MsgspecError as error:
            log.warning("usage.answer_unreadable", error=str(error))
            return
        if stored.stream and stored.error is None:
            self._settle(number)
