"""Reads an adapter out of a directory, tar, tar.gz or zip without trusting it; what its files say is checked elsewhere.

Everything streams to a working directory: an adapter can be gigabytes. Limits are enforced on the bytes that come out, never
on what a header claims.
"""

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, cast

from shared.artifacts.bundle import CHUNK_BYTES, CONFIG_NAME, ArchiveLimits, Bundle, Counted, Readable, Taker
from shared.artifacts.reasons import RejectReason, rejected
from shared.errors import AdapterRejected

_HEADER_BUDGET_BYTES = 1 << 20
# What the standard library's readers raise on damaged input (zipfile also seeks to negative offsets and indexes short fields).
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    gzip.BadGzipFile,
    struct.error,
    ValueError,
    LookupError,
    OverflowError,
)


def read_bundle(source: Path | bytes | IO[bytes], into: Path, limits: ArchiveLimits | None = None) -> Bundle:
    """Copies the adapter's files from `source` (a directory, an archive's path, its bytes or a seekable file) into `into`.

    Kept: adapter_config.json, adapter_model.safetensors, chat_template.jinja. Tokenizer files, READMEs and optimizer states
    are left out: the base's tokenizer serves. `into` is made if absent, must be empty, and is empty again after a refusal.

    :raises AdapterRejected: with a RejectReason.
    """
    limits = limits or ArchiveLimits()
    into.mkdir(parents=True, exist_ok=True)
    assert not any(into.iterdir()), f"{into} is not empty; a refusal would empty it"
    if isinstance(source, Path) and not source.is_dir():
        with source.open("rb") as file:
            return read_bundle(file, into, limits)
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    source_bytes = None if isinstance(source, Path) else source.seek(0, io.SEEK_END)
    taker = Taker(into, limits, source_bytes)
    try:
        if isinstance(source, Path):
            _take_directory(source, taker)
        else:
            _take_archive(source, taker)
        return taker.finish()
    except BaseException:
        taker.discard()
        raise


def _take_directory(source: Path, taker: Taker) -> None:
    """The folder itself if it holds a config (a Trainer's checkpoint folders beside it are left), else its subfolders too."""
    folders = [source]
    if not (source / CONFIG_NAME).is_file():
        folders += sorted(child for child in source.iterdir() if child.is_dir())
    for folder in folders:
        if folder.is_symlink() and folder != source and not taker.limits.follow_links:
            raise _not_a_plain_file(folder.name)
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.is_symlink():
                continue
            name = child.relative_to(source).as_posix()
            path = taker.wants(name)
            if path is None:
                continue
            if not child.is_file() or (child.is_symlink() and not taker.limits.follow_links):
                raise _not_a_plain_file(name)
            with child.open("rb") as content:
                taker.take(path, Counted(content, taker.count))


def _take_archive(file: IO[bytes], taker: Taker) -> None:
    file.seek(0)
    head = file.read(512)
    file.seek(0)
    if not head:
        raise rejected(RejectReason.EMPTY, "the upload is empty")
    try:
        if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            _take_zip(file, taker)
        elif head.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file, mode="rb") as expanded:
                _take_tar(expanded, taker)
        elif head[257:262] == b"ustar" or not any(head):
            _take_tar(file, taker)
        else:
            raise rejected(RejectReason.BAD_ARCHIVE, "not a tar, tar.gz or zip archive (told by its first bytes)")
    except (EOFError, tarfile.ReadError) as error:
        raise rejected(RejectReason.TRUNCATED_ARCHIVE, f"the archive ends early or is damaged: {error}") from error
    except _DAMAGE as error:
        raise rejected(RejectReason.BAD_ARCHIVE, f"the archive is damaged: {error}") from error
    except NotImplementedError as error:
        raise rejected(RejectReason.BAD_ARCHIVE, f"the archive uses an unsupported compression: {error}") from error


class _TarBytes(Counted):
    """A tar's bytes; between members also bounded by what tarfile may take into memory as one header."""

    _header_left: int | None = _HEADER_BUDGET_BYTES

    def expect_header(self) -> None:
        self._header_left = _HEADER_BUDGET_BYTES

    def expect_content(self) -> None:
        self._header_left = None

    def read(self, size: int, /) -> bytes:
        piece = super().read(size)
        if self._header_left is not None:
            self._header_left -= len(piece)
            if self._header_left < 0:
                raise rejected(
                    RejectReason.ARCHIVE_BOMB,
                    f"a member's header is larger than {_HEADER_BUDGET_BYTES} bytes",
                    limit_bytes=_HEADER_BUDGET_BYTES,
                )
        return piece


def _take_tar(expanded: Readable, taker: Taker) -> None:
    stream = _TarBytes(expanded, taker.count)
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|") as tar:  # of a file object, "r|" only calls read
        while (member := tar.next()) is not None:
            if not (member.isreg() or member.isdir()) or member.issparse():
                raise _not_a_plain_file(member.name)
            path = taker.wants(member.name, is_folder=member.isdir())
            content = tar.extractfile(member)
            if content is not None:
                stream.expect_content()
                if path is not None:
                    taker.take(path, content)
                else:
                    _drain(content)
            stream.expect_header()
    stream.expect_content()
    _drain(stream)  # a gzip's checksum is compared only when it is read to its end


def _drain(source: Readable) -> None:
    while source.read(CHUNK_BYTES):
        pass


def _take_zip(file: IO[bytes], taker: Taker) -> None:
    _check_zip_directory(file, taker.limits)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _not_a_plain_file(info.filename)
            path = taker.wants(info.orig_filename, is_folder=info.is_dir())
            if path is None:
                continue
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise rejected(RejectReason.BAD_ARCHIVE, f"{path} is encrypted or compressed other than by deflate", member=str(path))
            with archive.open(info) as content:
                taker.take(path, Counted(content, taker.count))


def _check_zip_directory(file: IO[bytes], limits: ArchiveLimits) -> None:
    """Refuses a central directory too large to be read into memory: zipfile reads all of it at once."""
    size_bytes = file.seek(0, io.SEEK_END)
    tail_bytes = min(size_bytes, 65_535 + 22 + 76)
    file.seek(size_bytes - tail_bytes)
    tail = file.read(tail_bytes)
    file.seek(0)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + 22 > len(tail):
        raise rejected(RejectReason.TRUNCATED_ARCHIVE, "the zip ends early: it has no end-of-archive record")
    directory_bytes: int = struct.unpack_from("<L", tail, at + 12)[0]
    if at >= 76 and tail[at - 20 : at - 16] == b"PK\x06\x07":  # zip64: its own record, which zipfile prefers
        directory_bytes = struct.unpack_from("<Q", tail, at - 76 + 40)[0]
    if directory_bytes > limits.max_members * 1024:
        raise rejected(
            RejectReason.ARCHIVE_BOMB,
            f"the zip's directory of {directory_bytes} bytes is more than {limits.max_members} members need",
            limit=limits.max_members,
        )


def _not_a_plain_file(name: str) -> AdapterRejected:
    return rejected(
        RejectReason.LINK_OR_DEVICE,
        f"{name!r} is a link, device, pipe or sparse file; only plain files and folders are taken",
        member=name,
    )
