"""JetStream Object Store: files in and out by streaming, every byte checked against its digest."""

import asyncio
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import anyio.to_thread
import nats.errors
import nats.js.errors
from nats.js import api
from nats.js.object_store import ObjectStore

from shared.bus.connection import Bus, BusUnavailable
from shared.errors import NotFound, TenantryError

_CHUNK_BYTES = 512 * 1024


class ObjectCorrupt(TenantryError):
    """What was read is not what was expected: expected, got (SHA-256)."""

    code = "object_corrupt"


class _Sink:
    """A file that takes at most so many bytes, whatever the object's own description claims; every write is a sign of life."""

    def __init__(self, file: BinaryIO, name: str, limit_bytes: int, alive: Callable[[], None]) -> None:
        self._file = file
        self._name = name
        self._left_bytes = limit_bytes or sys.maxsize
        self._limit_bytes = limit_bytes
        self._alive = alive

    def write(self, piece: bytes) -> None:
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            raise _too_big(self._name, self._limit_bytes - self._left_bytes, self._limit_bytes)
        self._file.write(piece)
        self._alive()


def _too_big(name: str, asked_bytes: int, limit_bytes: int) -> ObjectCorrupt:
    return ObjectCorrupt(
        f"object {name} has {asked_bytes} bytes or more, the limit is {limit_bytes}", asked_bytes=asked_bytes, limit_bytes=limit_bytes
    )


class Objects:
    """One bucket, made by `open_objects`."""

    def __init__(self, bus: Bus, name: str, inner: ObjectStore) -> None:
        self.name = name
        self._bus = bus
        self._inner = inner

    async def put_file(self, name: str, path: Path) -> None:
        """Stores the file; overwrites an object of that name.

        :raises BusUnavailable: not stored whole.
        """
        options = api.ObjectMetaOptions(max_chunk_size=_CHUNK_BYTES)
        try:
            with path.open("rb") as file:
                await self._inner.put(name, file, meta=api.ObjectMeta(name=name, options=options))
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} was not stored: {error}", retry_after_s=1.0) from error

    async def get_file(self, name: str, path: Path, sha256: str = "", limit_bytes: int = 0, stall_s: float = 20.0) -> int:
        """Writes the object to `path`, returns its bytes. What a tenant wrote is not trusted: no links, no more than limit_bytes.

        :raises NotFound: no such object.
        :raises ObjectCorrupt: its SHA-256 is not `sha256` (when given) or not its own, it is too big, or a link to another object.
        :raises BusUnavailable: not read whole, or no byte came in stall_s.
        """
        loop = asyncio.get_running_loop()
        try:
            info = await self._inner.get_info(name)
            if info.is_link():
                raise ObjectCorrupt(f"object {name} is a link to another object; only an object's own bytes are read", object=name)
            if limit_bytes and info.size is not None and info.size > limit_bytes:
                raise _too_big(name, info.size, limit_bytes)
            with path.open("wb") as file:
                async with asyncio.timeout(stall_s) as deadline:

                    def alive() -> None:
                        loop.call_soon_threadsafe(lambda: deadline.expired() or deadline.reschedule(loop.time() + stall_s))

                    sink = _Sink(file, name, limit_bytes, alive)
                    await self._inner.get(name, writeinto=sink)  # pyright: ignore[reportArgumentType]  (only write is called)
        except nats.js.errors.DigestMismatchError as error:
            raise ObjectCorrupt(f"object {name} does not match its own digest", object=name) from error
        except (
            nats.js.errors.ObjectNotFoundError,
            nats.js.errors.ObjectDeletedError,
            nats.js.errors.NotFoundError,
        ) as error:
            raise NotFound(f"there is no object {name} in {self.name}", object=name) from error
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be read: {error}", retry_after_s=1.0) from error
        got = await anyio.to_thread.run_sync(_sha256, path)
        if sha256 and got != sha256:
            raise ObjectCorrupt(f"object {name} is not what was stored", expected=sha256, got=got)
        return path.stat().st_size

    async def delete(self, name: str) -> None:
        """Idempotent."""
        try:
            await self._inner.delete(name)
        except (nats.js.errors.ObjectNotFoundError, nats.js.errors.ObjectDeletedError, nats.js.errors.NotFoundError):
            return
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be deleted: {error}", retry_after_s=1.0) from error

    async def names(self) -> list[str]:
        try:
            return sorted(info.name for info in await self._inner.list() if not info.deleted)
        except nats.js.errors.NotFoundError:
            return []
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"objects of {self.name} cannot be listed: {error}", retry_after_s=1.0) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def open_objects(bus: Bus, name: str, *, create: bool = False) -> Objects:
    """:raises BusUnavailable: it does not exist (yet), or no answer."""
    try:
        if create:
            try:
                inner = await bus.js.create_object_store(name, config=api.ObjectStoreConfig(storage=api.StorageType.FILE))
            except nats.js.errors.BadRequestError:
                inner = await bus.js.object_store(name)
        else:
            inner = await bus.js.object_store(name)
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"object bucket {name} is not there: {error}", retry_after_s=1.0) from error
    return Objects(bus, name, inner)
