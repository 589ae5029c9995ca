"""The data plane: one bare ASGI callable from a client's bytes to the worker's bytes.

Reads of the body only what peek.py names; resolves once; charges the tenant's budgets; passes answers through untouched. A
status line goes out with the first body piece, so that everything before it can still be a real status.
"""

import asyncio

import msgspec
import structlog

from services.router.asgi import Headers, Receive, Scope, Send, answer_whole
from services.router.charge import Charge
from services.router.crowd import Crowd
from services.router.deliver import deliver
from services.router.dispatch import Dispatcher
from services.router.exchange import Exchange
from services.router.freshness import Freshness
from services.router.metrics import Metrics
from services.router.models import list_models, show_model
from services.router.openai import BodyTooSlow, MethodNotAllowed, body_of, retry_after_of, status_of
from services.router.peek import peek, tokens_asked
from services.router.rates import Rates
from services.router.request_ids import RequestIds
from services.router.resolve import authenticate, resolve, secret_of, speaks_for
from services.router.routes import RouteTable
from services.router.server import BODY_WHOLE, HANG_UP, ON_GONE, WRITE_PIECE
from services.router.settings import RouterSettings
from services.router.trials import Trials
from services.router.usage import Usage, outcome_of
from shared.bus import BusUnavailable
from shared.errors import (
    BodyTooLarge,
    Cancelled,
    EndpointNotSupported,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TenantryError,
)

log = structlog.get_logger()

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/tokenize"})
_MODELS_PATH = "/v1/models"
_QUERY_LIMIT_BYTES = 8 * 1024  # it travels with the body in one message


class RequestHead(msgspec.Struct, gc=False):
    """`declared_bytes` of the body; -1: not declared."""

    authorization: str
    x_api_key: str
    declared_bytes: int


class DataPlane:
    """`draining` refuses new requests while the router stops; `active` counts those inside."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        table: RouteTable,
        freshness: Freshness,
        usage: Usage,
        rates: Rates,
        trials: Trials,
        metrics: Metrics,
        settings: RouterSettings,
    ) -> None:
        self.active = 0
        self._dispatcher = dispatcher
        self._table = table
        self._freshness = freshness
        self._usage = usage
        self._rates = rates
        self._trials = trials
        self._metrics = metrics
        self._settings = settings
        self._ids = RequestIds()
        self._crowd = Crowd("requests", settings.tenant_max_concurrent)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        exchange = Exchange(self._ids.next(), scope["path"], loop.time())
        scope[ON_GONE] = exchange.client_gone
        exchange.headers = scope["headers"]
        exchange.hang_up = scope.get(HANG_UP)
        exchange.write_piece = scope.get(WRITE_PIECE)
        self.active += 1
        try:
            await self._answer(exchange, scope, receive, send)
        except TenantryError as error:
            await self._refuse(exchange, send, error)
        except Exception as error:
            log.exception("request.broke", request_id=exchange.request_id, error=type(error).__name__)
            if not exchange.first_byte_s:
                await self._refuse(exchange, send, InternalError("the router broke; the request id is in its log"))
            else:
                exchange.outcome = "error:internal_error"  # the response stays incomplete, and shows it
        finally:
            self.active -= 1
            if exchange.crowded:
                self._crowd.leave(exchange.crowded)
            self._finish(exchange, loop.time())

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        head = self._read_head(exchange, scope)
        path: str = exchange.path
        method: str = scope["method"]
        generating = path in GENERATING_PATHS
        if not generating and path != _MODELS_PATH and not path.startswith(_MODELS_PATH + "/"):
            raise NotFound(f"there is no {path[:128]} here")
        allow = "POST" if generating else "GET"
        if method != allow:
            raise MethodNotAllowed(f"{path[:128]} takes {allow}", allow=allow)
        if self.active > self._settings.max_concurrent:
            raise Overloaded(
                "the router has as many requests as it takes at once",
                held=self.active - 1,
                allowed=self._settings.max_concurrent,
                retry_after_s=1.0,
            )
        if not self._dispatcher.bus.connected:
            raise BusUnavailable("the bus cannot be reached now", retry_after_s=1.0)
        if not self._freshness.current(exchange.started_s):
            await self._freshness.settle(exchange.started_s)
        exchange.secret = secret_of(head.authorization, head.x_api_key)
        key = authenticate(self._table, exchange.secret)
        exchange.key_id = key.key_id
        exchange.tenant = speaks_for(self._table, key, exchange.mark)
        self._crowd.enter(exchange.tenant.name)
        exchange.crowded = exchange.tenant.name
        if not generating:
            await self._models(exchange, send)
            return
        if BODY_WHOLE in scope:
            exchange.body = await self._read_body(receive, head.declared_bytes)
        else:
            exchange.body = await self._body_in_time(receive, head.declared_bytes)
        peeked = peek(exchange.body)
        exchange.model = peeked.model or ""
        exchange.stream = bool(peeked.stream)
        route = resolve(self._table, exchange.secret, exchange.mark, exchange.model, exchange)
        exchange.route = route
        if not any(not worker.limits.endpoints or path in worker.limits.endpoints for worker in route.workers):
            raise EndpointNotSupported(f"the engine of this pool does not serve {path}", path=path)
        tenant = self._table.tenants.get(route.handle.tenant)
        if tenant is not None:
            limits = tenant.limits
            if limits.requests_per_minute is not None or limits.tokens_per_minute is not None:
                tokens = 0 if limits.tokens_per_minute is None else tokens_asked(peeked, path, len(exchange.body), limits, route)
                now_s = asyncio.get_running_loop().time()  # the body may have taken long
                exchange.charge = await self._rates.admit(tenant.tenant_id, limits, tokens, now_s)
        await self._dispatcher.serve(exchange, lambda answer: deliver(exchange, answer, send))

    def _read_head(self, exchange: Exchange, scope: Scope) -> RequestHead:
        authorization = x_api_key = mark = b""
        marked = False
        declared_bytes = -1
        mark_header = self._table.routing.header.lower().encode()
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"x-api-key":
                x_api_key = value
            elif name == b"content-length":
                declared_bytes = int(value)
            elif name == b"x-request-id":
                exchange.client_label = _label(value)
            if name == mark_header:
                if marked and mark != value:
                    raise InvalidRequest("the routing header names two tenants", param=self._table.routing.header)
                marked, mark = True, value
        exchange.mark = mark.decode("latin-1")
        query: bytes = scope["query_string"]
        if len(query) > _QUERY_LIMIT_BYTES:
            raise InvalidRequest(
                f"the query is longer than {_QUERY_LIMIT_BYTES} bytes", asked_bytes=len(query), limit_bytes=_QUERY_LIMIT_BYTES
            )
        exchange.query = query.decode("latin-1")
        return RequestHead(authorization.decode("latin-1"), x_api_key.decode("latin-1"), declared_bytes)

    async def _body_in_time(self, receive: Receive, declared_bytes: int) -> bytes:
        """:raises BodyTooSlow: and as _read_body."""
        limit_s = self._settings.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._read_body(receive, declared_bytes)
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not come whole in {limit_s:g} s", limit_s=limit_s) from error

    async def _read_body(self, receive: Receive, declared_bytes: int) -> bytes:
        """:raises BodyTooLarge: declared or actual. :raises Cancelled: the client went away in the middle of it."""
        limit_bytes = self._settings.body_limit_bytes
        if declared_bytes > limit_bytes:
            raise _too_large(declared_bytes, limit_bytes)
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Cancelled("the client went away")
        body: bytes = event["body"]
        if not event["more_body"]:
            if len(body) > limit_bytes:
                raise _too_large(len(body), limit_bytes)
            return body
        pieces = [body]
        read_bytes = len(body)
        while event["more_body"]:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise Cancelled("the client went away")
            pieces.append(event["body"])
            read_bytes += len(event["body"])
            if read_bytes > limit_bytes:
                raise _too_large(read_bytes, limit_bytes)
        return b"".join(pieces)

    async def _models(self, exchange: Exchange, send: Send) -> None:
        name = exchange.path[len(_MODELS_PATH) + 1 :]
        if name:
            body = show_model(self._table, exchange.secret, exchange.mark, name)
        else:
            body = list_models(self._table, exchange.secret, exchange.mark)
        exchange.status = 200
        exchange.outcome = "complete"
        await answer_whole(send, 200, body, [(b"x-request-id", exchange.request_id.encode())])

    async def _refuse(self, exchange: Exchange, send: Send, error: TenantryError) -> None:
        """The error as a status and a body; only called while nothing has been sent."""
        if exchange.gone or isinstance(error, Cancelled):
            exchange.status = 499
            exchange.outcome = "client_gone"
            if exchange.gone:
                return
        else:
            exchange.status = status_of(error)
            exchange.outcome = f"error:{error.code}"
        headers: Headers = [(b"x-request-id", exchange.request_id.encode())]
        if exchange.client_label:
            headers.append((b"x-client-request-id", exchange.client_label.encode()))
        retry_after = retry_after_of(error)
        if retry_after:
            headers.append((b"retry-after", retry_after.encode()))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", error.fields["allow"].encode()))
        await answer_whole(send, exchange.status, body_of(error, exchange.path, exchange.request_id), headers)

    def _finish(self, exchange: Exchange, now_s: float) -> None:
        if exchange.charge is not None:
            self._rates.settle(exchange.charge, _tokens_used(exchange, exchange.charge), now_s)
        handle = exchange.handle
        tenant = handle.tenant if handle else ""
        model = handle.public_model if handle else ""
        path = exchange.path if exchange.path in GENERATING_PATHS or exchange.path == _MODELS_PATH else "other"
        duration_s = now_s - exchange.started_s
        first_byte_s = exchange.first_byte_s - exchange.started_s if exchange.first_byte_s else 0.0
        self._metrics.request_done(tenant, model, path, exchange.status, duration_s, first_byte_s, exchange.delivered_bytes)
        self._trials.ended(exchange, first_byte_s)
        if exchange.tenant is not None and exchange.path in GENERATING_PATHS:
            self._usage.add(outcome_of(exchange, self._dispatcher.router_id, now_s))
        log.info(
            "request.done",
            request_id=exchange.request_id,
            tenant=tenant,
            adapter=model,
            path=path,
            status=exchange.status,
            outcome=exchange.outcome,
            worker=exchange.worker_id,
            attempts=exchange.attempts,
            ms=round(duration_s * 1000.0, 2),
            first_byte_ms=round(first_byte_s * 1000.0, 2),
            sent_bytes=exchange.delivered_bytes,
        )


def _tokens_used(exchange: Exchange, charge: Charge) -> int:
    """What the engine counted; of an answer that was cut off, what was charged or, if more, what the client got."""
    totals = exchange.totals
    if totals is not None:
        return totals.prompt_tokens + totals.completion_tokens
    if exchange.first_byte_s or exchange.outcome == "client_gone":
        return max(charge.tokens, exchange.delivered_events)
    return 0


def _label(value: bytes) -> str:
    """A client's own request id, if it is fit for a header and a log."""
    text = value[:128].decode("latin-1")
    return text if text.isascii() and text.isprintable() else ""


def _too_large(asked_bytes: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit_bytes} bytes", asked_bytes=asked_bytes, limit_bytes=limit_bytes)
