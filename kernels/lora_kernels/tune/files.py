"""Writes what was found where `lora_kernels.configs` looks for it."""

import json
from dataclasses import asdict
from pathlib import Path

from lora_kernels.configs import Shape, Tiles, file_name

ORDER = ("op", "width", "slices", "rank", "adapters", "rows")


def write(folder: Path, gpu: str, found: list[tuple[Shape, Tiles]]) -> Path:
    """Adds entries to the GPU's file; those of the same shape are replaced, whatever else it holds stays."""
    file = folder / file_name(gpu)
    document = json.loads(file.read_text()) if file.exists() else {"gpu": gpu, "entries": []}
    new = [{**asdict(shape), "tiles": asdict(tiles)} for shape, tiles in found]
    keys = [_shape_of(entry) for entry in new]
    kept = [entry for entry in document["entries"] if _shape_of(entry) not in keys]
    document["entries"] = sorted(kept + new, key=lambda entry: [str(entry[key]).rjust(8) for key in ORDER])
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(_one_entry_a_line(document))
    return file


def _shape_of(entry: dict) -> dict:
    return {"rows_sharing_x": 1} | {key: value for key, value in entry.items() if key != "tiles"}


def _one_entry_a_line(document: dict) -> str:
    parts = []
    for key, value in document.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in value) if isinstance(value, list) else None
        parts.append(f'"{key}": ' + (json.dumps(value) if lines is None else "[\n" + lines + "\n]"))
    return "{" + ", ".join(parts) + "}\n"
