"""The folder in which this registry unpacks uploads; nothing in it outlives the process."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import StartFailed


@contextmanager
def emptied(folder: Path) -> Generator[Path]:
    """The folder, made, readable by us alone, without what an earlier process left in it; empty again at the end.

    :raises StartFailed: somebody else made it, or a link in its place (the system's temporary folder is everybody's).
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise StartFailed(f"{folder} is a link or not ours: remove it, or set TENANTRY_REGISTRY_WORK_DIR", where=str(folder))
    folder.chmod(0o700)
    clear(folder)
    try:
        yield folder
    finally:
        clear(folder)


def clear(folder: Path) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
