"""sha256 of large files, kept in a JSON file by path, size and mtime so that they are read once."""

import os
import re
from pathlib import Path

import msgspec

from shared.artifacts.digest import sha256_of_file

_HUB_BLOB = re.compile(r"[0-9a-f]{64}")


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    mtime_ns: int
    sha256: str


class FileHashes:
    """A cache that is lost or damaged costs time, never a wrong answer."""

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[str, _Known] = {}
        self._changed = False
        if cache is not None and cache.is_file():
            try:
                self._known = msgspec.json.decode(cache.read_bytes(), type=dict[str, _Known])
            except (OSError, msgspec.DecodeError):
                self._known = {}

    def sha256(self, path: Path) -> str:
        """The content's hash. A hub snapshot's large files are links to blobs that the hub names by their sha256."""
        real = path.resolve()
        if real.parent.name == "blobs" and _HUB_BLOB.fullmatch(real.name):
            return real.name
        status = real.stat()
        known = self._known.get(str(real))
        if known is not None and (known.size_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return known.sha256
        found = sha256_of_file(real)
        self._known[str(real)] = _Known(size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, sha256=found)
        self._changed = True
        return found

    def save(self) -> None:
        if self._cache is None or not self._changed:
            return
        self._cache.parent.mkdir(parents=True, exist_ok=True)
        written = self._cache.with_name(f"{self._cache.name}.{os.getpid()}")
        written.write_bytes(msgspec.json.encode(self._known, order="deterministic"))
        written.replace(self._cache)
        self._changed = False
