"""One attempt of one request: the engine's application called in process, its answer turned into frames.

It decides what of the application's answer is an answer: nothing before admission, nothing of a refused one, never an empty
or cut one. Which requests are taken, and when they are aborted, is service.py's.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Any, Protocol

import msgspec
import structlog

from services.worker.engine import AsgiApp, Scope
from services.worker.frames import Outbox, Stream
from services.worker.governor import Attempt, current_attempt
from services.worker.request_plan import of_default_length
from services.worker.request_policy import Prepared
from shared.contracts.errors import to_info
from shared.contracts.inference import FrameKind, Handle, Head, InferRequest, encode
from shared.errors import Cancelled, DeadlineExceeded, EmptyAnswer, EngineError, StreamGap, TenantryError, WorkerLost

log = structlog.get_logger()

DISCONNECT_GRACE_S = 0.3  # after http.disconnect the application has this long before it is cancelled
_HELD_LIMIT = 64  # pieces withheld until admission; a stream that says more before it is admitted is passed on
QUEUE_MS_HEADER = "x-tenantry-queue-ms"  # how long it waited in its tenant's queue
_DONE = b"data: [DONE]"
_PASSED_HEADERS = frozenset({b"retry-after", b"openai-processing-ms"})


class RequestPolicy(Protocol):
    """What of a client's body reaches the engine, and what of the engine's names reaches the client (request_policy.py)."""

    def prepare(self, path: str, body: bytes, handle: Handle, engine_model: str) -> Prepared:
        """:raises FieldNotAllowed: or InvalidRequest."""
        ...

    def publicise(self, piece: bytes, engine_model: str, public_model: str) -> bytes: ...


class Answering:
    """Runs the attempt to its end. Made per attempt; `run` once; `abort` at any time, idempotent."""

    def __init__(
        self,
        request: InferRequest,
        attempt: Attempt,
        stream: Stream,
        *,
        outbox: Outbox,
        app: AsgiApp,
        policy: RequestPolicy,
        engine_model: str,
    ) -> None:
        self.request = msgspec.structs.replace(request, body=b"")  # bodies are large; this one is needed once
        self._client_body = request.body
        self.attempt = attempt
        self.stream = stream
        self.outcome = "running"  # complete | error:<code> | cancelled:<reason>
        self._outbox = outbox
        self._app = app
        self._policy = policy
        self._engine_model = engine_model
        # a base's label may stand in an answer's text, so it is never replaced
        self._public_model = request.handle.public_model if request.handle.adapter_id else engine_model
        self._loop = asyncio.get_running_loop()
        self._scope: asyncio.Timeout | None = None
        self._gone = asyncio.Event()
        self._abort: TenantryError | None = None
        self._abort_reason = ""
        self._head: Head | None = None
        self._held: list[bytes] | None = None  # pieces that wait for admission
        self._head_sent = False
        self._had_body = False
        self._complete = False
        self._body: bytes | None = None  # None: not prepared, or already given to the application
        self._expired = False

    def abort(self, error: TenantryError, reason: str = "") -> None:
        """Ends it with the error: the application sees http.disconnect and is cancelled shortly after.

        `reason` marks a cancellation (the router wants nothing more of it).
        """
        if self._abort is not None or self.outcome != "running":
            return
        self._abort = error
        self._abort_reason = reason
        self._gone.set()
        self.attempt.place.stop_waiting(error)
        if self._scope is not None:
            now_s = self._loop.time()
            due_s = self._scope.when()
            self._scope.reschedule(min(now_s + DISCONNECT_GRACE_S, due_s if due_s is not None else now_s))

    async def run(self) -> None:
        """Exactly one END or ERROR has been queued when this returns, or none if the router wants none."""
        error: TenantryError | None = WorkerLost("the worker stopped while it answered this request")
        try:
            error = await self._answer()
        finally:
            self._finish(error)

    async def _answer(self) -> TenantryError | None:
        """None when the answer is whole."""
        current_attempt.set(self.attempt)
        raised: TenantryError | None = None
        try:
            prepared = self._policy.prepare(self.request.path, self._client_body, self.request.handle, self._engine_model)
            self._body, self.attempt.plan = of_default_length(prepared.body, prepared.plan, self.attempt.place.beam_tokens)
            self._client_body = b""
            if self._abort is None:
                await self._call()
        except TenantryError as error:
            raised = error
        except Exception as error:  # noqa: BLE001  whatever the application raises ends this attempt alone
            raised = EngineError("the engine failed while it answered this request")
            if self.attempt.refusal is None:
                log.error("attempt.engine_failed", cause=_cause(error))
        return self._verdict(raised)

    async def _call(self) -> None:
        scope = asyncio.timeout(self.request.budget_s)
        try:
            async with scope:
                self._scope = scope
                try:
                    await self._app(self._asgi_scope(), self._receive, self._send)
                    if self._held is not None and self._abort is None and self.attempt.refusal is None:
                        await self._release()
                finally:
                    self._scope = None
        except TimeoutError:
            if not scope.expired():
                raise
        self._expired = scope.expired()

    def _verdict(self, raised: TenantryError | None) -> TenantryError | None:
        if self._abort is not None:
            return self._abort
        if self._expired:
            return DeadlineExceeded("the request's time budget is spent", budget_s=self.request.budget_s)
        if self.attempt.refusal is not None:
            return self.attempt.refusal
        if raised is not None:
            return raised
        if not self._had_body:
            return EmptyAnswer("the engine ended the request without an answer")
        if not self._complete:
            return EngineError("the engine's answer broke off")
        return None

    def _finish(self, error: TenantryError | None) -> None:
        if error is None:
            self.outcome = "complete"
            self._outbox.end(self.stream, FrameKind.END, encode(self.attempt.totals()))
            return
        if isinstance(error, Cancelled):
            self.outcome = f"cancelled:{self._abort_reason or 'stopped'}"
        else:
            self.outcome = f"error:{error.code}"
        self._outbox.end(self.stream, FrameKind.ERROR, encode(to_info(error)))
        if self._abort_reason:
            self._outbox.forget(self.stream)  # what is queued still goes out; nothing is repeated

    def _asgi_scope(self) -> Scope:
        path = self.request.path
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": self.request.query.encode(),
            "headers": [
                (b"host", b"worker"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._body or b"")).encode()),
                (b"x-request-id", f"{self.request.request_id}-{self.request.attempt}".encode()),
            ],
            "client": ("bus", 0),
            "server": ("worker", 0),
            "state": {},
        }

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._abort is not None or self.attempt.refusal is not None:
            return
        if message["type"] == "http.response.start":
            self._head = _head(message)
            if self.request.stream and self._head.status < 300 and not self.attempt.admitted.is_set():
                self._held = []
            return
        if message["type"] != "http.response.body":
            return
        piece: bytes = message.get("body", b"")
        if piece and (self._had_body or piece.strip() != _DONE):
            self._had_body = True
            piece = self._policy.publicise(piece, self._engine_model, self._public_model)
            if self._held is not None:
                self._held.append(piece)
                if self.attempt.admitted.is_set() or len(self._held) > _HELD_LIMIT:
                    await self._release()
            else:
                await self._pass_on(piece)
        if not message.get("more_body", False):
            self._complete = True

    async def _release(self) -> None:
        held, self._held = self._held or [], None
        for piece in held:
            await self._pass_on(piece)

    async def _pass_on(self, piece: bytes) -> None:
        if not self._head_sent:
            self._head_sent = True
            self._outbox.send(self.stream, FrameKind.HEAD, encode(self._headed()))
        try:
            await self._outbox.body(self.stream, piece)
        except StreamGap as error:
            self.abort(error)
            raise

    def _headed(self) -> Head:
        head = self._head or Head(status=200)
        if self.attempt.admitted.is_set():
            head.headers[QUEUE_MS_HEADER] = str(round(self.attempt.place.queued_ms))
        return head


def _head(message: MutableMapping[str, Any]) -> Head:
    content_type = "application/json"
    passed: dict[str, str] = {}
    for name, value in message.get("headers", ()):
        lowered = name.lower()
        if lowered == b"content-type":
            content_type = value.decode("latin-1")
        elif lowered in _PASSED_HEADERS:
            passed[lowered.decode("latin-1")] = value.decode("latin-1")
    return Head(status=message["status"], content_type=content_type, headers=passed)


def _cause(error: BaseException) -> str:
    """Names of the errors only: their texts may quote prompts."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return "+".join(_cause(one) for one in inner) or type(error).__name__
