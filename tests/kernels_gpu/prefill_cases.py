"""One expert layer at prefill, small enough for the interpreter, with its results in higher precision."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from lora_kernels.moe_prefill import (
    Activation,
    ExpertLora,
    PrefillPlan,
    combine,
    expand_activate,
    group_tokens,
    plan_prefill,
    reference,
    shrink,
)
from lora_kernels.moe_prefill.plan import SumTiles, TokenTiles
from lora_kernels.work_list import WorkList, build_work_list

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float16, torch.float32]
"""The interpreter multiplies raw bit patterns in a bfloat16 dot."""

BOUNDS = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
"""‖out - ref‖ / ‖ref‖ of an output in the inputs' dtype."""

FLOAT32_OUTPUT_BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}
"""The same where only inputs and the hidden vectors are rounded to the dtype and the output is float32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    lora: ExpertLora
    x: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    token_adapters: torch.Tensor
    enabled: torch.Tensor | None = None

    @property
    def adapted_pairs(self) -> torch.Tensor:
        adapters = self.token_adapters
        has = (adapters >= 0) & (adapters < self.lora.num_adapters)
        if self.enabled is not None:
            has &= self.enabled[adapters.clamp(0, self.lora.num_adapters - 1).long()] != 0
        return has.repeat_interleave(self.topk_ids.shape[1])


def make_case(
    activation: Activation,
    dtype: torch.dtype,
    *,
    num_tokens: int = 40,
    top_k: int = 2,
    num_adapters: int = 3,
    num_experts: int = 4,
    hidden_size: int = 96,
    intermediate_size: int = 80,
    rank: int = 16,
    base_share: float = 0.25,
    shared_outer: bool = False,
    seed: int = 0,
) -> Case:
    draw = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=draw, device=DEVICE) * scale).to(dtype)

    slices = activation.num_slices
    outer = 1 if shared_outer else num_experts
    adapters = torch.randint(0, num_adapters, (num_tokens,), generator=draw, device=DEVICE, dtype=torch.int32)
    adapters[torch.rand(num_tokens, generator=draw, device=DEVICE) < base_share] = -1
    scores = torch.rand((num_tokens, num_experts), generator=draw, device=DEVICE)
    top = scores.topk(top_k, 1)
    width = 2 * intermediate_size // slices
    return Case(
        lora=ExpertLora(
            activation=activation,
            gate_up_a=[normal(num_adapters, outer, rank, hidden_size, scale=hidden_size**-0.5) for _ in range(slices)],
            gate_up_b=[normal(num_adapters, num_experts, width, rank, scale=rank**-0.5) for _ in range(slices)],
            down_a=normal(num_adapters, num_experts, rank, intermediate_size, scale=intermediate_size**-0.5),
            down_b=normal(num_adapters, outer, hidden_size, rank, scale=rank**-0.5),
            num_experts=num_experts,
        ),
        x=normal(num_tokens, hidden_size),
        gate_up=normal(num_tokens * top_k, 2 * intermediate_size),
        down=normal(num_tokens * top_k, hidden_size),
        topk_ids=top.indices.to(torch.int32),
        topk_weights=top.values.softmax(1),
        token_adapters=adapters,
    )


class Form(Enum):
    """How w2's expand and the sum over choices are launched."""

    ADDED = "added"
    RING = "ring"
    TOKENS = "tokens"


SMALL_RING = SumTiles(block_m=16, block_n=16, block_t=16, chunk_n=32, lead=2, ring=3)
"""Several chunks, places in the ring taken again, in layers small enough for the interpreter."""


def plan_of(case: Case, *, form: Form = Form.ADDED) -> PrefillPlan:
    lora = case.lora
    plan = plan_prefill(
        num_tokens=case.topk_ids.shape[0],
        top_k=case.topk_ids.shape[1],
        num_adapters=lora.num_adapters,
        num_experts=lora.num_experts,
        hidden_size=lora.hidden_size,
        intermediate_size=lora.intermediate_size,
        rank=lora.rank,
    )
    wide = SumTiles(block_m=min(64, plan.block_m), lead=2, ring=4)
    ring = wide if case.lora.hidden_size >= 512 else SMALL_RING
    size = 64 if lora.hidden_size >= 512 and lora.rank <= 64 else 32
    by_tokens = TokenTiles(block_t=size, block_n=2 * size, num_warps=4, num_stages=3)
    if form is Form.TOKENS:
        plan = replace(plan, activate=replace(plan.activate, parts=1))
    return replace(plan, expand_sum=ring if form is Form.RING else None, sum_experts=by_tokens if form is Form.TOKENS else None)


def list_of(case: Case, plan: PrefillPlan) -> WorkList:
    return build_work_list(
        case.topk_ids,
        case.token_adapters,
        num_adapters=case.lora.num_adapters,
        num_experts=case.lora.num_experts,
        block_m=plan.block_m,
        adapter_enabled=case.enabled,
    )


def run(
    case: Case, plan: PrefillPlan, *, work: WorkList | None = None, out_dtype: torch.dtype | None = None, all_local: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activated, combined) of the kernels; `case.down` is left alone."""
    work = work or list_of(case, plan)
    hidden = shrink(case.x, case.lora, work, plan)
    acts, down_hidden = expand_activate(case.gate_up, hidden, case.lora, work, plan, case.topk_weights, out_dtype=out_dtype)
    tokens = None
    if plan.token_block is not None:
        tokens = group_tokens(
            case.token_adapters, num_adapters=case.lora.num_adapters, adapter_enabled=case.enabled, block=plan.token_block
        )
    out = combine(
        case.down.to(out_dtype or case.down.dtype, copy=True),
        down_hidden,
        case.lora,
        work,
        plan,
        case.topk_ids,
        tokens_by_adapter=tokens,
        all_experts_local=all_local,
    )
    return acts, out


def expected(case: Case, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, the w2 shrink reading the unrounded activation."""
    acts = reference.activated(
        case.gate_up.to(dtype),
        case.x.to(dtype),
        case.lora.gate_up_a,
        case.lora.gate_up_b,
        case.topk_ids,
        case.token_adapters,
        case.lora.activation,
        case.enabled,
    )
    out = reference.combined(
        case.down.to(dtype),
        acts,
        case.lora.down_a,
        case.lora.down_b,
        case.topk_weights,
        case.topk_ids,
        case.token_adapters,
        case.enabled,
    )
    return acts, out


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """‖out - ref‖ / ‖ref‖; infinite where anything is not finite."""
    if not bool(out.isfinite().all()):
        return float("inf")
    return float((out.to(ref.dtype) - ref).norm() / ref.norm())
