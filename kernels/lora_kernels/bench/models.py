"""Shapes of the models that are measured, as one GPU of a tensor-parallel group sees them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoeModel:
    """slices: 2 where gate and up have an A and B each, 1 where they are interleaved and share A."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    slices: int


@dataclass(frozen=True, kw_only=True)
class DenseLayer:
    """widths: N of each slice."""

    model: str
    layer: str
    k: int
    widths: tuple[int, ...]


MOE = {
    "gptoss-20b": MoeModel(hidden=2880, intermediate=2880, experts=32, top_k=4, slices=1),
    "qwen3-30b-a3b": MoeModel(hidden=2048, intermediate=768, experts=128, top_k=8, slices=2),
    "deepseek-v2-lite": MoeModel(hidden=2048, intermediate=1408, experts=64, top_k=6, slices=2),
    "mixtral-8x7b": MoeModel(hidden=4096, intermediate=14336, experts=8, top_k=2, slices=2),
}


def _dense(model: str, *, hidden: int, query: int, key: int, intermediate: int, tp: int) -> list[DenseLayer]:
    name = model if tp == 1 else f"{model}-tp{tp}"
    return [
        DenseLayer(model=name, layer="qkv", k=hidden, widths=(query // tp, key // tp, key // tp)),
        DenseLayer(model=name, layer="o_proj", k=query // tp, widths=(hidden,)),
        DenseLayer(model=name, layer="gate_up", k=hidden, widths=(intermediate // tp, intermediate // tp)),
        DenseLayer(model=name, layer="down", k=intermediate // tp, widths=(hidden,)),
    ]


DENSE = [
    DenseLayer(model="gptoss-20b", layer="qkv", k=2880, widths=(4096, 512, 512)),
    DenseLayer(model="gptoss-20b", layer="o_proj", k=4096, widths=(2880,)),
    DenseLayer(model="qwen3-30b-a3b", layer="qkv", k=2048, widths=(4096, 512, 512)),
    DenseLayer(model="qwen3-30b-a3b", layer="o_proj", k=4096, widths=(2048,)),
    *(layer for tp in (1, 4) for layer in _dense("qwen3-32b", hidden=5120, query=8192, key=1024, intermediate=25600, tp=tp)),
    *(layer for tp in (1, 4) for layer in _dense("llama-3.3-70b", hidden=8192, query=8192, key=1024, intermediate=28672, tp=tp)),
]
