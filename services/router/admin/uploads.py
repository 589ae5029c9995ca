"""An uploaded archive on its way into the staging bucket: streamed to a file under a size limit, staged only when whole."""

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from shutil import copyfileobj
from typing import BinaryIO

import anyio.to_thread
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from services.router.asgi import Event
from shared.bus import Bus, open_objects
from shared.contracts.adapters import STAGING_BUCKET
from shared.errors import BodyTooLarge, Cancelled, InvalidRequest


class Upload:
    """`path` is None when the request carried no archive."""

    def __init__(self, path: Path | None, fields: dict[str, str]) -> None:
        self.path = path
        self.fields = fields


@asynccontextmanager
async def received(request: Request, limit_bytes: int) -> AsyncGenerator[Upload]:
    """The request's archive as a file of our own, and a form's other fields; both gone at the end.

    The archive is the form's `file`, or the whole body of any other content type.

    :raises BodyTooLarge: over limit_bytes, declared or actual.
    :raises Cancelled: cut off in the middle.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(int(declared), limit_bytes)
    _limit(request, limit_bytes)
    with tempfile.TemporaryDirectory(prefix="tenantry-upload-") as folder:
        path = Path(folder) / "archive"
        try:
            if request.headers.get("content-type", "").startswith("multipart/form-data"):
                upload = await _form(request, path)
            else:
                upload = await _raw(request, path)
        except ClientDisconnect as error:
            raise Cancelled("the upload was cut off; nothing was kept") from error
        yield upload


async def stage(bus: Bus, path: Path) -> str:
    """The name under which the staging bucket holds the file now."""
    objects = await open_objects(bus, STAGING_BUCKET)
    name = "up_" + token_hex(16)
    await objects.put_file(name, path)
    return name


async def unstage(bus: Bus, name: str) -> None:
    objects = await open_objects(bus, STAGING_BUCKET)
    await objects.delete(name)


async def _form(request: Request, path: Path) -> Upload:
    async with request.form(max_files=1, max_fields=32) as form:
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        file = form.get("file")
        if not isinstance(file, UploadFile):
            if any(isinstance(value, UploadFile) for value in form.values()):
                raise InvalidRequest("the archive must be the form's field `file`", param="file")
            return Upload(None, fields)
        await anyio.to_thread.run_sync(_copy, file.file, path)
    return Upload(path, fields)


async def _raw(request: Request, path: Path) -> Upload:
    read_bytes = 0
    with path.open("wb") as file:
        async for piece in request.stream():
            read_bytes += len(piece)
            await anyio.to_thread.run_sync(file.write, piece)
    return Upload(path if read_bytes else None, {})


def _copy(source: BinaryIO, path: Path) -> None:
    with path.open("wb") as target:
        copyfileobj(source, target, 1 << 20)


def _limit(request: Request, limit_bytes: int) -> None:
    """Counts what comes in, whoever reads it."""
    inner = request.receive
    read_bytes = 0

    async def counted() -> Event:
        nonlocal read_bytes
        event = await inner()
        read_bytes += len(event.get("body", b""))
        if read_bytes > limit_bytes:
            raise _too_large(read_bytes, limit_bytes)
        return event

    request._receive = counted  # pyright: ignore[reportPrivateUsage]


def _too_large(asked_bytes: int, limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the upload is larger than {limit_bytes} bytes", asked_bytes=asked_bytes, limit_bytes=limit_bytes)
