"""JetStream KV: one bucket with compare-and-set, and a mirror of a bucket in memory that survives reconnects and silent watches."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
import nats.errors
import nats.js.errors
import structlog
from nats.js import JetStreamContext, api
from nats.js.kv import KeyValue

from shared.bus.connection import Bus, BusUnavailable
from shared.errors import Conflict

log = structlog.get_logger()

_WRONG_LAST_SEQUENCE = 10071
_LIST_STALL_S = 5.0


class Entry(msgspec.Struct, frozen=True):
    """`stamp_s`: when the server stored it, by the server's clock since 1970; of watched entries, and of `Bucket.stamped`."""

    value: bytes
    revision: int
    stamp_s: float = 0.0


class Bucket:
    """Made by `open_bucket`. Revisions are per bucket and grow with every write."""

    def __init__(self, bus: Bus, name: str, inner: KeyValue) -> None:
        self.name = name
        self._bus = bus
        self._inner = inner

    async def get(self, key: str) -> Entry | None:
        """:raises BusUnavailable: no answer."""
        try:
            found = await self._inner.get(key)
        except nats.js.errors.KeyNotFoundError:  # deleted keys too
            return None
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot read {key}: {error}", retry_after_s=1.0) from error
        return Entry(found.value or b"", found.revision or 0)

    async def stamped(self, key: str) -> Entry | None:
        """The same, with its stamp.

        :raises BusUnavailable: no answer.
        """
        try:
            found = await self._bus.js.get_msg(f"KV_{self.name}", subject=f"$KV.{self.name}.{key}", direct=True)
        except nats.js.errors.NotFoundError:
            return None
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot read {key}: {error}", retry_after_s=1.0) from error
        if (found.headers or {}).get("KV-Operation") in {"DEL", "PURGE"}:
            return None
        return Entry(found.data or b"", found.seq or 0, found.time.timestamp() if found.time else 0.0)

    async def create(self, key: str, value: bytes) -> int:
        """Its revision.

        :raises Conflict: the key exists.
        """
        try:
            return await self._inner.create(key, value)
        except nats.js.errors.KeyWrongLastSequenceError as error:
            raise Conflict(f"{key} exists already", key=key) from error
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot write {key}: {error}", retry_after_s=1.0) from error

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """The new revision, if the key still stands at `revision`.

        :raises Conflict: somebody else changed it.
        """
        try:
            return await self._inner.update(key, value, last=revision)
        except nats.js.errors.KeyWrongLastSequenceError as error:
            raise Conflict(f"{key} was changed by somebody else", key=key, revision=revision) from error
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise Conflict(f"{key} was changed by somebody else", key=key, revision=revision) from error
            raise BusUnavailable(f"cannot write {key}: {error}", retry_after_s=1.0) from error
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot write {key}: {error}", retry_after_s=1.0) from error

    async def put(self, key: str, value: bytes) -> int:
        try:
            return await self._inner.put(key, value)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot write {key}: {error}", retry_after_s=1.0) from error

    async def delete(self, key: str, revision: int | None = None) -> None:
        """:raises Conflict: a revision was given and the key has moved on."""
        try:
            await self._inner.delete(key, last=revision)
        except nats.js.errors.KeyWrongLastSequenceError as error:
            raise Conflict(f"{key} was changed by somebody else", key=key) from error
        except nats.js.errors.APIError as error:
            if error.err_code == _WRONG_LAST_SEQUENCE:
                raise Conflict(f"{key} was changed by somebody else", key=key) from error
            raise BusUnavailable(f"cannot delete {key}: {error}", retry_after_s=1.0) from error
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot delete {key}: {error}", retry_after_s=1.0) from error

    async def keys(self, prefix: str = "") -> list[str]:
        """Every key that begins with `prefix`, sorted; a prefix of whole tokens ("pool.") is looked up by the server.

        :raises BusUnavailable: not listed whole.
        """
        found: list[str] = []
        try:
            async with self.watch(f"{prefix}>" if prefix.endswith(".") else ">", values=False, linger_s=1.0) as watch:
                complete = watch.empty
                while not complete:
                    change = await watch.next(_LIST_STALL_S)
                    complete = change.complete
                    if change.entry is not None:
                        found.append(change.key)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusUnavailable(f"cannot list {self.name}: {error}", retry_after_s=1.0) from error
        return sorted(key for key in found if key.startswith(prefix))

    @contextlib.asynccontextmanager
    async def watch(self, keys: str, *, values: bool = True, linger_s: float = 30.0) -> AsyncGenerator["Watch"]:
        """For this package. nats-py's own watch may call a bucket empty whose first values are still on their way.

        A watch on some keys has a name, so that its filter stands in the subject that makes it and permissions can bound it.
        """
        config = api.ConsumerConfig(name=None if keys == ">" else f"watch_{secrets.token_hex(12)}")
        subscription = await self._bus.js.subscribe(
            f"$KV.{self.name}.{keys}",
            stream=f"KV_{self.name}",
            config=config,
            ordered_consumer=True,
            deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
            headers_only=not values,
            inactive_threshold=linger_s,  # the server forgets the consumer this long after we have left
        )
        try:
            info = await subscription.consumer_info()
            sent = info.delivered.consumer_seq if info.delivered else 0
            yield Watch(subscription, f"$KV.{self.name}.", empty=not sent and not info.num_pending)
        finally:
            try:
                await subscription.unsubscribe()
            except (nats.errors.Error, TimeoutError):
                log.debug("watch.stop_failed", bucket=self.name)


class Change(msgspec.Struct, frozen=True):
    """`entry` None: deleted. `complete`: with it, everything that stood when the watch began has been shown."""

    key: str
    entry: Entry | None
    complete: bool


class Watch:
    """The last value of every key, then changes as they come, in order. `empty`: nothing stands there now, not even a deletion."""

    def __init__(self, subscription: JetStreamContext.PushSubscription, prefix: str, *, empty: bool) -> None:
        self.empty = empty
        self._subscription = subscription
        self._prefix = prefix

    async def next(self, timeout_s: float) -> Change:
        """:raises TimeoutError: (nats-py's or the built-in one) nothing came in timeout_s."""
        message = await self._subscription.next_msg(timeout=timeout_s)
        headers = message.headers or {}
        gone = headers.get("KV-Operation") in {"DEL", "PURGE"} or "Nats-Marker-Reason" in headers
        metadata = message.metadata
        entry = None if gone else Entry(message.data, metadata.sequence.stream, metadata.timestamp.timestamp())
        return Change(message.subject.removeprefix(self._prefix), entry, message.metadata.num_pending == 0)


async def open_bucket(bus: Bus, name: str, *, create: bool = False, history: int = 1) -> Bucket:
    """The bucket, made first if `create` (registries only; others have no permission to).

    :raises BusUnavailable: it does not exist (yet), or no answer.
    """
    try:
        if create:
            config = api.KeyValueConfig(bucket=name, history=history, storage=api.StorageType.FILE, direct=True)
            inner = await bus.js.create_key_value(config)
        else:
            inner = await bus.js.key_value(name)
    except nats.js.errors.BadRequestError:
        inner = await bus.js.key_value(name)  # exists with other settings of an earlier version
    except (nats.errors.Error, TimeoutError) as error:
        raise BusUnavailable(f"bucket {name} is not there: {error}", retry_after_s=1.0) from error
    return Bucket(bus, name, inner)


OnChange = Callable[[str, Entry | None], Awaitable[None] | None]


class Mirror:
    """A bucket's live values in memory: `entries`, kept by a watch.

    A watch can die without a word (a reconnect kills it; a server may lose its consumer). `run` makes it anew after every
    reconnect and whenever `rebuild` is called; the new snapshot is compared with what was known, and every difference,
    deletions included, is told to `on_change(key, entry | None)`. `synced` is set once the first snapshot is complete.
    """

    def __init__(self, bus: Bus, bucket: Bucket, on_change: OnChange, keys: str = ">") -> None:
        self.entries: dict[str, Entry] = {}
        self.synced = asyncio.Event()
        self.rebuilds = 0
        self._bucket = bucket
        self._on_change = on_change
        self._keys = keys
        self._rebuild = asyncio.Event()
        bus.on_reconnect(self.rebuild)

    def rebuild(self) -> None:
        """Asks for a new watch; returns at once."""
        self._rebuild.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._rebuild.clear()
            try:
                async with self._bucket.watch(self._keys) as watch:
                    await self._follow(watch)
            except (nats.errors.Error, TimeoutError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _cancelled():
                    raise
                log.warning("mirror.watch_failed", bucket=self._bucket.name, error=str(error) or type(error).__name__)
                await asyncio.sleep(0.2)
                continue
            self.rebuilds += 1

    async def _follow(self, watch: Watch) -> None:
        """Applies changes until a rebuild is asked for."""
        snapshot: set[str] = set()
        complete = watch.empty
        if complete:
            await self._settle(snapshot)
        while not self._rebuild.is_set():
            try:
                change = await watch.next(0.1)
            except (nats.errors.TimeoutError, TimeoutError):
                continue
            finally:
                if _cancelled():  # nats-py's wait_for may have swallowed it (Python 3.11)
                    raise asyncio.CancelledError
            await self._apply(change.key, change.entry, in_snapshot=not complete)
            if complete:
                continue
            if change.entry is not None:
                snapshot.add(change.key)
            if change.complete:
                complete = True
                await self._settle(snapshot)

    async def _settle(self, snapshot: set[str]) -> None:
        """The snapshot is whole: what it does not show is gone."""
        for key in [key for key in self.entries if key not in snapshot]:
            await self._apply(key, None)
        self.synced.set()

    async def _apply(self, key: str, entry: Entry | None, *, in_snapshot: bool = False) -> None:
        """A snapshot is believed even where revisions have gone back: the bucket was restored from a backup, or made anew."""
        known = self.entries.get(key)
        if entry is None:
            if known is None:
                return
            del self.entries[key]
        else:
            if known == entry or (known is not None and known.revision >= entry.revision and not in_snapshot):
                return
            self.entries[key] = entry
        result = self._on_change(key, entry)
        if result is not None:
            await result


def _cancelled() -> bool:
    """Whether this task itself is being cancelled (nats-py also raises CancelledError when its own future was)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
