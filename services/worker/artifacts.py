"""Adapters' files on this worker: fetched by digest, checked, unpacked once; a folder's path is never used for other bytes."""

import asyncio
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Protocol

import anyio.to_thread
import structlog

from shared.errors import LoadFailed

log = structlog.get_logger()

_TAR_NAME = ".artifact.tar"
_UNPACKED_LIMIT_FACTOR = 2  # the tar is not compressed: what comes out can hardly be more than went in
_MAX_MEMBERS = 64


class ArtifactSource(Protocol):
    """shared.bus.Objects keeps it."""

    async def get_file(self, name: str, path: Path, sha256: str = "", limit_bytes: int = 0) -> int: ...


class ArtifactCache:
    """`<folder>/<sha256>/` holds the files of one artifact. Folders of adapters in use are never evicted; the rest by last use."""

    def __init__(self, folder: Path, source: ArtifactSource, *, limit_bytes: int = 0) -> None:
        self._folder = folder
        self._source = source
        self._limit_bytes = limit_bytes
        self._used: dict[str, set[str]] = {}  # sha256 -> adapter_ids
        self._locks: dict[str, asyncio.Lock] = {}

    async def prepare(self) -> None:
        """The folder exists and holds no half-made artifacts of an earlier life."""
        await anyio.to_thread.run_sync(self._clean)

    async def fetch(self, adapter_id: str, name: str, sha256: str, size_bytes: int) -> Path:
        """The folder with the artifact's files, kept until `release(adapter_id)`.

        :raises NotFound: there is no such artifact.
        :raises ObjectCorrupt: its bytes are not the ones asked for.
        :raises LoadFailed: it is not a tar of plain files.
        :raises BusUnavailable: it could not be read now.
        """
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise LoadFailed("the mount names no artifact digest", reason="no_digest")
        self._used.setdefault(sha256, set()).add(adapter_id)
        try:
            async with self._lock(sha256):
                target = self._folder / sha256
                if not target.is_dir():
                    await self._make(target, name, sha256, size_bytes)
                os.utime(target)
                return target
        except BaseException:
            self._used.get(sha256, set()).discard(adapter_id)
            raise

    def path(self, sha256: str) -> Path:
        """Where `fetch` puts the artifact's files, there or not."""
        return self._folder / sha256

    async def release(self, adapter_id: str) -> int:
        """Deletes the adapter's files unless another adapter uses the same ones; the bytes freed. Idempotent."""
        freed_bytes = 0
        for sha256, users in list(self._used.items()):
            if adapter_id not in users:
                continue
            users.discard(adapter_id)
            freed_bytes += await self._delete_unused(sha256)
        return freed_bytes

    async def evict(self) -> int:
        """Deletes the least recently used folders that no adapter uses until limit_bytes is kept; the bytes freed."""
        if not self._limit_bytes:
            return 0
        freed_bytes = 0
        for name in await anyio.to_thread.run_sync(self._victims, frozenset(sha256 for sha256, users in self._used.items() if users)):
            freed_bytes += await self._delete_unused(name)
        return freed_bytes

    async def _delete_unused(self, sha256: str) -> int:
        """Whoever asks for the files meanwhile waits, and then makes them anew."""
        async with self._lock(sha256):
            if self._used.get(sha256):
                return 0
            self._used.pop(sha256, None)
            return await anyio.to_thread.run_sync(_delete, self._folder / sha256)

    def _lock(self, sha256: str) -> asyncio.Lock:
        return self._locks.setdefault(sha256, asyncio.Lock())

    async def _make(self, target: Path, name: str, sha256: str, size_bytes: int) -> None:
        work = self._folder / f"{sha256}.part"
        await anyio.to_thread.run_sync(_delete, work)
        work.mkdir(parents=True)
        try:
            got_bytes = await self._source.get_file(name, work / _TAR_NAME, sha256=sha256, limit_bytes=size_bytes)
            await anyio.to_thread.run_sync(_unpack, work / _TAR_NAME, work, got_bytes * _UNPACKED_LIMIT_FACTOR)
            await anyio.to_thread.run_sync(_settle, work)
            work.rename(target)
        finally:
            await anyio.to_thread.run_sync(_delete, work)

    def _clean(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob("*.part"):
            _delete(leftover)

    def _victims(self, used: frozenset[str]) -> list[str]:
        """Unused folders, the least recently used first, as many as must go; those being made (.part) are not among them."""
        folders = sorted((f for f in self._folder.iterdir() if f.is_dir() and not f.suffix), key=lambda folder: folder.stat().st_mtime)
        sizes = {folder.name: _size_bytes(folder) for folder in folders}
        over_bytes = sum(sizes.values()) - self._limit_bytes
        victims: list[str] = []
        for name in sizes:
            if over_bytes <= 0:
                break
            if name not in used:
                victims.append(name)
                over_bytes -= sizes[name]
        return victims


def _unpack(archive: Path, into: Path, limit_bytes: int) -> None:
    """Plain files at the top of the tar, nothing else; the tar is deleted.

    :raises LoadFailed: anything else is in it.
    """
    taken_bytes = 0
    try:
        with tarfile.open(archive, mode="r:") as tar:
            for count, member in enumerate(tar, start=1):
                path = PurePosixPath(member.name)
                if not member.isreg() or member.issparse() or len(path.parts) != 1 or path.name.startswith(".") or count > _MAX_MEMBERS:
                    raise LoadFailed("the artifact is not a tar of plain files", reason="bad_artifact")
                taken_bytes += member.size
                content = tar.extractfile(member)
                if taken_bytes > limit_bytes or content is None:
                    raise LoadFailed("the artifact holds more than it may", reason="bad_artifact", limit_bytes=limit_bytes)
                with content, (into / path.name).open("xb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
    except (tarfile.TarError, OSError) as error:
        raise LoadFailed(f"the artifact cannot be unpacked: {type(error).__name__}", reason="bad_artifact") from error
    archive.unlink()


def _settle(folder: Path) -> None:
    """On disk before the folder gets its final name: after a power cut a name still stands for whole files."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _delete(folder: Path) -> int:
    """Its bytes; 0 if it was not there."""
    if not folder.is_dir():
        return 0
    size_bytes = _size_bytes(folder)
    shutil.rmtree(folder)
    return size_bytes
