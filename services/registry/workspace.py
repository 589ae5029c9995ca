"""The folder in which this registry unpacks uploads; nothing in it outlives the process, or the next registry started beside it."""

import fcntl
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import StartFailed

PREFIX = "tenantry-"
_LOCKS_SUFFIX = ".lock"  # beside the folder; held while its registry lives
_LOCK_TRIES = 20


@contextmanager
def emptied(folder: Path) -> Generator[Path]:
    """The folder, made, readable by us alone, without what an earlier process left in it; gone again at the end.

    What registries that were killed have left beside it goes too.

    :raises StartFailed: somebody else made it, or a link in its place (the system's temporary folder is everybody's).
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        sweep(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise StartFailed(f"{folder} is a link or not ours: remove it, or set TENANTRY_REGISTRY_WORK_DIR", where=str(folder))
        folder.chmod(0o700)
        clear(folder)
        try:
            yield folder
        finally:
            clear(folder)
            with suppress(OSError):
                folder.rmdir()


def sweep(parent: Path) -> None:
    """Removes the folders, ours and in `parent`, of registries that are no more."""
    for lock in parent.glob(f"{PREFIX}*{_LOCKS_SUFFIX}"):
        with suppress(OSError), _taken(lock) as ours:
            folder = lock.with_suffix("")
            if ours and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)
                lock.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """:raises StartFailed: another registry has the folder."""
    lock = folder.with_name(folder.name + _LOCKS_SUFFIX)
    for _ in range(_LOCK_TRIES):  # a registry that sweeps may hold it for a moment, and remove it
        with _taken(lock) as ours:
            if ours and lock.exists() and lock.stat().st_ino == ours:
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
        time.sleep(0.05)
    raise StartFailed(f"another registry works in {folder}: give each its own TENANTRY_REGISTRY_REGISTRY_ID", where=str(folder))


@contextmanager
def _taken(lock: Path) -> Generator[int]:
    """The inode that is locked until the end; 0 if somebody else holds it or owns the file."""
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield 0
        else:
            held = os.fstat(handle)
            yield held.st_ino if held.st_uid == os.getuid() else 0
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
