"""The folder in which this registry unpacks uploads; nothing in it outlives the process."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def emptied(folder: Path) -> Generator[Path]:
    """The folder, made, readable by us alone, without what an earlier process left in it; empty again at the end."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
