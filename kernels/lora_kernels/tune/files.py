"""Writes what was found where `lora_kernels.configs` looks for it."""

import json
from dataclasses import asdict
from pathlib import Path

from lora_kernels.configs import Shape, Tiles, file_name
from lora_kernels.configs.plans import LayerShape
from lora_kernels.moe_prefill.plan import PrefillPlan

ORDER = {
    "entries": ("op", "width", "slices", "rank", "adapters", "rows"),
    "prefill": ("hidden_size", "intermediate_size", "rank", "num_adapters", "num_tokens"),
}


def write(folder: Path, gpu: str, found: list[tuple[Shape, Tiles]]) -> Path:
    """Adds entries to the GPU's file; those of the same shape are replaced, whatever else it holds stays."""
    return _add(folder, gpu, "entries", "tiles", [{**asdict(shape), "tiles": asdict(tiles)} for shape, tiles in found])


def write_plans(folder: Path, gpu: str, found: list[tuple[LayerShape, PrefillPlan]]) -> Path:
    """The same for whole layers at prefill."""
    return _add(folder, gpu, "prefill", "plan", [{**asdict(shape), "plan": asdict(plan)} for shape, plan in found])


def _add(folder: Path, gpu: str, name: str, value: str, new: list[dict]) -> Path:
    file = folder / file_name(gpu)
    document = json.loads(file.read_text()) if file.exists() else {"gpu": gpu, "entries": []}
    shapes = [_shape_of(entry, value) for entry in new]
    kept = [entry for entry in document.get(name, []) if _shape_of(entry, value) not in shapes]
    document[name] = sorted(kept + new, key=lambda entry: [str(entry[key]).rjust(8) for key in ORDER[name]])
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(_one_entry_a_line(document))
    return file


def _shape_of(entry: dict, value: str) -> dict:
    usual = {"rows_sharing_x": 1} if value == "tiles" else {}
    return usual | {key: part for key, part in entry.items() if key != value}


def _one_entry_a_line(document: dict) -> str:
    parts = []
    for key, value in document.items():
        lines = ",\n".join("  " + json.dumps(entry) for entry in value) if isinstance(value, list) else None
        parts.append(f'"{key}": ' + (json.dumps(value) if lines is None else "[\n" + lines + "\n]"))
    return "{" + ", ".join(parts) + "}\n"
