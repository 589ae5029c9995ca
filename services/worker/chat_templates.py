"""Adapters' own chat templates, each rendered in a process of its own.

A template is a tenant's program, and one adapter is the fault domain.
"""

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from services.worker import template_child
from shared.errors import LoadFailed

MAX_TEMPLATE_BYTES = 64 * 1024
RENDER_LIMIT_S = 3
_LINE_LIMIT = 64 * 1024 * 1024

_SAMPLE = [{"role": "user", "content": "hello"}]
_encode = msgspec.json.Encoder(enc_hook=str).encode


class TemplateError(ValueError):
    """The template cannot render this conversation; the message is for its tenant. vLLM answers a ValueError with 400."""


class _Rendered(msgspec.Struct):
    text: str = ""
    error: str = ""


_decode = msgspec.json.Decoder(_Rendered).decode


class OwnTemplate:
    """One adapter's. Its process is started when first needed and again after it died. One conversation at a time."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    async def render(self, messages: list[Any], tools: list[Any] | None, variables: dict[str, Any]) -> str:
        """:raises TemplateError: it raises, takes too long or too much memory."""
        async with self._one_at_a_time:
            try:
                if self._process is None:
                    await self._start()
                return await self._ask({"messages": messages, "tools": tools, "variables": variables})
            except TemplateError:
                raise
            except BaseException as error:
                await self._end()
                if isinstance(error, TimeoutError | OSError | EOFError | msgspec.DecodeError):
                    raise TemplateError(
                        f"the adapter's chat template took more than {RENDER_LIMIT_S} s or "
                        f"{template_child.MEMORY_BYTES >> 20} MiB for this conversation"
                    ) from error
                raise

    async def close(self) -> None:
        async with self._one_at_a_time:
            await self._end()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            template_child.__file__,
            str(RENDER_LIMIT_S),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            limit=_LINE_LIMIT,
            start_new_session=True,
        )
        try:
            await self._ask({"template": self.source})
        except TemplateError:
            await self._end()
            raise

    async def _ask(self, request: dict[str, Any]) -> str:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        async with asyncio.timeout(RENDER_LIMIT_S + 2):
            self._process.stdin.write(_encode(request) + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        rendered = _decode(line)
        if rendered.error:
            raise TemplateError(f"the adapter's chat template refuses this conversation: {rendered.error}")
        return rendered.text

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # pyright: ignore  the pipe to a killed child is not closed by wait()


class ChatTemplates:
    """By adapter_id, only those that have one."""

    def __init__(self) -> None:
        self._own: dict[str, OwnTemplate] = {}

    def find(self, adapter_id: str) -> OwnTemplate | None:
        return self._own.get(adapter_id)

    async def add(self, adapter_id: str, source: str) -> None:
        """:raises LoadFailed: it does not compile, or cannot render a single question."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise LoadFailed(f"the chat template has more than {MAX_TEMPLATE_BYTES} bytes", reason="bad_chat_template")
        own = OwnTemplate(source)
        try:
            await own.render(_SAMPLE, None, {"add_generation_prompt": True, "bos_token": "", "eos_token": ""})
        except TemplateError as error:
            await own.close()
            raise LoadFailed(str(error), reason="bad_chat_template") from error
        self._own[adapter_id] = own

    async def remove(self, adapter_id: str) -> None:
        own = self._own.pop(adapter_id, None)
        if own is not None:
            await own.close()

    async def close(self) -> None:
        for adapter_id in list(self._own):
            await self.remove(adapter_id)
