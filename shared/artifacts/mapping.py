"""Which module of the base each of an adapter's tensors belongs to, with names, shapes and ranks checked; nothing is loaded.

Forms met (PEFT): dense `…self_attn.q_proj.lora_A.weight`; one expert `…mlp.experts.3.gate_proj.lora_A.weight`; fused experts
(`target_parameters`) `…mlp.experts.base_layer.lora_A.weight` (gate_up) and `…mlp.experts.lora_A.weight` (down, or the only one).
"""

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.artifacts.fused import FusedShape, fused_axes, fused_role
from shared.artifacts.peft_config import PeftConfig
from shared.artifacts.reasons import RejectReason, rejected
from shared.artifacts.tensors import NUMPY_DTYPES, TensorInfo
from shared.contracts.base import BaseDescription, Module
from shared.errors import AdapterRejected

_LORA_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_EXPERT_NAME = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)")
_FUSED_NAME = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(embed_tokens|lm_head|wte|embed_out|tok_embeddings)(?:\.|$)|lora_embedding_[AB]")


class Form(StrEnum):
    DENSE = "dense"
    EXPERT = "expert"
    FUSED = "fused"


class LoraPair(msgspec.Struct, frozen=True, kw_only=True):
    """The two tensors that adapt one module, one expert's module, or (fused) one parameter of all experts of a layer.

    Dense and expert: A [rank, in], B [out, rank]. Fused: FusedShape says how the axes lie.
    """

    form: Form
    module: str  # the base module's path; fused: the path up to and with `.experts`
    pattern_name: str  # the name that rank_pattern and alpha_pattern are matched against
    a: TensorInfo
    b: TensorInfo
    rank: int
    expert: int | None = None
    fused: FusedShape | None = None


def map_tensors(tensors: Iterable[TensorInfo], base: BaseDescription, config: PeftConfig, max_rank: int) -> tuple[LoraPair, ...]:
    """Every LoRA pair, sorted by module and expert.

    :raises AdapterRejected: unknown_*, no_module_matched, embeddings, missing_partner, bad_shape, rank_mismatch, rank_too_big, ...
    """
    sides = _collect(tensors)
    targets = _Targets(base)
    unmatched = [module for module in sides if not targets.has(module)]
    if unmatched:
        raise targets.refusal(unmatched, is_all=len(unmatched) == len(sides))
    pairs: list[LoraPair] = []
    for module, found in sides.items():
        for side, other in (("A", "B"), ("B", "A")):
            if side not in found:
                raise rejected(
                    RejectReason.MISSING_PARTNER,
                    f"{found[other].name} has no lora_{side} beside it",
                    tensor=found[other].name,
                    expected=f"{module}.lora_{side}.weight",
                )
        pairs.append(_pair(module, found["A"], found["B"], sides, targets, config))
    for pair in pairs:
        _check_rank(pair, config, max_rank)
    _refuse_two_forms(pairs)
    return tuple(sorted(pairs, key=lambda pair: (pair.module, pair.pattern_name, pair.expert or 0)))


def _collect(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        match = _LORA_NAME.fullmatch(tensor.name)
        if match is None:
            raise _not_lora(tensor)
        if tensor.dtype not in NUMPY_DTYPES:
            raise rejected(
                RejectReason.BAD_DTYPE,
                f"{tensor.name} is {tensor.dtype}; F32, F16 and BF16 are taken",
                tensor=tensor.name,
                got=tensor.dtype,
                expected=sorted(NUMPY_DTYPES),
            )
        found = sides.setdefault(match["module"], {})
        if match["side"] in found:
            raise rejected(
                RejectReason.DUPLICATE_TENSOR,
                f"{tensor.name} and {found[match['side']].name} name the same side of the same module",
                tensor=tensor.name,
            )
        found[match["side"]] = tensor
    if not sides:
        raise rejected(RejectReason.NO_MODULE_MATCHED, "the weights file holds no tensor", expected="lora_A and lora_B pairs")
    return sides


def _not_lora(tensor: TensorInfo) -> AdapterRejected:
    name = tensor.name
    if "lora_magnitude_vector" in name:
        return rejected(RejectReason.DORA, f"{name} belongs to a DoRA adapter", tensor=name)
    if name.endswith(".bias"):
        return rejected(RejectReason.BIAS, f"{name}: adapters with biases are not served", tensor=name)
    if "trainable_tokens" in name:
        return rejected(RejectReason.NEW_TOKENS, f"{name}: adapters with own tokens are not served", tensor=name)
    if _EMBEDDING.search(name):
        return rejected(RejectReason.EMBEDDINGS, f"{name}: embeddings and the output layer cannot be adapted", tensor=name)
    if "modules_to_save" in name:
        return rejected(RejectReason.MODULES_TO_SAVE, f"{name} is a whole module, not a LoRA", tensor=name)
    return rejected(
        RejectReason.UNKNOWN_TENSOR,
        f"{name} is not a LoRA tensor",
        tensor=name,
        expected="….lora_A.weight or ….lora_B.weight",
    )


class _Targets:
    """The base's modules, looked up by the name an adapter uses."""

    def __init__(self, base: BaseDescription) -> None:
        self.base = base
        self.modules = {module.path: module for module in base.modules}

    def dense(self, name: str) -> Module | None:
        module = self.modules.get(name)
        return module if module is not None and module.experts == 0 else None

    def expert(self, name: str) -> tuple[Module, int] | None:
        match = _EXPERT_NAME.fullmatch(name)
        module = match and self.modules.get(f"{match['experts']}.{match['leaf']}")
        if not match or not module or module.experts == 0 or len(match["expert"]) > 6:
            return None
        return module, int(match["expert"])

    def fused(self, name: str) -> str | None:
        match = _FUSED_NAME.fullmatch(name)
        if match is None:
            return None
        module = self.modules.get(f"{match['experts']}.down_proj")
        return match["experts"] if module is not None and module.experts else None

    def has(self, name: str) -> bool:
        return bool(self.dense(name) or self.fused(name) or self.expert(name))

    def refusal(self, unmatched: list[str], is_all: bool) -> AdapterRejected:
        """The most telling reason for modules that the base does not have."""
        for name in unmatched:
            if _EMBEDDING.search(name):
                return rejected(RejectReason.EMBEDDINGS, f"{name}: embeddings and the output layer cannot be adapted", tensor=name)
            layer = _LAYER.search(name)
            if layer is not None and (len(layer[1]) > 6 or int(layer[1]) >= self.base.num_layers):
                return rejected(
                    RejectReason.UNKNOWN_LAYER,
                    f"{name}: the base has layers 0 to {self.base.num_layers - 1}",
                    tensor=name,
                    got=layer[1],
                    expected=f"0..{self.base.num_layers - 1}",
                )
        leaves = sorted({module.path.rsplit(".", 1)[-1] for module in self.base.modules})
        reason = RejectReason.NO_MODULE_MATCHED if is_all else RejectReason.UNKNOWN_MODULE
        what = "no tensor matches a module of the base" if is_all else "the base has no such module that can be adapted"
        return rejected(reason, f"{what}: {', '.join(unmatched[:3])}; it has {', '.join(leaves)}", tensor=unmatched[0], expected=leaves)


def _pair(
    name: str,
    a: TensorInfo,
    b: TensorInfo,
    sides: dict[str, dict[str, TensorInfo]],
    targets: _Targets,
    config: PeftConfig,
) -> LoraPair:
    if len(a.shape) != 2 or len(b.shape) != 2:
        wrong = a if len(a.shape) != 2 else b
        raise _bad_shape(wrong, "two dimensions")
    experts = targets.fused(name)
    if experts is not None:
        return _fused_pair(name, experts, a, b, sides, targets, config)
    expert: int | None = None
    module = targets.dense(name)
    if module is None:
        found = targets.expert(name)
        assert found is not None
        module, expert = found
        if expert >= module.experts:
            raise rejected(
                RejectReason.UNKNOWN_EXPERT,
                f"{name}: the base has experts 0 to {module.experts - 1}",
                tensor=a.name,
                got=expert,
                expected=f"0..{module.experts - 1}",
            )
        if targets.base.experts_layout == "interleaved":
            raise rejected(
                RejectReason.UNSUPPORTED_LAYOUT,
                f"{name}: {targets.base.architecture} takes its experts' adapters in the fused form only (target_parameters)",
                tensor=a.name,
            )
    rank = a.shape[0]
    if rank == 0 or a.shape[1] != module.in_features:
        raise _bad_shape(a, [rank or "rank", module.in_features])
    if b.shape != (module.out_features, rank):
        raise _bad_shape(b, [module.out_features, rank])
    return LoraPair(
        form=Form.DENSE if expert is None else Form.EXPERT,
        module=module.path,
        pattern_name=name,
        a=a,
        b=b,
        rank=rank,
        expert=expert,
    )


def _fused_pair(
    name: str,
    experts: str,
    a: TensorInfo,
    b: TensorInfo,
    sides: dict[str, dict[str, TensorInfo]],
    targets: _Targets,
    config: PeftConfig,
) -> LoraPair:
    gate, down = targets.modules[f"{experts}.gate_proj"], targets.modules[f"{experts}.down_proj"]
    parameter = fused_role(
        is_inner=name.endswith(".base_layer"),
        has_inner=f"{experts}.base_layer" in sides,
        target_parameters=config.target_parameters,
    )
    sizes = {"gate_up_proj": (gate.in_features, 2 * gate.out_features), "down_proj": (down.in_features, down.out_features)}
    candidates = [parameter] if parameter else list(sizes)
    for candidate in candidates:
        shape = fused_axes(a, b, candidate, sizes[candidate], down.experts, targets.base.experts_layout, config.peft_version)
        if shape is not None:
            return LoraPair(
                form=Form.FUSED,
                module=experts,
                pattern_name=f"{experts}.{candidate}",
                a=a,
                b=b,
                rank=shape.rank,
                fused=shape,
            )
    in_features, out_features = sizes[candidates[0]]
    rank = a.shape[0] // down.experts
    if a.shape != (rank * down.experts, in_features):
        raise _bad_shape(a, [f"{down.experts} experts x rank", in_features])
    raise _bad_shape(b, [out_features, rank * down.experts])


def _check_rank(pair: LoraPair, config: PeftConfig, max_rank: int) -> None:
    if pair.rank > max_rank:
        raise rejected(
            RejectReason.RANK_TOO_BIG,
            f"{pair.a.name} has rank {pair.rank}, the engine takes up to {max_rank}",
            tensor=pair.a.name,
            asked=pair.rank,
            allowed=max_rank,
        )
    declared = config.rank_of(pair.pattern_name)
    if declared != pair.rank:
        raise rejected(
            RejectReason.RANK_MISMATCH,
            f"{pair.a.name} has rank {pair.rank}, adapter_config.json gives {pair.pattern_name} rank {declared}",
            tensor=pair.a.name,
            got=pair.rank,
            expected=declared,
        )


def _refuse_two_forms(pairs: list[LoraPair]) -> None:
    """A layer's experts come fused or one by one; both at once would adapt a module twice."""
    fused = {pair.module: pair for pair in pairs if pair.form is Form.FUSED}
    for pair in pairs:
        layer = pair.module.rsplit(".", 1)[0]
        if pair.form is Form.EXPERT and layer in fused:
            raise rejected(
                RejectReason.DUPLICATE_TENSOR,
                f"{pair.a.name} and {fused[layer].a.name}: one layer's experts both fused and one by one",
                tensor=pair.a.name,
            )


def _bad_shape(tensor: TensorInfo, expected: object) -> AdapterRejected:
    return rejected(
        RejectReason.BAD_SHAPE,
        f"{tensor.name} has shape {list(tensor.shape)}, the base needs {expected}",
        tensor=tensor.name,
        got=list(tensor.shape),
        expected=expected,
    )
