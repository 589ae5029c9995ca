"""Which rows a run measures: the whole set by default, any part of it by op, model, tokens, ranks, adapters and routing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_kernels.bench.models import DENSE, MOE, DenseLayer
from lora_kernels.bench.rows import ROUTINGS, Key
from lora_kernels.bench.targets import targets

OPS = ("moe", "dense", "prefill", "work_list")
UNTUNED = ("deepseek-v2-lite", "mixtral-8x7b")
"""Served with tiles found for other models."""
MODELS = ("gptoss-20b", "qwen3-30b-a3b", "qwen3-32b", "qwen3-32b-tp4", "llama-3.3-70b", "llama-3.3-70b-tp4", *UNTUNED)
PREFILL_MODELS = ("gptoss-20b", "qwen3-30b-a3b")
DECODE_TOKENS = (1, 8, 16, 32, 64, 128, 256)
DENSE_TOKENS = (1, 8, 32, 64, 256)
LARGE_DENSE_TOKENS = (1, 8, 32, 256, 6400)
PREFILL_SHAPES = ((1600, 1), (6400, 8), (12800, 8))
"""(tokens, adapters)."""
RANK, ADAPTERS = 32, 8
OTHER_RANKS = (8, 16, 64, 128, 256)
MOST_PREFILL_RANK = 128
"""Of expert layers."""
OTHER_ADAPTERS = (16, 32)
FEW_TOKENS = (8, 32, 256)
"""Where ranks, adapters and routings other than the usual are measured."""
FEW_DENSE_TOKENS = (8, 32, 256, 6400)
PREFILL_FROM = 1024


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """None: the whole set's own."""

    ops: Sequence[str] = OPS
    models: Sequence[str] = MODELS
    layers: Sequence[str] | None = None
    tokens: Sequence[int] | None = None
    ranks: Sequence[int] | None = None
    adapters: Sequence[int] | None = None
    routings: Sequence[str] | None = None
    part: str = "all"
    """Of the whole set: "usual" (rank, adapters, routing), or the "others"."""


def select(wanted: Wanted) -> list[Key]:
    """What something was set out for first, then the usual rank, adapters and routing, for a run that may be cut; ops as they are named."""
    makers = {"moe": _moe, "dense": _dense, "prefill": _prefill, "work_list": _work_list}
    set_out_for = targets()
    keys = (key for op in wanted.ops for key in makers[op](wanted))
    return sorted(keys, key=lambda key: (key not in set_out_for, is_unusual(key)))


def is_unusual(key: Key) -> bool:
    return key.rank != RANK or key.adapters > ADAPTERS or key.routing != "uniform"


def _shapes(wanted: Wanted, tokens: Sequence[int], few: Sequence[int]) -> Iterator[dict]:
    """The usual rank, adapters and routing at all tokens; then, where no tokens were named, each of the others at a few."""
    plain = wanted.ranks is None and wanted.adapters is None and wanted.routings is None
    if not plain:
        for count in wanted.tokens or few:
            for rank in wanted.ranks or (RANK,):
                for adapters in wanted.adapters or (ADAPTERS,):
                    for routing in wanted.routings or ("uniform",):
                        yield {"tokens": count, "adapters": adapters, "rank": rank, "routing": routing}
        return
    for count in () if wanted.part == "others" else wanted.tokens or tokens:
        yield {"tokens": count, "adapters": ADAPTERS, "rank": RANK}
    for count in () if wanted.part == "usual" or wanted.tokens else few:
        yield from ({"tokens": count, "adapters": ADAPTERS, "rank": rank} for rank in OTHER_RANKS)
        yield from ({"tokens": count, "adapters": adapters, "rank": RANK} for adapters in OTHER_ADAPTERS)
        yield from ({"tokens": count, "adapters": ADAPTERS, "rank": RANK, "routing": routing} for routing in ROUTINGS[1:])


def _moe(wanted: Wanted) -> Iterator[Key]:
    for model in (model for model in wanted.models if model in MOE):
        few = FEW_TOKENS if model in PREFILL_MODELS else ()
        for shape in _shapes(wanted, DECODE_TOKENS, few):
            if shape["tokens"] < PREFILL_FROM:
                yield Key(op="moe_lora", model=model, **shape)


def _wants(wanted: Wanted, layer: DenseLayer) -> bool:
    return layer.model in wanted.models and (wanted.layers is None or layer.layer in wanted.layers)


def _dense(wanted: Wanted) -> Iterator[Key]:
    for layer in (layer for layer in DENSE if _wants(wanted, layer)):
        small = layer.model in PREFILL_MODELS
        tokens = [*DENSE_TOKENS, *(count for count, _ in PREFILL_SHAPES)] if small else LARGE_DENSE_TOKENS
        for shape in _shapes(wanted, tokens, FEW_DENSE_TOKENS if layer.model == MODELS[0] else ()):
            yield Key(op="dense_lora", model=layer.model, layer=layer.layer, **_as_served(wanted, shape))


def _prefill(wanted: Wanted) -> Iterator[Key]:
    for model in (model for model in wanted.models if model in PREFILL_MODELS):
        for shape in _shapes(wanted, [tokens for tokens, _ in PREFILL_SHAPES], (6400,)):
            if shape["tokens"] >= PREFILL_FROM and shape["rank"] <= MOST_PREFILL_RANK:
                yield Key(op="moe_lora_prefill", model=model, **_as_served(wanted, shape))


def _work_list(wanted: Wanted) -> Iterator[Key]:
    for model in (model for model in wanted.models if model in PREFILL_MODELS):
        for tokens in () if wanted.part == "others" else wanted.tokens or (64, 256, *(tokens for tokens, _ in PREFILL_SHAPES)):
            yield Key(op="work_list", model=model, **_as_served(wanted, {"tokens": tokens, "adapters": ADAPTERS, "rank": RANK}))


def _as_served(wanted: Wanted, shape: dict) -> dict:
    """A prefill of 1,600 tokens is one request's."""
    one = wanted.adapters is None and shape.get("routing", "uniform") == "uniform" and shape["tokens"] == PREFILL_SHAPES[0][0]
    return {**shape, "adapters": 1} if one else shape
