"""Tile sizes by GPU, op and shape: the nearest tuned entry, or a plain rule where nothing was tuned.

Files are `<GPU name>.json` (blanks as underscores), first in the folder named by LORA_KERNELS_CONFIG_DIR, then here:
`{"gpu": "NVIDIA H200", "entries": [{"op": "moe_shrink", "dtype": "bfloat16", "rank": 32, "width": 2880, "slices": 1,
"adapters": 8, "rows": 32, "rows_sharing_x": 4, "tiles": {"path": "pairs", "block": 256, "steps": 1, "num_warps": 4, "stages": 1}}]}`.
"""

import functools
import json
import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

FARTHEST = 8
"""Times as many or as few rows as an entry was tuned for: beyond, the rule knows better which path to take."""
FOREIGN = 4
"""How much more another expert layer's shape counts than another batch's: at 16 tokens Qwen3 took 25.6 us with GPT-OSS's tiles for as many
pairs, but 12.3 and 36.6 with its own at 8 and 32."""
FOLDER_VARIABLE = "LORA_KERNELS_CONFIG_DIR"
OPS = ("moe_shrink", "moe_expand", "dense_shrink", "dense_expand")
PATHS = dict.fromkeys(("moe_shrink", "moe_expand"), ("pairs", "groups")) | dict.fromkeys(
    ("dense_shrink", "dense_expand"), ("pairs", "slots", "list")
)


class ConfigError(ValueError):
    """A file of tuned tiles cannot be used: names the file and the key."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What tiles are looked up by. width: K of a shrink, sum of N of an expand.

    rows: pairs of an expert layer, tokens of a dense one. rows_sharing_x: pairs with the same row of x in a shrink (top_k for w13).
    """

    op: str
    dtype: str
    rank: int
    width: int
    slices: int
    adapters: int
    rows: int
    rows_sharing_x: int = 1


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """path: one program a row ("pairs"), or one for rows that share weights: "groups" of expert layers, "slots" of dense ones.

    "list" is for dense layers at prefill. block: elements of K a step (shrink), rows of B (expand). steps: blocks of K a program
    walks, the rest is split; blocks of B it walks on all paths but "slots". rows: tokens a program takes at a time ("slots", "list").
    r_parts: programs that share the rows of A, of a shrink by pair.
    """

    path: str
    block: int
    steps: int = 1
    num_warps: int = 4
    stages: int = 1
    rows: int = 16
    r_parts: int = 1


def tiles_for(shape: Shape, device: torch.device) -> Tiles:
    """The nearest tuned entry for this GPU, or the rule for a GPU, dtype or rank nobody tuned.

    :raises ConfigError: a file for this GPU is malformed.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return _choose(shape, gpu, os.environ.get(FOLDER_VARIABLE, ""))


def tuned(op: str, like: torch.Tensor, *, rank: int, width: int, slices: int, adapters: int, rows: int, rows_sharing_x: int = 1) -> Tiles:
    """`tiles_for` a launch on tensors like this one."""
    dtype = str(like.dtype).removeprefix("torch.")
    shape = Shape(
        op=op,
        dtype=dtype,
        rank=rank,
        width=width,
        slices=slices,
        adapters=adapters,
        rows=max(rows, 1),
        rows_sharing_x=max(rows_sharing_x, 1),
    )
    return tiles_for(shape, like.device)


def file_name(gpu: str) -> str:
    return gpu.replace(" ", "_").replace("/", "_") + ".json"


def bits(dtype: str) -> int:
    """Of an element: what is read and held is what tiles are chosen for, so bfloat16 and float16 share them."""
    return 32 if dtype == "float32" else 16


def padded_rank(rank: int) -> int:
    """The power of two the kernels compute a rank with."""
    return max(16, 1 << (rank - 1).bit_length())


@functools.lru_cache(maxsize=4096)
def _choose(shape: Shape, gpu: str, user_folder: str) -> Tiles:
    for folder in (user_folder, str(Path(__file__).parent)):
        fitting = [
            (entry, tiles)
            for entry, tiles in (_read(folder, gpu) if folder else ())
            if (entry.op, bits(entry.dtype)) == (shape.op, bits(shape.dtype))
            and padded_rank(shape.rank) <= 2 * padded_rank(entry.rank) <= 4 * padded_rank(shape.rank)
            and shape.rows / FARTHEST <= entry.rows <= shape.rows * FARTHEST
        ]
        if fitting:
            entry, tiles = min(fitting, key=lambda found: (_distance(found[0], shape), -found[0].rows))  # between two, the larger's
            return _for_rank(tiles, padded_rank(shape.rank) // padded_rank(entry.rank), shape)
    return default_tiles(shape)


def _for_rank(tiles: Tiles, times: int, shape: Shape) -> Tiles:
    """An entry's tiles at another rank than its own. Twice: by pair or group the rule's for that path (GPT-OSS, rank 64, 256 tokens: 137 us
    against 165 with halved blocks), else a program holds as much as before. Half: as many rows of A as before."""
    if times < 1:
        return replace(tiles, r_parts=max(1, tiles.r_parts // 2))
    if times == 1:
        return tiles
    if tiles.path == "groups":
        return group_tiles(shape)
    rule = default_tiles(shape) if shape.op.startswith("dense") else _pair_tiles(shape)
    if tiles.path == rule.path == "pairs":
        return rule
    return tiles if tiles.block < 32 * times else replace(tiles, block=tiles.block // times, steps=tiles.steps * times)


def _distance(entry: Shape, shape: Shape) -> float:
    def apart(one: int, other: int) -> float:
        return abs(math.log2(max(one, 1) / max(other, 1)))

    return (
        8 * apart(padded_rank(entry.rank), padded_rank(shape.rank))
        + 4 * apart(entry.rows, shape.rows)
        + (FOREIGN if shape.op.startswith("moe") else 1)
        * (2 * apart(entry.slices, shape.slices) + apart(entry.width, shape.width) + apart(entry.rows_sharing_x, shape.rows_sharing_x))
        + apart(entry.adapters, shape.adapters)
    )


def default_tiles(shape: Shape) -> Tiles:
    """A rule that fits registers at every rank."""
    if shape.op.startswith("dense"):
        return _dense_tiles(shape)
    return group_tiles(shape) if shape.rows >= 1024 else _pair_tiles(shape)


def group_tiles(shape: Shape) -> Tiles:
    """The rule's for groups, however few the rows."""
    rank = padded_rank(shape.rank)
    block, stages = 64 if rank <= 128 else 32, 4 if rank <= 32 else 3
    steps = (192 if shape.op.endswith("expand") else 576) // block
    return Tiles(path="groups", block=block, steps=_even_steps(shape, block, steps), num_warps=2, stages=stages)


def _pair_tiles(shape: Shape) -> Tiles:
    """From rank 64 on as many weights a program as at rank 32, in narrower blocks of B, or 32 rows of A."""
    rank = padded_rank(shape.rank)
    if shape.op.endswith("expand"):
        if rank <= 32:
            return Tiles(path="pairs", block=min(256, 8192 // rank))
        block = max(16, 4096 // rank)
        return Tiles(path="pairs", block=block, steps=_even_steps(shape, block, 3), num_warps=2)
    if rank <= 32:
        return Tiles(path="pairs", block=64, steps=_even_steps(shape, 64, 10240 // (64 * rank)))
    return Tiles(path="pairs", block=64, steps=_even_steps(shape, 64, 9), r_parts=rank // 32)


def _even_steps(shape: Shape, block: int, most: int) -> int:
    """As many blocks as divide one slice's width, where some number near `most` does: nothing is masked then."""
    width = shape.width // (shape.slices if shape.op.endswith("expand") else 1)
    even = [steps for steps in range(1, most + 1) if width % (block * steps) == 0]
    return even[-1] if even and 2 * even[-1] >= most else most


_PROGRAMS_WANTED = 396
"""Three for each of an H200's 132 multiprocessors."""


def _dense_tiles(shape: Shape) -> Tiles:
    """By pair or slot for a handful of tokens, else by list: up to 256 tokens R is taken in blocks of 64 at most, beyond all at once."""
    rank, expand = padded_rank(shape.rank), shape.op.endswith("expand")
    if shape.rows < 16 and rank <= 64:
        return Tiles(path="pairs", block=min(256, 8192 // rank))
    if shape.rows > 256:
        return _long_dense_tiles(shape, rank, expand=expand)
    narrow, path = rank <= 32, "list" if shape.rows >= 16 else "slots"
    if expand:
        return Tiles(path=path, block=256 if narrow else 128, num_warps=8)
    programs = min(shape.rows, shape.adapters + shape.rows // 32) * shape.slices * max(1, rank // 64)
    steps = _steps(shape.width, 256, max(4, min(32, _PROGRAMS_WANTED // programs)))
    rows = 16 if shape.rows <= 64 else 32
    if steps == 1:
        return Tiles(path=path, block=256, num_warps=4 if narrow else 8, rows=rows)
    return Tiles(path=path, block=128, steps=2 * steps, stages=4 if narrow else 3, rows=rows)


def _long_dense_tiles(shape: Shape, rank: int, *, expand: bool) -> Tiles:
    """64 tokens a program. From rank 128 on: h is kept over more of N (rank 256, 6,400 tokens of Llama's o_proj: 491 to 233 us), and K is
    shared by fewer programs where slices have programs of their own, as partials are long."""
    large, fits = rank >= 128, rank * bits(shape.dtype) <= 256 * 16
    if expand:
        if large and fits:
            steps = 8 if shape.rows // 64 * (shape.width // 512) >= _PROGRAMS_WANTED // 2 else 4
            return Tiles(path="list", block=64, steps=steps, num_warps=8, stages=3, rows=64)
        block, stages = (128, 3) if rank <= 32 else (64 if rank <= 128 else 32, 2)
        return Tiles(path="list", block=block, steps=4, num_warps=8, stages=stages, rows=64)
    programs = shape.rows * (shape.slices if large else 1)
    steps = _steps(shape.width, 64, min(16, _PROGRAMS_WANTED * 32 // programs))
    stages = 4 if rank <= 32 or (large and fits) else 3
    return Tiles(path="list", block=64, steps=steps, num_warps=4 if rank <= 32 else 8, stages=stages, rows=64)


def _steps(width: int, block: int, splits: int) -> int:
    """Blocks a program walks so that about so many programs share the width."""
    return max(1, -(-width // (block * max(splits, 1))))


@functools.lru_cache(maxsize=32)
def _read(folder: str, gpu: str) -> tuple[tuple[Shape, Tiles], ...]:
    file = Path(folder) / file_name(gpu)
    if not file.exists():
        return ()
    try:
        document = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{file}: expected JSON: {error}") from error
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: entries: expected a list")
    return tuple(_entry(file, f"entries[{index}]", entry) for index, entry in enumerate(entries))


def _entry(file: Path, where: str, entry: Any) -> tuple[Shape, Tiles]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{file}: {where}: expected an object")
    shape = _fields(Shape, file, where, {key: value for key, value in entry.items() if key != "tiles"})
    if shape.op not in OPS:
        raise ConfigError(f"{file}: {where}.op: expected one of {', '.join(OPS)}, given {shape.op!r}")
    tiles = _fields(Tiles, file, f"{where}.tiles", entry.get("tiles"))
    if tiles.path not in PATHS[shape.op]:
        raise ConfigError(f"{file}: {where}.tiles.path: expected one of {', '.join(PATHS[shape.op])}, given {tiles.path!r}")
    for key, limits in {"block": (16, 4096), "num_warps": (1, 32), "rows": (16, 256), "r_parts": (1, 16)}.items():
        value = getattr(tiles, key)
        if not limits[0] <= value <= limits[1] or value & (value - 1):
            raise ConfigError(f"{file}: {where}.tiles.{key}: expected a power of two in [{limits[0]}, {limits[1]}], given {value}")
    return shape, tiles


def _fields(kind: type, file: Path, where: str, given: Any) -> Any:
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: {where}: expected an object")
    known = {field.name: field for field in fields(kind)}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{file}: {where}.{key}: unknown key")
        wanted = str if known[key].type in (str, "str") else int
        if not isinstance(value, wanted) or isinstance(value, bool) or (wanted is int and value < 1):
            raise ConfigError(f"{file}: {where}.{key}: expected {'text' if wanted is str else 'a whole number above 0'}, given {value!r}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(f"{file}: {where}: {str(error).split('() ')[-1]}") from error
