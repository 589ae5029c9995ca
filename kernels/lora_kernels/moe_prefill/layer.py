"""Launches of an expert layer at prefill, in the order an engine calls them around the base's two GEMMs.

build_work_list → shrink → (base GEMM 1) → expand_activate → (base GEMM 2) → combine.
"""

import torch
import triton

from lora_kernels.arguments import DTYPES, check, check_tensor
from lora_kernels.launch import Overlap, launch_options, overlap_on
from lora_kernels.moe_prefill.activation import Activation
from lora_kernels.moe_prefill.combine import add_down_kernel, sum_choices_kernel
from lora_kernels.moe_prefill.expand_activate import expand_activate_kernel
from lora_kernels.moe_prefill.expand_sum import ITEM, expand_sum_kernel, schedule_kernel
from lora_kernels.moe_prefill.plan import TOKEN_BLOCK, PrefillPlan, SumTiles, Tiles, TokenTiles
from lora_kernels.moe_prefill.shrink import shrink_kernel
from lora_kernels.moe_prefill.sum_experts import sum_experts_kernel
from lora_kernels.moe_prefill.weights import ExpertLora, strides
from lora_kernels.work_list import WorkList, build_work_list

FAST_ACTIVATION = True


def shrink(x: torch.Tensor, lora: ExpertLora, work: WorkList, plan: PrefillPlan) -> torch.Tensor:
    """x A^T of every pair: [splits, slices, num_pairs, R] float32, rows in the list's order. Needs no base result.

    x: [num_tokens, H] in the adapters' dtype.
    """
    _check_work(lora, work, plan)
    a_stacks, tiles = lora.gate_up_a, plan.shrink
    check_tensor("x", x, dtypes=(a_stacks[0].dtype,), device=a_stacks[0].device, shape=(work.num_tokens, lora.hidden_size))
    hidden = torch.empty((tiles.parts, len(a_stacks), work.num_pairs, lora.block_r), dtype=torch.float32, device=x.device)
    if work.num_pairs:
        shrink_kernel[(_programs(work, tiles.block_m) * tiles.parts,)](
            x,
            a_stacks[0],
            a_stacks[-1],
            hidden,
            work.order if lora.slot_ranks is None else lora.slot_ranks,
            work.order,
            work.tiles,
            work.num_tiles,
            work.num_pairs,
            work.max_tiles,
            *strides(a_stacks[0]),
            TOP_K=work.top_k,
            NUM_EXPERTS=work.num_experts,
            NO_ADAPTER=work.num_adapters * work.num_experts,
            K=lora.hidden_size,
            R=lora.rank,
            BLOCK_R=lora.block_r,
            HAS_RANKS=lora.slot_ranks is not None,
            SLICES=len(a_stacks),
            SPLITS=tiles.parts,
            LIST_BLOCK=work.block_m,
            BLOCK_M=tiles.block_m,
            BLOCK_K=tiles.block_n,
            STAGES=tiles.num_stages,
            **_options(tiles),
        )
    return hidden


def expand_activate(
    gate_up: torch.Tensor,
    hidden: torch.Tensor,
    lora: ExpertLora,
    work: WorkList,
    plan: PrefillPlan,
    topk_weights: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation(gate_up + LoRA), [num_pairs, I]; the w2 shrink of it). Rows whose expert lives elsewhere stay unwritten.

    The w2 shrink, times the routing weight, is [parts, num_pairs, R]: float32 partials, or one part in the adapters' dtype; rows in the
    list's order, unwritten where a pair has no adapter.

    gate_up: [num_pairs, 2 I], the base's output with its bias. hidden: what `shrink` gave. out: [num_pairs, I], written and
    given back; made in out_dtype, or gate_up's, where None.
    out: a buffer for the first result, made here where None.
    """
    _check_work(lora, work, plan)
    tiles, size = plan.activate, lora.intermediate_size
    check_tensor("gate_up", gate_up, dtypes=DTYPES, device=lora.down_a.device, shape=(work.num_pairs, 2 * size))
    expected = (plan.shrink.parts, len(lora.gate_up_a), work.num_pairs, lora.block_r)
    check_tensor("hidden", hidden, dtypes=(torch.float32,), device=gate_up.device, shape=expected)
    check_tensor("topk_weights", topk_weights, dtypes=(torch.float32,), device=gate_up.device, shape=(work.num_tokens, work.top_k))
    out = _buffer(out, (work.num_pairs, size), out_dtype or gate_up.dtype, gate_up.device)
    down = torch.empty((tiles.parts, work.num_pairs, lora.block_r), dtype=_hidden_dtype(lora, plan), device=gate_up.device)
    if work.num_pairs:
        expand_activate_kernel[(_programs(work, tiles.block_m) * tiles.parts,)](
            gate_up,
            hidden,
            lora.gate_up_b[0],
            lora.gate_up_b[-1],
            lora.down_a,
            topk_weights,
            out,
            down,
            work.order if lora.slot_ranks is None else lora.slot_ranks,
            work.order,
            work.tiles,
            work.num_tiles,
            work.num_pairs,
            work.max_tiles,
            *strides(lora.gate_up_b[0]),
            *strides(lora.down_a),
            NUM_EXPERTS=work.num_experts,
            NO_ADAPTER=work.num_adapters * work.num_experts,
            N=size,
            R=lora.rank,
            BLOCK_R=lora.block_r,
            HAS_RANKS=lora.slot_ranks is not None,
            SPLITS=plan.shrink.parts,
            PARTS=tiles.parts,
            GPT_OSS=lora.activation is Activation.GPT_OSS,
            FAST=FAST_ACTIVATION and gate_up.is_cuda,
            LIST_BLOCK=work.block_m,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            STAGES=tiles.num_stages,
            **_options(tiles),
        )
    return out, down


def combine(
    down: torch.Tensor,
    hidden: torch.Tensor,
    lora: ExpertLora,
    work: WorkList,
    plan: PrefillPlan,
    topk_ids: torch.Tensor,
    *,
    tokens_by_adapter: WorkList | None = None,
    all_experts_local: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over choices of down + weight * LoRA: [num_tokens, H]. `down` may be changed.

    down: [num_pairs, H], the base's rows with bias and routing weight. hidden: what `expand_activate` gave. topk_ids: as
    given to the list, a token's experts all different. all_experts_local: no id in it is negative. tokens_by_adapter:
    `group_tokens` of the batch, the same for all layers; made here where it is needed (`plan.token_block`) and None.
    out: as in `expand_activate`.
    """
    _check_work(lora, work, plan)
    check_tensor("down", down, dtypes=DTYPES, device=lora.down_b.device, shape=(work.num_pairs, lora.hidden_size))
    check_tensor("topk_ids", topk_ids, dtypes=(torch.int32, torch.int64), device=down.device, shape=(work.num_tokens, work.top_k))
    shape = (plan.activate.parts, work.num_pairs, lora.block_r)
    check_tensor("hidden", hidden, dtypes=(_hidden_dtype(lora, plan),), device=down.device, shape=shape)
    out = _buffer(out, (work.num_tokens, lora.hidden_size), out_dtype or down.dtype, down.device)
    if not work.num_pairs:
        return out
    if plan.token_block is not None:
        tokens = tokens_by_adapter
        if tokens is None:
            tokens = group_tokens(
                work.token_adapters, num_adapters=work.num_adapters, adapter_enabled=work.adapter_enabled, block=plan.token_block
            )
        given = (tokens.num_tokens, tokens.top_k, tokens.num_adapters, tokens.num_experts, tokens.block_m)
        expected = (work.num_tokens, 1, work.num_adapters, 1, plan.token_block)
        check("tokens_by_adapter", f"(num_tokens, top_k, num_adapters, num_experts, block_m) {expected}", given, holds=given == expected)
        if plan.sum_experts is not None:
            _sum_experts(down, hidden, lora, work, plan.sum_experts, topk_ids, tokens, all_experts_local, out)
        elif plan.expand_sum is not None:
            _expand_sum(down, hidden, lora, work, plan.expand_sum, tokens, all_experts_local, out)
    else:
        _add_down(down, hidden, lora, work, plan)
        _sum_choices(down, topk_ids, work, all_experts_local, out)
    return out


def group_tokens(
    token_adapters: torch.Tensor, *, num_adapters: int, adapter_enabled: torch.Tensor | None = None, block: int = TOKEN_BLOCK
) -> WorkList:
    """Tokens by adapter in tiles of `plan.token_block`: depends on the batch alone, so one serves all layers of a forward pass."""
    no_choice = torch.zeros((token_adapters.shape[0], 1), dtype=torch.int32, device=token_adapters.device)
    return build_work_list(
        no_choice, token_adapters, num_adapters=num_adapters, num_experts=1, block_m=block, adapter_enabled=adapter_enabled
    )


def _sum_experts(
    down: torch.Tensor,
    hidden: torch.Tensor,
    lora: ExpertLora,
    work: WorkList,
    tiles: TokenTiles,
    topk_ids: torch.Tensor,
    tokens: WorkList,
    all_experts_local: bool,
    out: torch.Tensor,
) -> None:
    check("plan.activate.parts", "1 where plan.sum_experts is given", hidden.shape[0], holds=hidden.shape[0] == 1)
    sum_experts_kernel[(tokens.max_tiles * triton.cdiv(lora.hidden_size, tiles.block_n),)](
        down,
        hidden,
        lora.down_b,
        out,
        topk_ids,
        work.order if lora.slot_ranks is None else lora.slot_ranks,
        work.places,
        tokens.order,
        tokens.tiles,
        tokens.num_tiles,
        tokens.max_tiles,
        *strides(lora.down_b),
        NUM_ADAPTERS=work.num_adapters,
        NUM_EXPERTS=work.num_experts,
        ALL_LOCAL=all_experts_local,
        TOP_K=work.top_k,
        N=lora.hidden_size,
        R=lora.rank,
        BLOCK_R=lora.block_r,
        HAS_RANKS=lora.slot_ranks is not None,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        STAGES=tiles.num_stages,
        **_options(tiles),
    )


def _expand_sum(
    down: torch.Tensor,
    hidden: torch.Tensor,
    lora: ExpertLora,
    work: WorkList,
    tiles: SumTiles,
    tokens: WorkList,
    all_experts_local: bool,
    out: torch.Tensor,
) -> None:
    fits = tiles.ring > tiles.lead >= 1 and work.block_m % tiles.block_m == 0 and TOKEN_BLOCK % tiles.block_t == 0
    check("plan.expand_sum", f"ring > lead, block_m in {work.block_m}, block_t in {TOKEN_BLOCK}", tiles, holds=fits)
    chunks = triton.cdiv(lora.hidden_size, tiles.chunk_n)
    phases = (work.num_adapters + 1) * chunks + tiles.lead
    tile_parts, token_parts = work.block_m // tiles.block_m, tokens.block_m // tiles.block_t
    max_items = chunks * (work.max_tiles * tile_parts + tokens.max_tiles * token_parts)
    new, overlap = {"dtype": torch.int32, "device": down.device}, overlap_on(down.device, Overlap.INPUTS_FRESH)
    schedule, num_items = torch.empty((max_items, ITEM), **new), torch.empty(1, **new)
    counts = torch.empty(2 * work.num_adapters * chunks, **new)
    deltas = torch.empty((tiles.ring, work.num_pairs, tiles.chunk_n), dtype=lora.down_b.dtype, device=down.device)
    schedule_kernel[(phases,)](
        work.tiles,
        work.starts,
        work.max_tiles,
        tokens.tiles,
        tokens.starts,
        tokens.max_tiles,
        schedule,
        num_items,
        counts,
        tiles.lead,
        tiles.ring,
        NUM_ADAPTERS=work.num_adapters,
        NUM_EXPERTS=work.num_experts,
        CHUNKS=chunks,
        TILE_PARTS=tile_parts,
        BLOCK_M=tiles.block_m,
        TOKEN_PARTS=token_parts,
        BLOCK_T=tiles.block_t,
        PHASES=triton.next_power_of_2(phases),
        BLOCK=128,
        OVERLAP=int(overlap),
        **launch_options(overlap, num_warps=4),
    )
    expand_sum_kernel[(max_items,)](
        down,
        hidden,
        lora.down_b,
        out,
        deltas,
        work.order if lora.slot_ranks is None else lora.slot_ranks,
        work.order,
        work.places,
        tokens.order,
        tokens.places,
        schedule,
        num_items,
        counts,
        work.num_pairs,
        tiles.ring,
        *strides(lora.down_b),
        NUM_ADAPTERS=work.num_adapters,
        NUM_EXPERTS=work.num_experts,
        ALL_LOCAL=all_experts_local,
        TOP_K=work.top_k,
        N=lora.hidden_size,
        R=lora.rank,
        BLOCK_R=lora.block_r,
        HAS_RANKS=lora.slot_ranks is not None,
        SPLITS=hidden.shape[0],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_T=tiles.block_t,
        CHUNK_N=tiles.chunk_n,
        OVERLAP=int(overlap),
        **(launch_options(overlap, num_warps=tiles.num_warps) | _options(tiles)),
    )


def _add_down(down: torch.Tensor, hidden: torch.Tensor, lora: ExpertLora, work: WorkList, plan: PrefillPlan) -> None:
    tiles = plan.add_down
    add_down_kernel[(_programs(work, tiles.block_m) * tiles.parts,)](
        down,
        hidden,
        lora.down_b,
        work.order,
        work.tiles,
        work.num_tiles,
        work.num_pairs,
        work.max_tiles,
        *strides(lora.down_b),
        NUM_EXPERTS=work.num_experts,
        NO_ADAPTER=work.num_adapters * work.num_experts,
        N=lora.hidden_size,
        R=lora.rank,
        BLOCK_R=lora.block_r,
        SPLITS=plan.activate.parts,
        PARTS=tiles.parts,
        LIST_BLOCK=work.block_m,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )


def _sum_choices(down: torch.Tensor, topk_ids: torch.Tensor, work: WorkList, all_experts_local: bool, out: torch.Tensor) -> None:
    size, block_t, block_n = down.shape[1], 4, 512
    sum_choices_kernel[(triton.cdiv(work.num_tokens, block_t) * triton.cdiv(size, block_n),)](
        down,
        topk_ids,
        out,
        work.num_tokens,
        NUM_EXPERTS=work.num_experts,
        ALL_LOCAL=all_experts_local,
        TOP_K=work.top_k,
        N=size,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        num_warps=4,
    )


def _options(tiles: Tiles | SumTiles | TokenTiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    return options


def _buffer(given: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    check_tensor("out", given, shape=shape, dtypes=DTYPES, device=device)
    return given


def _hidden_dtype(lora: ExpertLora, plan: PrefillPlan) -> torch.dtype:
    """Of w2's shrink: partials are summed in float32, a sum is what the product reads."""
    return torch.float32 if plan.activate.parts > 1 else lora.down_b.dtype


def _programs(work: WorkList, block_m: int) -> int:
    return work.max_tiles * (work.block_m // block_m)


def _check_work(lora: ExpertLora, work: WorkList, plan: PrefillPlan) -> None:
    given = (work.num_adapters, work.num_experts, work.block_m)
    expected = (lora.num_adapters, lora.num_experts, plan.block_m)
    check("work", f"(num_adapters, num_experts, block_m) {expected}", given, holds=given == expected)
