"""The files of one adapter in a working directory, and the rules by which members of any source become them."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Protocol

import msgspec

from shared.artifacts.digest import BundleFile, digest_of_files
from shared.artifacts.reasons import RejectReason, rejected
from shared.errors import AdapterRejected

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
PICKLE_NAMES = frozenset({"adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "adapter_model.pkl"})
CHUNK_BYTES = 1 << 20

_RATIO_FLOOR_BYTES = 64 << 20


class ArchiveLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one artifact may expand to."""

    max_expanded_bytes: int = 16 << 30
    max_ratio: int = 100  # expanded bytes to the archive's own, once more than 64 MiB have come out
    max_members: int = 4096
    max_small_file_bytes: int = 1 << 20  # adapter_config.json, chat_template.jinja
    follow_links: bool = False  # directories only; a person's own hub snapshot is made of links


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's own files in `root`, and no others; `ignored` names what the source held besides them."""

    root: Path
    files: tuple[BundleFile, ...]
    digest: str
    ignored: tuple[str, ...] = ()

    @property
    def config_path(self) -> Path:
        return self.root / CONFIG_NAME

    @property
    def weights_path(self) -> Path:
        return self.root / WEIGHTS_NAME

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Counted:
    """A source's expanded bytes, counted as they come out; `count` raises when there are too many."""

    def __init__(self, expanded: Readable, count: Callable[[int], None]) -> None:
        self._expanded = expanded
        self._count = count

    def read(self, size: int, /) -> bytes:
        piece = self._expanded.read(size)
        self._count(len(piece))
        return piece


class Taker:
    """Keeps the members worth keeping, counts what comes out, and finds the one folder that is the adapter."""

    def __init__(self, into: Path, limits: ArchiveLimits, source_bytes: int | None = None) -> None:
        """`source_bytes`: the archive's own size; None where nothing is compressed."""
        self.limits = limits
        self._into = into
        self._source_bytes = source_bytes
        self._members = 0
        self._expanded_bytes = 0
        self._seen: set[PurePosixPath] = set()
        self._taken: dict[PurePosixPath, tuple[Path, BundleFile]] = {}
        self._ignored: list[str] = []

    def wants(self, raw_name: str, is_folder: bool = False) -> PurePosixPath | None:
        """The member's safe path if its content is to be kept; counts and checks the name in any case."""
        self._members += 1
        if self._members > self.limits.max_members:
            raise rejected(
                RejectReason.ARCHIVE_BOMB,
                f"the archive has more than {self.limits.max_members} members",
                limit=self.limits.max_members,
            )
        path = safe_path(raw_name)
        if is_folder:
            return None
        if path in self._seen:
            raise rejected(RejectReason.BAD_ARCHIVE, f"the archive holds {path} twice", member=str(path))
        self._seen.add(path)
        if path.name in (CONFIG_NAME, WEIGHTS_NAME, CHAT_TEMPLATE_NAME):
            return path
        self._ignored.append(str(path))
        return None

    def count(self, size_bytes: int) -> None:
        self._expanded_bytes += size_bytes
        if self._expanded_bytes > self.limits.max_expanded_bytes:
            raise rejected(
                RejectReason.ARCHIVE_BOMB,
                f"the artifact expands to more than {self.limits.max_expanded_bytes} bytes",
                limit_bytes=self.limits.max_expanded_bytes,
            )
        if self._source_bytes is None or self._expanded_bytes <= _RATIO_FLOOR_BYTES:
            return
        if self._expanded_bytes > self.limits.max_ratio * self._source_bytes:
            raise rejected(
                RejectReason.ARCHIVE_BOMB,
                f"the archive expands more than {self.limits.max_ratio} times",
                limit_ratio=self.limits.max_ratio,
            )

    def take(self, path: PurePosixPath, content: Readable) -> None:
        """Copies one wanted member to the working directory, hashing on the way."""
        if path.name in (CONFIG_NAME, WEIGHTS_NAME):
            self._refuse_second_folder(path)
        limit_bytes = None if path.name == WEIGHTS_NAME else self.limits.max_small_file_bytes
        target = self._into / f".{len(self._taken)}.part"
        hasher, size_bytes = hashlib.sha256(), 0
        with target.open("xb") as out:
            while piece := content.read(CHUNK_BYTES):
                size_bytes += len(piece)
                if limit_bytes is not None and size_bytes > limit_bytes:
                    raise rejected(
                        RejectReason.FILE_TOO_BIG,
                        f"{path} is larger than {limit_bytes} bytes",
                        member=str(path),
                        limit_bytes=limit_bytes,
                    )
                hasher.update(piece)
                out.write(piece)
        self._taken[path] = (target, BundleFile(name=path.name, size_bytes=size_bytes, sha256=hasher.hexdigest()))

    def finish(self) -> Bundle:
        if not self._seen:
            raise rejected(RejectReason.EMPTY, f"the artifact is empty; expected {CONFIG_NAME} and {WEIGHTS_NAME}")
        folder = next((path.parent for path in self._taken if path.name == CONFIG_NAME), None)
        if folder is None:
            raise rejected(RejectReason.MISSING_CONFIG, f"no {CONFIG_NAME} in the artifact", found=self._found())
        if folder / WEIGHTS_NAME not in self._taken:
            raise self._no_weights()
        kept: list[BundleFile] = []
        for path, (written, file) in self._taken.items():
            if path.parent == folder:
                written.rename(self._into / path.name)
                kept.append(file)
            else:
                written.unlink()
                self._ignored.append(str(path))
        kept.sort(key=lambda file: file.name)
        ignored = tuple(sorted(self._ignored))
        return Bundle(root=self._into, files=tuple(kept), digest=digest_of_files(kept), ignored=ignored)

    def discard(self) -> None:
        for child in self._into.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()

    def _refuse_second_folder(self, path: PurePosixPath) -> None:
        folders = {taken.parent for taken in self._taken if taken.name in (CONFIG_NAME, WEIGHTS_NAME)} | {path.parent}
        if len(folders) > 1:
            names = sorted(str(folder) for folder in folders)
            raise rejected(
                RejectReason.SEVERAL_ADAPTERS,
                f"adapter files lie in several folders ({', '.join(names)}); send one adapter at a time",
                folders=names,
            )

    def _no_weights(self) -> AdapterRejected:
        pickle = next((name for name in self._ignored if PurePosixPath(name).name in PICKLE_NAMES), None)
        if pickle is not None:
            return rejected(
                RejectReason.PICKLE,
                f"{pickle} is a pickle, which can run code; save the adapter with safe_serialization=True",
                member=pickle,
            )
        return rejected(RejectReason.MISSING_WEIGHTS, f"no {WEIGHTS_NAME} beside {CONFIG_NAME}", found=self._found())

    def _found(self) -> list[str]:
        return sorted(str(path) for path in self._seen)[:20]


def safe_path(raw_name: str) -> PurePosixPath:
    """The member's relative path.

    :raises AdapterRejected: unsafe_path.
    """
    parts = [part for part in raw_name.split("/") if part not in ("", ".")]
    is_unsafe = (
        raw_name.startswith("/")
        or ".." in parts
        or "\\" in raw_name
        or raw_name[1:2] == ":"
        or len(raw_name) > 1024
        or any(ord(char) < 32 or ord(char) == 127 for char in raw_name)
    )
    if is_unsafe:
        raise rejected(
            RejectReason.UNSAFE_PATH,
            f"member {raw_name[:200]!r}: only relative paths without '..', backslashes or control characters are taken",
            member=raw_name[:200],
        )
    return PurePosixPath(*parts)
