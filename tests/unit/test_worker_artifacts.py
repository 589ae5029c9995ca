"""The cache of adapters' files: fetched by digest, unpacked without trust, never reused, bounded."""

import asyncio
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker import artifacts
from services.worker.artifacts import ArtifactCache
from shared.bus import ObjectCorrupt
from shared.errors import LoadFailed, NotFound
from tests.worker_peers import tar_of


class Store:
    """An object store in memory that checks digests as the real one does."""

    def __init__(self, **objects: bytes) -> None:
        self.objects = objects
        self.reads = 0

    async def get_file(self, name: str, path: Path, sha256: str = "", limit_bytes: int = 0) -> int:
        self.reads += 1
        await asyncio.sleep(0)
        if name not in self.objects:
            raise NotFound(f"no object {name}")
        content = self.objects[name]
        if hashlib.sha256(content).hexdigest() != sha256 or (limit_bytes and len(content) > limit_bytes):
            raise ObjectCorrupt("not what was asked for")
        path.write_bytes(content)
        return len(content)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def made(folder: Path, store: Store, limit_bytes: int = 0) -> ArtifactCache:
    cache = ArtifactCache(folder, store, limit_bytes=limit_bytes)
    await cache.prepare()
    return cache


async def test_the_folder_holds_the_files_and_nothing_else(tmp_path: Path) -> None:
    archive = tar_of({"adapter_config.json": b"{}", "adapter_model.safetensors": b"w"})
    cache = await made(tmp_path, Store(x=archive))
    folder = await cache.fetch("ad_1", "x", sha(archive), len(archive))
    assert folder == tmp_path / sha(archive)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w"}


async def test_the_same_bytes_are_fetched_once_even_by_several_at_a_time(tmp_path: Path) -> None:
    archive = tar_of({"w": b"1"})
    store = Store(x=archive)
    cache = await made(tmp_path, store)
    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(cache.fetch(f"ad_{n}", "x", sha(archive), len(archive)))
    assert store.reads == 1


async def test_files_stay_until_the_last_adapter_that_uses_them_is_released(tmp_path: Path) -> None:
    archive = tar_of({"w": b"1"})
    cache = await made(tmp_path, Store(x=archive))
    folder = await cache.fetch("ad_1", "x", sha(archive), len(archive))
    await cache.fetch("ad_2", "x", sha(archive), len(archive))
    assert await cache.release("ad_1") == 0
    assert folder.is_dir()
    assert await cache.release("ad_2") == 1
    assert not folder.exists()
    assert await cache.release("ad_2") == 0


@pytest.mark.parametrize("way", ["release", "evict"])
async def test_files_that_another_adapter_asks_for_while_they_are_deleted_are_there_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Two tenants may have uploaded the same bytes; one leaving takes nothing from the other that comes."""
    archive = tar_of({"w": b"1" * 100})
    earlier = await made(tmp_path, Store(x=archive))
    await earlier.fetch("ad_1", "x", sha(archive), len(archive))
    cache = earlier if way == "release" else await made(tmp_path, Store(x=archive), limit_bytes=1)
    deleting, go_on = threading.Event(), threading.Event()
    delete = artifacts._delete

    def slowly(folder: Path) -> int:
        if folder.name == sha(archive):
            deleting.set()
            assert go_on.wait(10)
        return delete(folder)

    monkeypatch.setattr(artifacts, "_delete", slowly)
    async with asyncio.TaskGroup() as group:
        group.create_task(cache.release("ad_1") if way == "release" else cache.evict())
        assert await asyncio.to_thread(deleting.wait, 10)
        coming = group.create_task(cache.fetch("ad_2", "x", sha(archive), len(archive)))
        await asyncio.sleep(0)  # it has asked
        go_on.set()
    assert (coming.result() / "w").read_bytes() == b"1" * 100


@pytest.mark.parametrize("error", [NotFound, ObjectCorrupt])
async def test_a_failed_fetch_leaves_nothing(tmp_path: Path, error: type[Exception]) -> None:
    archive = tar_of({"w": b"1"})
    cache = await made(tmp_path, Store(**({"x": archive + b"!"} if error is ObjectCorrupt else {})))
    with pytest.raises(error):
        await cache.fetch("ad_1", "x", sha(archive), len(archive))
    assert list(tmp_path.iterdir()) == []


def _link() -> bytes:
    return _special(lambda info: (setattr(info, "type", tarfile.SYMTYPE), setattr(info, "linkname", "/etc/passwd")))


def _device() -> bytes:
    return _special(lambda info: setattr(info, "type", tarfile.CHRTYPE))


def _special(change: Callable[[tarfile.TarInfo], object]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        info = tarfile.TarInfo("w")
        change(info)
        tar.addfile(info)
    return whole.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        tar_of({"../evil": b"1"}),
        tar_of({"/etc/evil": b"1"}),
        tar_of({"folder/w": b"1"}),
        tar_of({".artifact.tar": b"1"}),
        tar_of({".hidden": b"1"}),
        tar_of({f"f{n}": b"" for n in range(65)}),
        _link(),
        _device(),
        b"no tar at all, but long enough to be read as one" * 40,
        tar_of({"w": b"1" * 5000})[:2000],
    ],
    ids=["parent", "absolute", "folder", "own-name", "hidden", "many", "link", "device", "no-tar", "cut"],
)
async def test_a_tar_of_anything_but_plain_files_is_refused_and_leaves_nothing(tmp_path: Path, archive: bytes) -> None:
    cache = await made(tmp_path / "cache", Store(x=archive))
    with pytest.raises(LoadFailed):
        await cache.fetch("ad_1", "x", sha(archive), len(archive))
    assert list((tmp_path / "cache").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


async def test_a_mount_without_a_digest_is_refused(tmp_path: Path) -> None:
    cache = await made(tmp_path, Store())
    for digest in ("", "../../etc", "A" * 64):
        with pytest.raises(LoadFailed):
            await cache.fetch("ad_1", "x", digest, 1)


async def test_half_made_folders_of_an_earlier_life_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ("0" * 64 + ".part")).mkdir()
    await made(tmp_path, Store())
    assert list(tmp_path.iterdir()) == []


async def test_the_least_recently_used_folders_nobody_uses_go_first(tmp_path: Path) -> None:
    archives = [tar_of({"w": bytes([n]) * 1000}) for n in range(3)]
    store = Store(**{f"x{n}": archive for n, archive in enumerate(archives)})
    first = await made(tmp_path, store)
    for n, archive in enumerate(archives):
        folder = await first.fetch(f"ad_{n}", f"x{n}", sha(archive), len(archive))
        os.utime(folder, (n, n))
    cache = await made(tmp_path, store, limit_bytes=1500)  # a new life that uses only the oldest
    await cache.fetch("ad_0", "x0", sha(archives[0]), len(archives[0]))
    os.utime(tmp_path / sha(archives[0]), (0, 0))
    assert await cache.evict() == 2000
    assert [path.name for path in tmp_path.iterdir()] == [sha(archives[0])]
