"""What of an application's answer becomes an answer: withheld heads, refusals, empty and cut answers. Applications are written here."""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.worker import request_policy
from services.worker.attempt import Answering
from services.worker.engine import AsgiApp, Receive, Scope, Send
from services.worker.frames import Outbox
from services.worker.governor import Attempt, current_attempt
from services.worker.identity import Identity
from shared.contracts.inference import Frame, FrameKind, Handle, InferRequest, decode_error, decode_head
from shared.errors import Cancelled, Draining, Overloaded
from tests.waiting import until

HANDLE = Handle(tenant_id="t1", tenant="sales", pool_id="main", base="demo@" + "0" * 64, adapter_id="ad_x", alias="tone", version=3)
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class Ran:
    """One attempt run against an application."""

    def __init__(self, answering: Answering, outbox: Outbox) -> None:
        self.answering = answering
        self.frames: list[Frame] = list(answering.stream.kept)
        self.outcome = answering.outcome
        self.kept_bytes = outbox.kept_bytes

    @property
    def kinds(self) -> list[FrameKind]:
        return [frame.kind for frame in self.frames]

    @property
    def error(self) -> str:
        return decode_error(self.frames[-1].data).code if self.frames[-1].kind is FrameKind.ERROR else ""


@asynccontextmanager
async def answering(app: AsgiApp, *, stream: bool = True, budget_s: float = 5.0) -> AsyncIterator[tuple[Answering, Outbox]]:
    async def publish(subject: str, data: bytes) -> None:
        del subject, data

    outbox = Outbox(publish, Identity(worker_id="w1", incarnation="i1", pool_id="main"))
    request = InferRequest(
        request_id="q",
        attempt=1,
        router_id="r1",
        handle=HANDLE,
        path="/v1/chat/completions",
        body=b'{"messages":[]}',
        stream=stream,
        budget_s=budget_s,
    )
    attempt = Attempt("q", 1, "r1", HANDLE, request.path)
    yield Answering(request, attempt, outbox.open("q", 1, "r1"), outbox=outbox, app=app, policy=request_policy, engine_model="ad_x"), outbox


async def ran(app: AsgiApp, **options: Any) -> Ran:
    async with answering(app, **options) as (one, outbox):
        await one.run()
        return Ran(one, outbox)


async def start(send: Send, status: int = 200, headers: list[tuple[bytes, bytes]] = EVENTS) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def piece(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def test_the_application_sees_the_rewritten_body_and_the_attempt() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["path"], await receive(), current_attempt.get().key))
        await start(send, headers=JSON)
        await piece(send, b'{"model":"ad_x"}', more=False)

    result = await ran(app, stream=False)
    path, message, key = seen[0]
    assert (path, key) == ("/v1/chat/completions", ("q", 1))
    assert b'"model":"ad_x"' in message["body"]
    assert result.frames[1].data == b'{"model":"tone@3"}'
    assert result.kinds == [FrameKind.HEAD, FrameKind.BODY, FrameKind.END]


async def test_a_streams_head_waits_for_admission_even_when_the_application_speaks_first() -> None:
    admit, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        await piece(send, b"event: response.created\n\n")
        told.set()
        await admit.wait()
        current_attempt.get().admitted.set()
        await piece(send, b"data: 1\n\n")
        await piece(send, b"", more=False)

    async with answering(app) as (one, outbox), asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await told.wait()
        assert not one.stream.kept
        admit.set()
        await until(running.done)
        assert [frame.data for frame in one.stream.kept if frame.kind is FrameKind.BODY] == [b"event: response.created\n\n", b"data: 1\n\n"]
        assert outbox.unacknowledged() == 1


async def test_a_refusal_replaces_whatever_the_application_says_with_its_own_error() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        attempt = current_attempt.get()
        attempt.refusal = Overloaded("too many", asked=1, held=2, allowed=2, retry_after_s=3.0)
        await piece(send, b'data: {"error": "internal"}\n\n')
        await piece(send, b"data: [DONE]\n\n", more=False)

    result = await ran(app)
    assert result.kinds == [FrameKind.ERROR]
    error = decode_error(result.frames[0].data)
    assert (error.code, error.fields["retry_after_s"]) == ("overloaded", 3.0)
    assert result.outcome == "error:overloaded"


async def test_a_stream_of_nothing_but_its_end_is_an_empty_answer() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_attempt.get().admitted.set()
        await start(send)
        await piece(send, b"data: [DONE]\n\n")
        await piece(send, b"", more=False)

    assert (await ran(app)).error == "empty_answer"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_application_that_says_nothing_is_an_empty_answer(stream: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    result = await ran(app, stream=stream)
    assert result.kinds == [FrameKind.ERROR]
    assert result.error == "empty_answer"


async def test_an_answer_that_breaks_off_is_an_error_and_no_end() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        current_attempt.get().admitted.set()
        await start(send)
        await piece(send, b"data: 1\n\n")

    result = await ran(app)
    assert result.kinds == [FrameKind.HEAD, FrameKind.BODY, FrameKind.ERROR]
    assert result.error == "engine_error"


async def test_an_exceptions_text_stays_here() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("the prompt was: my secret")

    result = await ran(app)
    assert result.error == "engine_error"
    assert b"secret" not in result.frames[-1].data


async def test_a_timeout_of_the_applications_own_is_not_the_requests_deadline() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError

    assert (await ran(app)).error == "engine_error"


async def test_an_abort_shows_a_disconnect_before_it_cancels() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        seen.append((await receive())["type"])

    async with answering(app) as (one, _), asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await asyncio.sleep(0)
        one.abort(Draining("over"))
        await until(running.done)
        assert seen == ["http.disconnect"]
        assert one.outcome == "error:adapter_draining"


async def test_an_application_that_ignores_the_disconnect_is_cancelled() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async with answering(app) as (one, outbox), asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await asyncio.sleep(0)
        one.abort(Cancelled("gone"), "client_gone")
        await until(running.done, timeout_s=2)
        assert one.outcome == "cancelled:client_gone"
        assert outbox.kept_bytes == 0, "nobody wants a cancelled attempt's frames"


async def test_what_the_application_says_after_an_abort_goes_nowhere() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        await start(send)
        await piece(send, b"late", more=False)

    async with answering(app) as (one, _), asyncio.TaskGroup() as group:
        running = group.create_task(one.run())
        await asyncio.sleep(0)
        one.abort(Draining("over"))
        await until(running.done)
        assert [frame.kind for frame in one.stream.kept] == [FrameKind.ERROR]


async def test_an_attempt_aborted_before_it_ran_never_reaches_the_application() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("reached")

    async with answering(app) as (one, _):
        one.abort(Draining("over"))
        await one.run()
        assert one.outcome == "error:adapter_draining"


async def test_a_spent_budget_reaches_no_token() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    result = await ran(app, budget_s=-1.0)
    assert result.error == "deadline_exceeded"


async def test_the_head_carries_status_type_and_retry_after_and_nothing_else() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = [
            (b"Content-Type", b"text/plain"),
            (b"Retry-After", b"7"),
            (b"server", b"vllm"),
            (b"set-cookie", b"x"),
        ]
        message: MutableMapping[str, Any] = {"type": "http.response.start", "status": 503, "headers": headers}
        await send(message)
        await piece(send, b"busy", more=False)

    result = await ran(app, stream=False)
    head = decode_head(result.frames[0].data)
    assert (head.status, head.content_type, head.headers) == (503, "text/plain", {"retry-after": "7"})
