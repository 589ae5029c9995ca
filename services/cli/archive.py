"""An adapter's folder as one archive, so that what is uploaded is whole and its size is known; and its digest without sending it."""

import tarfile
from pathlib import Path

from shared.artifacts.bundle import CHAT_TEMPLATE_NAME, CONFIG_NAME, PICKLE_NAMES, WEIGHTS_NAME
from shared.artifacts.digest import describe_file, digest_of_files

_KEPT = (CONFIG_NAME, WEIGHTS_NAME, CHAT_TEMPLATE_NAME)


def pack(folder: Path, archive: Path) -> int:
    """Writes the adapter's files as a tar; returns the archive's bytes.

    Tokenizers, READMEs and optimizer states stay at home. What is wrong with the rest is for the registry to say, so
    a pickle goes along where there are no safetensors, and one level of folders where there is no configuration.
    """
    folders = [folder]
    if not (folder / CONFIG_NAME).is_file():
        folders += sorted(child for child in folder.iterdir() if child.is_dir())
    with tarfile.open(archive, "w") as tar:
        for place in folders:
            names = _KEPT if (place / WEIGHTS_NAME).is_file() else (*_KEPT, *sorted(PICKLE_NAMES))
            for file in (place / name for name in names):
                if file.is_file():
                    tar.add(file.resolve(), arcname=file.relative_to(folder).as_posix(), recursive=False)
    return archive.stat().st_size


def local_digest(path: Path) -> str:
    """The adapter version's digest, or "" where only the registry can tell (an archive, a folder that is no adapter)."""
    files = [path / name for name in _KEPT if (path / name).is_file()]
    if not {CONFIG_NAME, WEIGHTS_NAME} <= {file.name for file in files}:
        return ""
    return digest_of_files(describe_file(file) for file in files)
