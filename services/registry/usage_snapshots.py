"""Snapshots of closed days in the object store: stored once, compared with what other registries stored, read back for a rebuild."""

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from services.registry.usage_days import needed_days, sequence_of
from shared.bus import ObjectCorrupt, Objects
from shared.errors import NotFound

log = structlog.get_logger()

_STATES_KEPT = 3


class Pending(msgspec.Struct, frozen=True):
    """Something closed that is not in the object store yet; `key` is its table's."""

    table: str  # days | states
    key: int
    name: str
    content: bytes


def day_object(created: str, day: str) -> str:
    """Of the stream that was made at `created`: another stream's snapshots are never taken for this one's."""
    return f"day.{_tag(created)}.{day}"


def state_object(created: str, sequence: int) -> str:
    return f"{_state_prefix(created)}{sequence:020d}"


def _state_prefix(created: str) -> str:
    return f"state.{_tag(created)}."


def _tag(created: str) -> str:
    return hashlib.sha256(created.encode()).hexdigest()[:16]


class Snapshots:
    """`folder` holds files on their way."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._folder = folder

    async def store(self, pending: Pending) -> bool:
        """Whether the store holds exactly these bytes under the name now; what another registry stored is never overwritten.

        :raises BusUnavailable: not stored.
        """
        ours = hashlib.sha256(pending.content).hexdigest()
        theirs = await self._objects.digest(pending.name)
        if theirs and theirs != ours:
            log.error("usage.snapshot_differs", object=pending.name, ours=ours, theirs=theirs)
            return False
        if not theirs:
            path = self._scratch()
            try:
                await anyio.to_thread.run_sync(path.write_bytes, pending.content)
                await self._objects.put_file(pending.name, path)
            finally:
                path.unlink(missing_ok=True)
            log.info("usage.snapshot_stored", object=pending.name, digest=ours, size_bytes=len(pending.content))
        return True

    async def newest(self, created: str, usable: Callable[[int], bool]) -> tuple[bytes, dict[str, bytes]] | None:
        """The newest state of the stream made at `created` whose sequence is `usable` and whose days are all there, with them.

        :raises BusUnavailable: no answer.
        """
        for name in reversed(await self._states(created)):
            sequence = int(name.removeprefix(_state_prefix(created)))
            if not usable(sequence):
                continue
            try:
                state = await self._read(name)
                days = {day: await self._read(day_object(created, day)) for day in needed_days(state)}
            except (NotFound, ObjectCorrupt, msgspec.MsgspecError) as error:
                log.error("usage.snapshot_unreadable", object=name, error=str(error))
                continue
            assert sequence_of(state) == sequence
            return state, days
        return None

    async def forget_old_states(self, created: str) -> None:
        for name in (await self._states(created))[:-_STATES_KEPT]:
            await self._objects.delete(name)

    async def _states(self, created: str) -> list[str]:
        return [name for name in await self._objects.names() if name.startswith(_state_prefix(created))]

    async def _read(self, name: str) -> bytes:
        path = self._scratch()
        try:
            await self._objects.get_file(name, path)
            return await anyio.to_thread.run_sync(path.read_bytes)
        finally:
            path.unlink(missing_ok=True)

    def _scratch(self) -> Path:
        return self._folder / f"snapshot-{secrets.token_hex(8)}"
