"""The scripted engine's OpenAI application: chat and text completions and messages, streaming or not, and embeddings, by rule."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from services.worker.engine import Receive, Scope, Send
from services.worker.governor import Attempt, Governor, current_attempt
from services.worker.scripted_steps import Sequence, Stepper

DEFAULT_TOKENS = 16
SLOW_S = 1.5
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
    input: str | list[str] = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def texts(self) -> list[str]:
        """One per prompt."""
        if self.messages:
            return ["\n".join(_content(message) for message in self.messages)]
        asked = self.prompt or self.input
        return [asked] if isinstance(asked, str) else asked


Take = Callable[[int, str], Awaitable[None]]  # (choice, token)

_decode = msgspec.json.Decoder(_Body).decode


def tokens_of(digest: str, prompt: str, count: int) -> list[str]:
    """The answer's tokens, which joined are its text. `digest` is of the adapter's files, or the base's own."""
    seed = hashlib.sha256(f"{digest}|{prompt}".encode()).digest()
    return [("" if i == 0 else " ") + _WORDS[(seed[i % 32] + i // 32) % len(_WORDS)] for i in range(count)]


class ScriptedApp:
    """An ASGI callable. `adapters` and `faults` are the engine's own tables, looked at for every request."""

    def __init__(
        self,
        governor: Governor,
        adapters: Mapping[str, str],
        faults: Mapping[str, str],
        *,
        base_model_name: str,
        base_digest: str,
        tokens_per_s: float,
        concurrency: int,
        stepper: Stepper | None,
    ) -> None:
        self._governor = governor
        self._adapters = adapters
        self._faults = faults
        self._base_model_name = base_model_name
        self._base_digest = base_digest
        self._turns = asyncio.Semaphore(concurrency)
        self._step_s = 1.0 / tokens_per_s if tokens_per_s > 0 else 0.0
        self._step: asyncio.Event | None = None
        self._stepper = stepper
        self._loop = asyncio.get_running_loop()
        self._calls = itertools.count(1)
        self._adapter_numbers: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        path: str = scope["path"]
        if path not in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"):
            await _error(send, 404, f"no such path: {path}")
            return
        try:
            request = _decode(body)
        except msgspec.MsgspecError as error:
            await _error(send, 400, str(error))
            return
        prompts = request.texts()
        if any("[[bad]]" in prompt for prompt in prompts):
            await _error(send, 400, "the prompt asks to be refused")
            return
        adapter_id = "" if request.model == self._base_model_name else request.model
        if adapter_id and adapter_id not in self._adapters:
            await _error(send, 404, f"the model {request.model} does not exist")
            return
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(_until_disconnect(receive))
            answering = group.create_task(self._answer(request, path, prompts, adapter_id, send))
            await asyncio.wait((listening, answering), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            answering.cancel()

    async def _answer(self, request: _Body, path: str, prompts: list[str], adapter_id: str, send: Send) -> None:
        if any("[[empty]]" in prompt for prompt in prompts):
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS if request.stream else _JSON})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        count = request.max_completion_tokens or request.max_tokens or DEFAULT_TOKENS
        if path == "/v1/embeddings":
            await self._embed(prompts, adapter_id, send)
            return
        shape = (_MessageShape if path == "/v1/messages" else _Shape)(request, current_attempt.get(), path == "/v1/chat/completions")
        if request.stream:
            await self._stream(request, shape, prompts, adapter_id, count, send)
            return
        texts: dict[int, list[str]] = {}

        async def keep(index: int, token: str) -> None:
            texts.setdefault(index, []).append(token)

        await self._generate_all(request, shape.attempt, prompts, adapter_id, count, keep)
        whole = shape.whole(["".join(texts[index]) for index in sorted(texts)], prompts, sum(map(len, texts.values())))
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    async def _embed(self, prompts: list[str], adapter_id: str, send: Send) -> None:
        """Every prompt is read, nothing is made."""
        attempt = current_attempt.get()

        async def one(prompt: str) -> None:
            async with aclosing(self._generate(attempt, prompt, adapter_id, 0, 1)) as nothing:
                async for _ in nothing:
                    pass

        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(prompt))
        data = [{"object": "embedding", "index": index, "embedding": [0.5, -0.5]} for index in range(len(prompts))]
        whole = msgspec.json.encode({"object": "list", "data": data, "usage": _usage(prompts, 0)})
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    async def _stream(self, request: _Body, shape: "_Shape", prompts: list[str], adapter_id: str, count: int, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        made = 0
        if len(prompts) == 1:  # spares the load tests a call per token
            async with aclosing(self._generate(shape.attempt, prompts[0], adapter_id, count, request.n or 1)) as tokens:
                async for index, token in tokens:
                    made += 1
                    await send({"type": "http.response.body", "body": shape.piece(index, token), "more_body": True})
        else:

            async def pass_on(index: int, token: str) -> None:
                nonlocal made
                made += 1
                await send({"type": "http.response.body", "body": shape.piece(index, token), "more_body": True})

            await self._generate_all(request, shape.attempt, prompts, adapter_id, count, pass_on)
        for index in range(len(prompts) * (request.n or 1)):
            await send({"type": "http.response.body", "body": shape.last_piece(index), "more_body": True})
        if any("[[cut]]" in prompt for prompt in prompts):
            return
        if request.stream_options is not None and request.stream_options.include_usage:
            await send({"type": "http.response.body", "body": shape.usage_piece(prompts, made), "more_body": True})
        await send({"type": "http.response.body", "body": shape.end, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _generate_all(self, request: _Body, attempt: Attempt, prompts: list[str], adapter_id: str, count: int, take: Take) -> None:
        """Every prompt is one call of the engine, all at once."""
        samples = request.n or 1

        async def one(number: int, prompt: str) -> None:
            async with aclosing(self._generate(attempt, prompt, adapter_id, count, samples)) as tokens:
                async for sample, token in tokens:
                    await take(number * samples + sample, token)

        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                group.create_task(one(number, prompt))

    async def _generate(
        self, attempt: Attempt, prompt: str, adapter_id: str, count: int, samples: int
    ) -> AsyncGenerator[tuple[int, str], None]:
        """(sample, token) of one prompt, as an engine behind the governor makes them."""
        if "[[other]]" in prompt:
            adapter_id = ""
        faults = prompt + self._faults.get(adapter_id, "")
        self._governor.check_handle(attempt, adapter_id)
        call = await self._governor.admit(attempt, prompt_tokens_of(prompt), count, samples, self._loop.time())
        digest = self._adapters[adapter_id] if adapter_id else self._base_digest
        words = tokens_of(digest, prompt, call.max_tokens)
        name = f"{attempt.request_id}-{attempt.attempt}-{next(self._calls)}"
        sequences = self._sequences(name, attempt, prompt, max(1, call.max_tokens), samples, adapter_id)
        try:
            async with self._turns:
                if not count:
                    await self._next_step(sequences)
                for position, word in enumerate(words):
                    if "[[hang]]" in faults:
                        await asyncio.Event().wait()
                    if "[[slow]]" in faults and not position:
                        await asyncio.sleep(SLOW_S)
                    await self._next_step(sequences)
                    if "[[fail]]" in faults and position == count // 2:
                        raise RuntimeError("the prompt asks for a fault")
                    self._governor.count(attempt, call, completion_tokens=samples, cached_tokens=0, now_s=self._loop.time())
                    for sample in range(samples):
                        yield sample, word
        finally:
            for sequence in sequences:
                assert self._stepper is not None
                self._stepper.remove(sequence)
            self._governor.steps.close(name, round(self._loop.time() * 1e9))
            self._governor.leave(call)

    def _sequences(self, name: str, attempt: Attempt, prompt: str, count: int, samples: int, adapter_id: str) -> list[Sequence]:
        """In the stepper, named as vLLM names them."""
        if self._stepper is None:
            return []
        self._governor.steps.open(name, attempt, samples)
        adapter = self._adapter_numbers.setdefault(adapter_id, len(self._adapter_numbers) + 1) if adapter_id else 0
        made: list[Sequence] = []
        for sample in range(samples):
            engine_id = f"{sample}_{name}-00000000"
            made.append(
                Sequence(
                    attempt.request_id, attempt.handle.tenant_id, prompt_tokens_of(prompt), count, engine_id=engine_id, adapter=adapter
                )
            )
            self._stepper.submit(made[-1])
        return made

    async def _next_step(self, sequences: list[Sequence]) -> None:
        """All streams get their tokens together, as from an engine's step."""
        if self._stepper is not None:
            for sequence in sequences:
                await self._stepper.token(sequence)
            return
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

    end = _DONE

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

    def usage_piece(self, prompts: list[str], made: int) -> bytes:
        usage = msgspec.json.encode(_usage(prompts, made)).decode()
        return f'{self._chunk.rsplit("[", 1)[0]}[],"usage":{usage}}}'.encode() + b"\n\n"

    def whole(self, texts: list[str], prompts: list[str], made: int) -> bytes:
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
                "usage": _usage(prompts, made),
            }
        )


class _MessageShape(_Shape):
    """Of the Messages API."""

    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

    def piece(self, index: int, token: str) -> bytes:
        delta = f'{{"type":"content_block_delta","index":{index},"delta":{{"type":"text_delta","text":"{token}"}}}}'
        return f"event: content_block_delta\ndata: {delta}\n\n".encode()

    def last_piece(self, index: int) -> bytes:
        return f'event: content_block_stop\ndata: {{"type":"content_block_stop","index":{index}}}\n\n'.encode()

    def whole(self, texts: list[str], prompts: list[str], made: int) -> bytes:
        usage = _usage(prompts, made)
        return msgspec.json.encode(
            {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "model": self._model,
                "content": [{"type": "text", "text": text} for text in texts],
                "stop_reason": "max_tokens",
                "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": made},
            }
        )


def prompt_tokens_of(prompt: str) -> int:
    """Words; `<4000>` stands for as many tokens."""
    if prompt.startswith("<"):
        length = prompt[1 : prompt.find(">")]
        if length.isdigit():
            return int(length)
    return len(prompt.split())


def _usage(prompts: list[str], completion_tokens: int) -> dict[str, int]:
    prompt_tokens = sum(map(prompt_tokens_of, prompts))
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
