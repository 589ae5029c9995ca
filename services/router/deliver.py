"""From an answer's frames to the client's connection.

Streams pass through as they come, pieces that wait joined into one write; everything else is held back until its END, so
that an error is a real status. Nothing that ended in an error is made to look complete.
"""

import asyncio

from services.router.asgi import Headers, Send, answer_whole
from services.router.exchange import Exchange
from services.router.openai import event_of
from services.router.streams import Answer
from shared.contracts.inference import Handle, Head
from shared.errors import EmptyAnswer, TenantryError

_EVENT_STREAM = "text/event-stream"
_PASSED_HEADERS = frozenset({"retry-after", "x-tenantry-queue-ms"})  # of those that the worker set


async def deliver(exchange: Exchange, answer: Answer, send: Send) -> bool:
    """True once the client has the answer, or an explicit error in mid-stream. False: lost, and nothing has been sent.

    :raises TenantryError: to be told to the client as a status; nothing has been sent.
    """
    while not answer.over and not (answer.pieces and answer.head is not None and _streams(exchange, answer.head)):
        await answer.wait()
    if answer.error is not None:
        if answer.lost:
            return False
        raise answer.error
    head = answer.head
    if head is None or not answer.held_bytes:
        raise EmptyAnswer("the engine ended the request without an answer")
    if _streams(exchange, head):
        await _stream(exchange, answer, head, send)
    else:
        await _whole(exchange, answer, head, send)
    return True


def _streams(exchange: Exchange, head: Head) -> bool:
    return exchange.stream and head.status == 200 and head.content_type.startswith(_EVENT_STREAM)


async def _whole(exchange: Exchange, answer: Answer, head: Head, send: Send) -> None:
    body = answer.take()
    exchange.status = head.status
    exchange.outcome = "complete" if head.status < 400 else f"error:engine_status_{head.status}"
    exchange.first_byte_s = asyncio.get_running_loop().time()
    await answer_whole(send, head.status, body, _headers(exchange, head), head.content_type.encode("latin-1"))
    _count(exchange, body)


async def _stream(exchange: Exchange, answer: Answer, head: Head, send: Send) -> None:
    exchange.status = head.status
    exchange.first_byte_s = asyncio.get_running_loop().time()
    headers = [(b"content-type", head.content_type.encode("latin-1")), (b"cache-control", b"no-cache"), *_headers(exchange, head)]
    await send({"type": "http.response.start", "status": head.status, "headers": headers})
    ends_event = True

    def write_at_once(body: bytes) -> bool:
        """Spares a stream that keeps up two turns of the loop per piece."""
        nonlocal ends_event
        if exchange.write_piece is None or not exchange.write_piece(body):
            return False
        _count(exchange, body)
        ends_event = body.endswith(b"\n\n")
        return True

    while True:
        body = answer.take()
        ended = answer.totals is not None
        if body or ended:
            await send({"type": "http.response.body", "body": body, "more_body": not ended})
            if body:
                _count(exchange, body)
                ends_event = body.endswith(b"\n\n")
        if ended:
            exchange.outcome = "complete"
            return
        if answer.pieces:
            continue
        if answer.error is not None:
            await _break_off(exchange, answer.error, send, ends_event=ends_event)
            return
        if answer.totals is None:
            answer.sink = write_at_once
            try:
                await answer.wait()
            finally:
                answer.sink = None


async def _break_off(exchange: Exchange, error: TenantryError, send: Send, *, ends_event: bool) -> None:
    """An explicit error event; the response is then left incomplete on purpose, so the connection ends without its last chunk."""
    if exchange.gone:
        exchange.outcome = "client_gone"
        return
    exchange.outcome = f"error:{error.code}"
    event = event_of(error, exchange.path, exchange.request_id)
    await send({"type": "http.response.body", "body": event if ends_event else b"\n\n" + event, "more_body": True})


def _count(exchange: Exchange, body: bytes) -> None:
    exchange.delivered_bytes += len(body)
    exchange.delivered_events += 1


def _headers(exchange: Exchange, head: Head) -> Headers:
    handle = exchange.handle
    assert handle is not None
    found = [
        (b"x-request-id", exchange.request_id.encode()),
        (b"x-tenantry-adapter", handle.public_model.encode()),
        (b"x-tenantry-digest", _digest(handle).encode()),
        (b"x-tenantry-base", handle.base.encode()),
        (b"x-tenantry-worker", exchange.worker_id.encode()),
    ]
    if exchange.client_label:
        found.append((b"x-client-request-id", exchange.client_label.encode()))
    found += [(name.lower().encode(), value.encode()) for name, value in head.headers.items() if name.lower() in _PASSED_HEADERS]
    return found


def _digest(handle: Handle) -> str:
    """Of the adapter version's files; for base traffic, of the base."""
    return handle.digest or "sha256:" + handle.base.rsplit("@", 1)[-1]
