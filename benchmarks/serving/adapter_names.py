"""Where a made adapter lies."""

import hashlib
from pathlib import Path


def folder_of(folder: Path, model: str, layers: int, rank: int, seed: int) -> Path:
    return folder / hashlib.sha256(f"{model} {layers} {rank} {seed}".encode()).hexdigest()
