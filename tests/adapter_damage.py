"""Ways to spoil a good adapter: members of archives, headers of weight files, pickles in disguise."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.adapter_files import CONFIG, WEIGHTS, tar_bytes


def members(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {prefix + file.name: file.read_bytes() for file in folder.iterdir()}


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def zip_link(folder: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo(WEIGHTS)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
        archive.writestr(CONFIG, (folder / CONFIG).read_bytes())
    return out.getvalue()


def zip_member(folder: Path, name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"x")
        for own, content in members(folder).items():
            archive.writestr(own, content)
    return out.getvalue()


def zip_bomb(folder: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(CONFIG, (folder / CONFIG).read_bytes())
        with archive.open(WEIGHTS, "w", force_zip64=True) as content:
            for _ in range(80):
                content.write(bytes(1 << 20))
    return out.getvalue()


def gzip_bomb(folder: Path) -> bytes:
    return gzip.compress(tar_bytes({"padding": bytes(80 << 20), **members(folder)}), compresslevel=9, mtime=0)


def cut(path: Path, to: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * to)])


def set_value(folder: Path, value: float) -> None:
    raw = bytearray((folder / WEIGHTS).read_bytes())
    raw[-4:] = np.float32(value).tobytes()
    (folder / WEIGHTS).write_bytes(raw)


def swap_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    head = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + size :])


def overlap(header: dict[str, Any]) -> None:
    first, second = list(header.values())[:2]
    begin = first["data_offsets"][0]
    length = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [begin, begin + length]


def out_of_range(header: dict[str, Any]) -> None:
    last = list(header.values())[-1]
    last["data_offsets"] = [last["data_offsets"][0], last["data_offsets"][1] + 4096]
    last["shape"][0] += 4096 // (4 * last["shape"][1])


def first(header: dict[str, Any], **changes: Any) -> None:
    next(iter(header.values())).update(changes)


def to_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"weights": [1.0]}))


def to_zip_in_disguise(folder: Path) -> None:
    with zipfile.ZipFile(folder / WEIGHTS, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weights": [1.0]}))
