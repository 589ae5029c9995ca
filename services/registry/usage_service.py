"""This registry's own projection of the whole usage stream: read into its book, from snapshots where the stream is shorter, and asked."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import structlog

from services.registry import usage_query
from services.registry.store import Store
from services.registry.usage_book import UsageBook
from services.registry.usage_days import SnapshotCorrupt
from services.registry.usage_snapshots import Snapshots
from services.registry.usage_tables import get_number, put, remove
from shared.bus import Stored, StreamState, follow, stream_state
from shared.contracts.usage import USAGE_STREAM
from shared.contracts.usage_query import EnginesReply, GetEngines, GetUsage, UsageReply
from shared.errors import NotFound, RegistryUnavailable, TenantryError

log = structlog.get_logger()

T = TypeVar("T")
_BATCH = 256  # messages in one transaction
_RETRY_S = 1.0
_CATCH_UP_S = 5.0


class _Behind(Exception):
    """The stream has lost messages that the book had not read."""


class UsageService:
    """`run` reads for ever; whoever asks is answered once everything is read that the stream held at that moment."""

    def __init__(self, store: Store, snapshots: Snapshots, path: Path, failpoint: Callable[[str], None] | None = None) -> None:
        self._store = store
        self._snapshots = snapshots
        self._path = path
        self._options: dict[str, Callable[[str], None]] = {} if failpoint is None else {"failpoint": failpoint}
        self._open: UsageBook | None = None
        self._book: UsageBook | None = None  # once it is fit to be asked
        self._one = anyio.CapacityLimiter(1)
        self._sequence = 0
        self._moved = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; `close` comes after."""
        while True:
            try:
                await self._read()
            except _Behind:
                log.warning("usage.behind_the_stream", sequence=self._sequence)
                continue
            except TenantryError as error:
                log.warning("usage.not_read", code=error.code, message=error.message)
            except Exception:  # the registry's other work goes on, and who asks for usage is told that it is not read
                log.exception("usage.reading_failed", path=str(self._path), sequence=self._sequence)
            await asyncio.sleep(_RETRY_S)

    def close(self) -> None:
        """Nothing may use the book any more."""
        if self._open is not None:
            self._open.close()

    async def with_book(self, work: Callable[[UsageBook], T]) -> T | None:
        """In a thread, one at a time; None while the book is not open yet."""
        book = self._book
        return None if book is None else await self._in_thread(partial(work, book))

    async def usage(self, request: GetUsage) -> UsageReply:
        """:raises NotFound: no such tenant. :raises RegistryUnavailable: the stream is still being read."""
        tenant_ids: tuple[str, ...] | None = None
        await self._caught_up()
        if request.own:
            tenant_ids = ((await self._store.tenant(request.tenant)).tenant_id,)
        elif request.tenant:
            tenant_ids = await self._in_thread(partial(usage_query.ids_of_name, self._path, request.tenant))
            if not tenant_ids:
                tenant_ids = (await self._known(request.tenant),)
        return await anyio.to_thread.run_sync(usage_query.answer, self._path, request, tenant_ids)

    async def engines(self, request: GetEngines) -> EnginesReply:
        """:raises RegistryUnavailable: the stream is still being read."""
        await self._caught_up()
        return await anyio.to_thread.run_sync(usage_query.engines, self._path, request)

    async def _known(self, tenant: str) -> str:
        try:
            return (await self._store.tenant(tenant)).tenant_id
        except NotFound as error:
            raise NotFound(f"there is no usage of a tenant {tenant[:80]}, and no such tenant", tenant=tenant[:80]) from error

    async def _caught_up(self) -> None:
        last = (await stream_state(self._store.bus, USAGE_STREAM)).last
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CATCH_UP_S
        while self._book is None or self._sequence < last:
            moved, left_s = self._moved, until_s - loop.time()
            if left_s <= 0:
                raise RegistryUnavailable(
                    f"the registry is still reading the usage stream ({self._sequence} of {last})", retry_after_s=2.0, held=self._sequence
                )
            try:
                async with asyncio.timeout(left_s):
                    await moved.wait()
            except TimeoutError:
                continue

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._one)

    async def _read(self) -> None:
        book = await self._opened(await stream_state(self._store.bus, USAGE_STREAM))
        self._book = book
        self._has(await self._in_thread(lambda: book.sequence))
        async with aclosing(follow(self._store.bus, USAGE_STREAM, self._sequence, batch=_BATCH)) as batches:
            async for batch in batches:
                await self._whole(book, batch)
                await self._in_thread(partial(book.apply, batch))
                self._has(batch[-1].sequence)

    def _has(self, sequence: int) -> None:
        self._sequence = sequence
        self._moved.set()
        self._moved = asyncio.Event()

    async def _whole(self, book: UsageBook, batch: list[Stored]) -> None:
        """Sequences have no gap. What is gone from the stream and in no snapshot is counted, and told in every answer.

        :raises _Behind: a snapshot may have it.
        """
        expected = self._sequence + 1
        if batch[0].sequence > expected:
            state = await stream_state(self._store.bus, USAGE_STREAM)
            if state.first > expected and await self._snapshots.newest(
                state.created, lambda sequence: expected <= sequence and sequence + 1 >= state.first
            ):
                raise _Behind
        missing = batch[-1].sequence - expected + 1 - len(batch)
        if missing > 0:
            log.error("usage.messages_missing", after=self._sequence, missing=missing)

            def count() -> None:
                put(book.connection, "missing", get_number(book.connection, "missing") + missing)

            await self._in_thread(count)

    async def _opened(self, state: StreamState) -> UsageBook:
        """The book, fit to go on from where it stands."""
        self._book = None
        book = self._open = self._open or await self._in_thread(lambda: UsageBook(self._path, **self._options))
        created, sequence = await self._in_thread(lambda: (book.created, book.sequence))
        if created and (created != state.created or sequence > state.last):
            book = await self._anew(book, keep=True)
            log.warning("usage.stream_is_another", was=created, now=state.created, kept=str(_aside(self._path)))
            created, sequence = "", 0
        if not created or sequence + 1 < state.first:
            found = await self._snapshots.newest(
                state.created, lambda snapshot: sequence < snapshot <= state.last and snapshot + 1 >= state.first
            )
            if found is not None:
                book = await self._anew(book, keep=False)
                await self._restored(book, *found)
        await self._in_thread(lambda: book.begin(state.created))
        return book

    async def _restored(self, book: UsageBook, state: bytes, days: dict[str, bytes]) -> None:
        try:
            await self._in_thread(partial(book.restore, state, days))
        except SnapshotCorrupt as error:
            log.error("usage.snapshot_corrupt", message=error.message, **error.fields)
        else:
            log.info("usage.restored", sequence=await self._in_thread(lambda: book.sequence), days=len(days))

    async def _anew(self, book: UsageBook, *, keep: bool) -> UsageBook:
        def start() -> UsageBook:
            book.close()
            if keep:
                self._path.replace(_aside(self._path))
            remove(self._path)
            return UsageBook(self._path, **self._options)

        self._open = await self._in_thread(start)
        return self._open


def _aside(path: Path) -> Path:
    """Where the book of a stream that is no more is kept."""
    return path.with_name(path.name + ".earlier")
