"""What a row's key stands for: tensors on the GPU, a step of ours, the same step of vLLM's, the bytes it cannot do without."""

from collections.abc import Callable
from dataclasses import dataclass

from lora_kernels.bench.models import DENSE, MOE
from lora_kernels.bench.rows import Key
from lora_kernels.bench.selection import PREFILL_FROM
from lora_kernels.dense_shrink.bench import DenseBench
from lora_kernels.moe_lora import Routing
from lora_kernels.moe_prefill.bench import MODELS as PREFILL_MODELS
from lora_kernels.moe_prefill.bench import LayerTensors, floor_bytes, list_of, make_layers, plan_of, run_forward
from lora_kernels.moe_prefill.vllm_peer import VllmLayer
from lora_kernels.moe_shrink.bench import Batch, MoeBench
from lora_kernels.pair_groups import can_group

STEPS = 48
MOE_LAYERS = 6
PREFILL_LAYERS = 4
PREFILL_STEPS = 12
SPREAD_BYTES = 400_000_000
"""Weights that dense layers take turns over: several times the L2."""
Step = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """ours(i), i below steps: one step, with weights and routing of its own. units: layers in a step.

    vllm: makes vLLM's step; None where vLLM launches nothing that compares.
    """

    steps: int
    ours: Step
    vllm: Callable[[], Step] | None
    floor_bytes: float
    units: int = 1


def build(key: Key, *, steps: int = STEPS, layers: int = MOE_LAYERS) -> Case:
    """steps, layers: 1 and 1 compile the same kernels. At prefill, where a step is a chain of layers, four at most.

    :raises ValueError: nothing here is measured under that op, model or layer.
    """
    if key.op == "moe_lora":
        return _moe(key, steps, layers)
    if key.op == "dense_lora":
        return _dense(key, steps, layers)
    if key.op == "moe_lora_prefill":
        return _prefill(key, steps, layers)
    if key.op == "work_list":
        return _prefill_list(key, layers) if key.tokens >= PREFILL_FROM else _decode_list(key, steps)
    raise ValueError(f"op: expected moe_lora, dense_lora, moe_lora_prefill or work_list, given {key.op!r}")


def _batch(key: Key, *, layers: int, steps: int) -> Batch:
    bench = MoeBench(MOE[key.model], slots=key.adapters, rank=key.rank, layers=layers)
    return bench.batch(key.tokens, steps=steps, adapters=key.adapters, routing=key.routing)


def _moe(key: Key, steps: int, layers: int) -> Case:
    batch = _batch(key, layers=layers, steps=steps)

    def vllm() -> Step:
        batch.prepare_vllm()
        return batch.vllm

    return Case(steps=len(batch.steps), ours=batch.ours, vllm=vllm, floor_bytes=batch.floor_bytes())


def _decode_list(key: Key, steps: int) -> Case:
    model = MOE[key.model]
    pairs = key.tokens * model.top_k
    if not can_group(pairs, num_slots=key.adapters, num_experts=model.experts):
        raise ValueError(f"tokens: expected a batch that decode groups, given {key.tokens}")
    batch = _batch(key, layers=1, steps=steps)

    def ours(index: int) -> object:
        step = batch.steps[index]
        return Routing(token_slots=step.token_slots, topk_ids=step.topk_ids, num_slots=key.adapters, num_experts=model.experts).groups()

    def vllm() -> Step:
        batch.prepare_vllm()
        return lambda index: batch.peer.align(batch.metas[index], batch.steps[index].topk_ids)

    aligns = pairs * 8 > model.experts * key.adapters
    return Case(steps=len(batch.steps), ours=ours, vllm=vllm if aligns else None, floor_bytes=4 * (2 * pairs + key.tokens))


def _dense(key: Key, steps: int, layers: int) -> Case:
    layer = next(layer for layer in DENSE if (layer.model, layer.layer) == (key.model, key.layer))
    steps = steps if key.tokens < PREFILL_FROM else min(steps, PREFILL_STEPS)
    spread = 1 if layers == 1 else SPREAD_BYTES
    options = {"slots": key.adapters, "adapters": key.adapters, "rank": key.rank, "routing": key.routing}
    bench = DenseBench(layer, key.tokens, spread_bytes=spread, steps=steps, **options)

    def vllm() -> Step:
        bench.prepare_vllm()
        return bench.vllm

    return Case(steps=steps, ours=bench.ours, vllm=vllm, floor_bytes=bench.floor_bytes())


def _layers(key: Key, layers: int) -> list[LayerTensors]:
    model = next(model for model in PREFILL_MODELS if model.name == key.model)
    return make_layers(model, key.tokens, key.adapters, key.rank, count=min(layers, PREFILL_LAYERS), routing=key.routing)


def _peers(layers: list[LayerTensors]) -> list[VllmLayer]:
    return [VllmLayer(layer.lora, layer.topk_ids, layer.token_adapters) for layer in layers]


def _prefill(key: Key, _: int, count: int) -> Case:
    model = next(model for model in PREFILL_MODELS if model.name == key.model)
    layers = _layers(key, count)
    plan = plan_of(layers[0], model)

    def vllm() -> Step:
        peers = _peers(layers)
        return lambda _: [peer.run(a.x, a.gate_up, a.down, a.topk_weights) for peer, a in zip(peers, layers, strict=True)]

    bytes_a_layer = sum(floor_bytes(layer, model) for layer in layers) / len(layers)
    return Case(steps=1, ours=lambda _: run_forward(layers, plan), vllm=vllm, floor_bytes=bytes_a_layer, units=len(layers))


def _prefill_list(key: Key, count: int) -> Case:
    model = next(model for model in PREFILL_MODELS if model.name == key.model)
    layers = _layers(key, count)
    plan = plan_of(layers[0], model)

    def vllm() -> Step:
        peers = _peers(layers)
        return lambda _: [peer.align() for peer in peers]

    def ours(_: int) -> object:
        return [list_of(layer, plan) for layer in layers]

    return Case(steps=1, ours=ours, vllm=vllm, floor_bytes=4 * (2 * key.tokens * model.top_k + key.tokens), units=len(layers))
