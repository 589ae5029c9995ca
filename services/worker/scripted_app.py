"""The scripted engine's OpenAI application: chat and text completions, streaming or not, by rule."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from services.worker.engine import Receive, Scope, Send
from services.worker.governor import Attempt, Governor, current_attempt

DEFAULT_TOKENS = 16
_WORDS = ("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "haven")
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_DONE = b"data: [DONE]\n\n"


class _Message(msgspec.Struct, kw_only=True):
    role: str = "user"
    content: str | list[dict[str, Any]] | None = ""


class _StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_Message] = []
    prompt: str | list[str] = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def text(self) -> str:
        if not self.messages:
            return self.prompt if isinstance(self.prompt, str) else "\n".join(self.prompt)
        return "\n".join(_content(message) for message in self.messages)


_decode = msgspec.json.Decoder(_Body).decode


def tokens_of(digest: str, prompt: str, count: int) -> list[str]:
    """The answer's tokens, which joined are its text. `digest` is of the adapter's files, or the base's own."""
    seed = hashlib.sha256(f"{digest}|{prompt}".encode()).digest()
    return [("" if i == 0 else " ") + _WORDS[(seed[i % 32] + i // 32) % len(_WORDS)] for i in range(count)]


class ScriptedApp:
    """An ASGI callable. `adapters` is the engine's own table, looked at for every request."""

    def __init__(
        self,
        governor: Governor,
        adapters: Mapping[str, str],
        *,
        base_model_name: str,
        base_digest: str,
        tokens_per_s: float,
        concurrency: int,
    ) -> None:
        self._governor = governor
        self._adapters = adapters
        self._base_model_name = base_model_name
        self._base_digest = base_digest
        self._turns = asyncio.Semaphore(concurrency)
        self._step_s = 1.0 / tokens_per_s if tokens_per_s > 0 else 0.0
        self._step: asyncio.Event | None = None
        self._loop = asyncio.get_running_loop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        path: str = scope["path"]
        if path not in ("/v1/chat/completions", "/v1/completions"):
            await _error(send, 404, f"no such path: {path}")
            return
        try:
            request = _decode(body)
        except msgspec.MsgspecError as error:
            await _error(send, 400, str(error))
            return
        prompt = request.text()
        if "[[bad]]" in prompt:
            await _error(send, 400, "the prompt asks to be refused")
            return
        adapter_id = "" if request.model == self._base_model_name else request.model
        if adapter_id and adapter_id not in self._adapters:
            await _error(send, 404, f"the model {request.model} does not exist")
            return
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_until_disconnect(receive))
            answering = group.create_task(self._answer(request, path.endswith("chat/completions"), prompt, adapter_id, send))
            await asyncio.wait((listening, answering), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            answering.cancel()

    async def _answer(self, request: _Body, is_chat: bool, prompt: str, adapter_id: str, send: Send) -> None:
        if "[[empty]]" in prompt:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS if request.stream else _JSON})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        attempt = current_attempt.get()
        count = request.max_completion_tokens or request.max_tokens or DEFAULT_TOKENS
        shape = _Shape(request, attempt, is_chat)
        if request.stream:
            await self._stream(request, shape, prompt, adapter_id, count, send)
        else:
            texts: list[str] = []
            for index in range(request.n or 1):
                texts.append("".join([token async for token in self._generate(attempt, prompt, adapter_id, count, index)]))
            await send({"type": "http.response.start", "status": 200, "headers": _JSON})
            await send({"type": "http.response.body", "body": shape.whole(texts, prompt, count), "more_body": False})

    async def _stream(self, request: _Body, shape: "_Shape", prompt: str, adapter_id: str, count: int, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        for index in range(request.n or 1):
            async with aclosing(self._generate(shape.attempt, prompt, adapter_id, count, index)) as tokens:
                async for token in tokens:
                    await send({"type": "http.response.body", "body": shape.piece(index, token), "more_body": True})
            await send({"type": "http.response.body", "body": shape.last_piece(index), "more_body": True})
        if "[[cut]]" in prompt:
            return
        if request.stream_options is not None and request.stream_options.include_usage:
            await send({"type": "http.response.body", "body": shape.usage_piece(prompt, count), "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _generate(self, attempt: Attempt, prompt: str, adapter_id: str, count: int, index: int) -> AsyncGenerator[str, None]:
        """One sample's tokens, as an engine behind the governor makes them."""
        if "[[other]]" in prompt:
            adapter_id = ""
        self._governor.check_handle(attempt, adapter_id)
        prompt_tokens = len(prompt.split()) if index == 0 else 0
        await self._governor.admit(attempt, prompt_tokens, count, 1, self._loop.time())
        async with self._turns:
            digest = self._adapters[adapter_id] if adapter_id else self._base_digest
            for position, token in enumerate(tokens_of(digest, prompt, count)):
                if "[[hang]]" in prompt:
                    await asyncio.Event().wait()
                await self._next_step()
                if "[[fail]]" in prompt and position == count // 2:
                    raise RuntimeError("the prompt asks for a fault")
                self._governor.count(attempt, completion_tokens=1, cached_tokens=0, now_s=self._loop.time())
                yield token

    async def _next_step(self) -> None:
        """All streams get their tokens together, as from an engine's step."""
        if not self._step_s:
            await asyncio.sleep(0)
            return
        if self._step is None:
            self._step = asyncio.Event()
            self._loop.call_later(self._step_s, self._end_step)
        await self._step.wait()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.set()


class _Shape:
    """JSON of one answer, as vLLM writes it. Pieces come from templates: they are the hot path of load tests."""

    def __init__(self, request: _Body, attempt: Attempt, is_chat: bool) -> None:
        self.attempt = attempt
        self._model = request.model
        self._is_chat = is_chat
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._id = f"{prefix}-{attempt.request_id}-{attempt.attempt}"
        self._kind = "chat.completion" if is_chat else "text_completion"
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._chunk = f'data: {{"id":"{self._id}","object":"{kind}","created":0,"model":"{self._model}","choices":[{{"index":'

    def piece(self, index: int, token: str) -> bytes:
        said = f'"delta":{{"content":"{token}"}}' if self._is_chat else f'"text":"{token}"'
        return f'{self._chunk}{index},{said},"logprobs":null,"finish_reason":null}}]}}\n\n'.encode()

    def last_piece(self, index: int) -> bytes:
        said = '"delta":{}' if self._is_chat else '"text":""'
        return f'{self._chunk}{index},{said},"logprobs":null,"finish_reason":"length"}}]}}\n\n'.encode()

    def usage_piece(self, prompt: str, count: int) -> bytes:
        usage = msgspec.json.encode(_usage(prompt, count)).decode()
        return f'{self._chunk.rsplit("[", 1)[0]}[],"usage":{usage}}}'.encode() + b"\n\n"

    def whole(self, texts: list[str], prompt: str, count: int) -> bytes:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": "length"}
            if self._is_chat
            else {"index": i, "text": text, "logprobs": None, "finish_reason": "length"}
            for i, text in enumerate(texts)
        ]
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": self._kind,
                "created": 0,
                "model": self._model,
                "choices": choices,
                "usage": _usage(prompt, count * len(texts)),
            }
        )


def _usage(prompt: str, completion_tokens: int) -> dict[str, int]:
    prompt_tokens = len(prompt.split())
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


def _content(message: _Message) -> str:
    if isinstance(message.content, list):
        return "".join(str(part.get("text", "")) for part in message.content)
    return message.content or ""


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _error(send: Send, status: int, message: str) -> None:
    body = msgspec.json.encode({"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}})
    await send({"type": "http.response.start", "status": status, "headers": _JSON})
    await send({"type": "http.response.body", "body": body, "more_body": False})
