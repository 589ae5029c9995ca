"""The files of an adapter and the archives they travel in, written by hand so that no reader under test is also the writer."""

import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}

Tensors = dict[str, np.ndarray]


def safetensors_bytes(tensors: Tensors, dtype: str = "float32") -> bytes:
    header: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = tensor.astype(NUMPY[dtype]).tobytes()
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + bytes(data)


def write_adapter(folder: Path, config: dict[str, Any], tensors: Tensors, dtype: str = "float32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    (folder / WEIGHTS).write_bytes(safetensors_bytes(tensors, dtype))
    return folder


def pack(folder: Path, kind: str, top: str = "") -> bytes:
    """The folder's files as a "tar", "tar.gz" or "zip", under a top-level folder if `top` is given."""
    members = {f"{top}/{file.name}" if top else file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    if kind == "zip":
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return out.getvalue()
    raw = tar_bytes(members)
    return raw if kind == "tar" else gzip.compress(raw, mtime=0)


def tar_bytes(members: dict[str, bytes], extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info in extra:
            tar.addfile(info)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()
