"""JetStream Object Store: files in and out by streaming, every byte checked against its digest."""

import asyncio
import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.object_store import ObjectStore

from shared.bus.connection import Bus, BusUnavailable
from shared.errors import NotFound, TenantryError

_CHUNK_BYTES = 512 * 1024
_FETCH = 64  # chunks in one pull
_LOOK_S = 1.0  # nothing has come for this long: is there anything left?
_CLIENT_CHUNK_BYTES = 128 * 1024  # what NATS clients cut objects into unless told otherwise
_CHUNK_SLACK_BYTES = 8 * 1024


class ObjectCorrupt(TenantryError):
    """What was read is not what was expected: expected, got (SHA-256)."""

    code = "object_corrupt"


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
        disconnects = self._bus.disconnects
        try:
            return await self._get(name, path, sha256, limit_bytes, stall_s)
        except ObjectCorrupt as error:
            if self._bus.disconnects == disconnects or "limit_bytes" in error.fields:
                raise
            raise BusUnavailable(f"object {name}: the connection was lost while it was read", retry_after_s=1.0) from error

    async def _get(self, name: str, path: Path, sha256: str, limit_bytes: int, stall_s: float) -> int:
        try:
            info = await self._inner.get_info(name)
            if info.is_link():
                raise ObjectCorrupt(f"object {name} is a link to another object; only an object's own bytes are read", object=name)
            size_bytes = info.size or 0
            if limit_bytes and size_bytes > limit_bytes:
                raise _too_big(name, size_bytes, limit_bytes)
            got = await self._read_chunks(info.nuid or "", name, path, size_bytes, stall_s)
        except (
            nats.js.errors.ObjectNotFoundError,
            nats.js.errors.ObjectDeletedError,
            nats.js.errors.NotFoundError,
        ) as error:
            raise NotFound(f"there is no object {name} in {self.name}", object=name) from error
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be read: {error}", retry_after_s=1.0) from error
        own = _own_digest(info.digest or "")
        if got != own:
            raise ObjectCorrupt(f"object {name} does not match its own digest", object=name, expected=own, got=got)
        if sha256 and got != sha256:
            raise ObjectCorrupt(f"object {name} is not what was stored", expected=sha256, got=got)
        return size_bytes

    async def _read_chunks(self, nuid: str, name: str, path: Path, size_bytes: int, stall_s: float) -> str:
        """The chunks in order, at most size_bytes of them, by a pull consumer of our own; returns their SHA-256 in hex.

        nats-py's own reader asks the server for the names of all streams and copies what it has at every chunk.
        """
        digest = hashlib.sha256()
        left_bytes = size_bytes
        config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE, inactive_threshold=60.0, mem_storage=True, num_replicas=1)
        stream = f"OBJ_{self.name}"
        subscription = await self._bus.js.pull_subscribe(f"$O.{self.name}.C.{nuid}", stream=stream, config=config)
        try:
            with path.open("wb") as file:
                while left_bytes > 0:
                    for chunk in await self._some(subscription, name, left_bytes, stall_s):
                        left_bytes -= len(chunk.data)
                        if left_bytes < 0:
                            raise _too_big(name, size_bytes - left_bytes, size_bytes)
                        digest.update(chunk.data)
                        file.write(chunk.data)
        finally:
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError):
                await self._bus.js.delete_consumer(stream, (await subscription.consumer_info()).name)
                await subscription.unsubscribe()
        return digest.hexdigest()

    async def _some(self, subscription: JetStreamContext.PullSubscription, name: str, left_bytes: int, stall_s: float) -> list[Msg]:
        """The next chunks. An object that ends before its description says is told apart from a bus that is slow."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + stall_s
        while True:
            try:
                return await subscription.fetch(min(_FETCH, -(-left_bytes // _CHUNK_BYTES)), timeout=min(stall_s, _LOOK_S))
            except (nats.errors.TimeoutError, TimeoutError):
                if not (await subscription.consumer_info()).num_pending:
                    raise ObjectCorrupt(f"object {name} ends {left_bytes} bytes before its description says", object=name) from None
                if loop.time() >= give_up_at_s:
                    raise

    async def digest(self, name: str) -> str:
        """The SHA-256 in hex that the object's description says; "" if there is no such object.

        :raises BusUnavailable: no answer.
        """
        try:
            return _own_digest((await self._inner.get_info(name)).digest or "")
        except (nats.js.errors.ObjectNotFoundError, nats.js.errors.ObjectDeletedError, nats.js.errors.NotFoundError):
            return ""
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be looked at: {error}", retry_after_s=1.0) from error

    async def revision(self, name: str) -> int:
        """Grows with everything put or deleted under the name; 0: there is no such object."""
        try:
            return (await self._bus.js.get_last_msg(f"OBJ_{self.name}", self._description(name))).seq or 0
        except nats.js.errors.NotFoundError:
            return 0
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be looked at: {error}", retry_after_s=1.0) from error

    async def delete_revision(self, name: str, revision: int) -> bool:
        """Whether it was deleted: not where another object has taken the name since.

        :raises BusUnavailable: no answer.
        """
        subject = self._description(name)
        try:
            info = await self._inner.get_info(name)
            gone = {**info.as_dict(), "deleted": True, "size": 0, "chunks": 0, "digest": ""}
            headers: dict[str, Any] = {"Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": str(revision)}
            await self._bus.js.publish(subject, json.dumps(gone).encode(), headers=headers)
            await self._bus.js.purge_stream(f"OBJ_{self.name}", subject=f"$O.{self.name}.C.{info.nuid}")
        except (nats.js.errors.ObjectNotFoundError, nats.js.errors.NotFoundError, nats.js.errors.BadRequestError):
            return False
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"object {name} cannot be deleted: {error}", retry_after_s=1.0) from error
        return True

    def _description(self, name: str) -> str:
        return f"$O.{self.name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

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


def _own_digest(text: str) -> str:
    """The SHA-256 in hex that an object's own description claims; "" if it is unreadable."""
    try:
        return base64.urlsafe_b64decode(text.removeprefix("SHA-256=")).hex()
    except ValueError:
        return ""


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


async def limit_objects(bus: Bus, name: str, limit_bytes: int) -> None:
    """The bucket holds about limit_bytes at most, in chunks as clients make them; what goes beyond is refused to whoever writes it.

    By number and size of messages: the server sets a stream's max_bytes aside from its disk whether it is used or not.

    :raises BusUnavailable: no answer, or the server refuses.
    """
    try:
        config = (await bus.js.stream_info(f"OBJ_{name}")).config
        max_msgs, max_msg_size = max(2, limit_bytes // _CLIENT_CHUNK_BYTES), _CLIENT_CHUNK_BYTES + _CHUNK_SLACK_BYTES
        if (config.max_msgs, config.max_msg_size) != (max_msgs, max_msg_size):
            await bus.js.update_stream(config, max_msgs=max_msgs, max_msg_size=max_msg_size)
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"object bucket {name} cannot be limited: {error}", retry_after_s=1.0) from error


async def delete_objects(bus: Bus, name: str) -> None:
    """The bucket and all in it. Idempotent.

    :raises BusUnavailable: no answer.
    """
    try:
        await bus.js.delete_object_store(name)
    except nats.js.errors.NotFoundError:
        return
    except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"object bucket {name} cannot be deleted: {error}", retry_after_s=1.0) from error
