"""Content digests: of one file, and of an adapter version, whatever kind of archive it came in."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec


class BundleFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an adapter: its name in the adapter's folder, and the sha256 of its content in hex."""

    name: str
    size_bytes: int
    sha256: str


def sha256_of_file(path: Path) -> str:
    """The file's sha256 in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> BundleFile:
    return BundleFile(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_of_file(path))


def digest_of_files(files: Iterable[BundleFile]) -> str:
    """`sha256:<hex>` over the sorted `<sha256>  <name>` lines: depends on names and contents, on nothing else."""
    lines = sorted(f"{file.sha256}  {file.name}\n" for file in files)
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
