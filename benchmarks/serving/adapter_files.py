"""`python -m benchmarks.serving.adapter_files MODEL LAYERS RANK FOLDER SEED...`: random adapters as PEFT writes them, one for each seed.

Made on the GPU where there is one. A folder appears when it is whole.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.serving.adapter_names import folder_of
from benchmarks.serving.shapes import adapter_config, adapter_tensors, config_of

STRENGTH = 0.05


def write_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int, base: str) -> Path:
    """Large enough an effect that a probe tells it from rounding."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shapes = list(adapter_tensors(config, rank))
    values = torch.empty(sum(rows * columns for _, (rows, columns) in shapes), dtype=torch.bfloat16, device=device)
    values.normal_(generator=generator)
    tensors: dict[str, torch.Tensor] = {}
    at = 0
    for name, (rows, columns) in shapes:
        part = values[at : at + rows * columns].view(rows, columns)
        tensors[name] = part.mul_(columns**-0.5 if ".lora_A." in name else STRENGTH)
        at += rows * columns
    values = values.cpu()
    at = 0
    for name, (rows, columns) in shapes:
        tensors[name] = values[at : at + rows * columns].view(rows, columns)
        at += rows * columns
    save_file(tensors, unfinished / "adapter_model.safetensors")
    (unfinished / "adapter_config.json").write_text(json.dumps(adapter_config(config, rank, base)))
    return unfinished.rename(folder)


def main(model: str, layers: str, rank: str, folder: str, *seeds: str) -> None:
    config = config_of(model, int(layers))
    for seed in seeds:
        write_adapter(folder_of(Path(folder), model, int(layers), int(rank), int(seed)), config, int(rank), int(seed), model)


if __name__ == "__main__":
    main(*sys.argv[1:])
