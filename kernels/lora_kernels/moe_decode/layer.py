"""The fused launches of an expert layer at decode: moe_shrink → (base GEMM 1) → expand_activate → (base GEMM 2) → expand_sum."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, GRID_LIMIT, check, check_routing, check_slots, check_stacks, check_tensor
from lora_kernels.configs import Tiles, padded_rank
from lora_kernels.launch import Overlap, launch_options, overlap_on, widens_by_ptx
from lora_kernels.moe_decode.kernel import expand_activate_kernel, expand_sum_kernel
from lora_kernels.moe_prefill.activation import Activation


def expand_activate(
    base: torch.Tensor,
    partials: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    down_a: torch.Tensor,
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation,
    num_experts: int,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.IDS_SETTLED,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation(base + B h) of every pair, [num_pairs, I] in base's dtype; its w2 shrink, partials for expand_sum or moe_expand_).

    base: [num_tokens, top_k, 2 I], the base's w13 output with its bias. partials: moe_shrink's of w13. lora_b: w13's stacks, as
    many as the activation wants. down_a: w2's [slots, num_experts or 1, R, I]. The rest as in moe_shrink. Activated rows whose
    expert lives elsewhere stay unwritten, and so do partials of pairs without an adapter. out: a buffer for the activated rows.

    :raises ValueError: an argument does not fit.
    """
    num_pairs = check_routing(token_slots, topk_ids, device=base.device)
    num_tokens, top_k = topk_ids.shape
    check("lora_b", f"{activation.num_slices} stacks for {activation.value}", f"{len(lora_b)}", holds=len(lora_b) == activation.num_slices)
    slots, b_experts, rows, rank = check_stacks("lora_b", lora_b, num_experts=num_experts, like=base)
    width = rows if activation.num_slices == 2 else rows // 2
    for index, stack in enumerate(lora_b):
        shape = (slots, b_experts, 2 * width // len(lora_b), rank)
        check(f"lora_b[{index}]", f"shape {list(shape)}", f"shape {list(stack.shape)}", holds=stack.shape == shape)
    check_tensor("base", base, shape=(num_tokens, top_k, 2 * width), dtypes=DTYPES, device=base.device)
    shape = (None, num_pairs, len(lora_b), padded_rank(rank))
    check_tensor("partials", partials, shape=shape, dtypes=(torch.float32,), device=base.device)
    check_tensor("down_a", down_a, shape=(slots, None, rank, width), dtypes=(base.dtype,), device=base.device)
    check("down_a", f"{num_experts} experts or 1", f"{down_a.shape[1]} experts", holds=down_a.shape[1] in (1, num_experts))
    check_slots(slots, slot_enabled, slot_ranks, device=base.device)
    tiles = tiles or Tiles(path="pairs", block=max(16, min(128, 4096 // padded_rank(rank))))
    blocks = triton.cdiv(width, tiles.block)
    check("lora_b", f"at most {GRID_LIMIT} blocks", f"{blocks}", holds=blocks <= GRID_LIMIT)
    out = _buffer(out, (num_pairs, width), base)
    down = torch.empty(blocks, num_pairs, 1, padded_rank(rank), dtype=torch.float32, device=base.device)
    if num_pairs == 0:
        return out, down
    overlap = overlap_on(base.device, overlap)
    expand_activate_kernel[(num_pairs, blocks)](
        base,
        partials,
        lora_b[0],
        lora_b[-1],
        down_a,
        out,
        down,
        token_slots,
        topk_ids,
        token_slots if slot_enabled is None else slot_enabled,
        token_slots if slot_ranks is None else slot_ranks,
        num_pairs,
        slots,
        len(partials),
        TOP_K=top_k,
        EXPERTS=num_experts,
        B_EXPERTS=b_experts,
        A_EXPERTS=down_a.shape[1],
        N=width,
        R=rank,
        R_PAD=padded_rank(rank),
        SPLITS_PAD=triton.next_power_of_2(len(partials)),
        BLOCK_N=tiles.block,
        GPT_OSS=activation is Activation.GPT_OSS,
        FAST=base.is_cuda,
        HAS_ENABLED=slot_enabled is not None,
        HAS_RANKS=slot_ranks is not None,
        PTX=widens_by_ptx(base),
        PDL=int(overlap),
        **launch_options(overlap, num_warps=tiles.num_warps),
    )
    return out, down


def expand_sum(
    base: torch.Tensor,
    partials: torch.Tensor,
    lora_b: torch.Tensor,
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_experts: int,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.IDS_SETTLED,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a token's choices of base + topk_weight * B h: [num_tokens, H] in base's dtype.

    base: [num_tokens, top_k, H], the base's w2 output, routing weights in it; choices whose expert lives elsewhere are not read.
    partials: of w2, by expand_activate or moe_shrink. lora_b: [slots, num_experts or 1, H, R]. The rest as in moe_shrink. overlap:
    INPUTS_FRESH where the launch before this one makes base. out: a buffer for the result.

    :raises ValueError: an argument does not fit.
    """
    num_pairs = check_routing(token_slots, topk_ids, device=base.device)
    num_tokens, top_k = topk_ids.shape
    slots, b_experts, width, rank = check_stacks("lora_b", [lora_b], num_experts=num_experts, like=base)
    check_tensor("base", base, shape=(num_tokens, top_k, width), dtypes=DTYPES, device=base.device)
    shape = (None, num_pairs, 1, padded_rank(rank))
    check_tensor("partials", partials, shape=shape, dtypes=(torch.float32,), device=base.device)
    check_tensor("topk_weights", topk_weights, shape=(num_tokens, top_k), dtypes=DTYPES, device=base.device)
    check_slots(slots, slot_enabled, slot_ranks, device=base.device)
    out = _buffer(out, (num_tokens, width), base)
    if num_pairs == 0:
        return out
    tiles = tiles or Tiles(path="pairs", block=max(16, min(64, 2048 // padded_rank(rank))))
    blocks = triton.cdiv(width, tiles.block)
    check("lora_b", f"at most {GRID_LIMIT} blocks", f"{blocks}", holds=blocks <= GRID_LIMIT)
    overlap = overlap_on(base.device, overlap)
    expand_sum_kernel[(num_tokens, blocks)](
        base,
        partials,
        lora_b,
        topk_weights,
        out,
        token_slots,
        topk_ids,
        token_slots if slot_enabled is None else slot_enabled,
        token_slots if slot_ranks is None else slot_ranks,
        num_tokens,
        slots,
        len(partials),
        TOP_K=top_k,
        EXPERTS=num_experts,
        B_EXPERTS=b_experts,
        N=width,
        R=rank,
        R_PAD=padded_rank(rank),
        SPLITS_PAD=triton.next_power_of_2(len(partials)),
        BLOCK_N=tiles.block,
        HAS_ENABLED=slot_enabled is not None,
        HAS_RANKS=slot_ranks is not None,
        PTX=widens_by_ptx(base),
        PDL=int(overlap),
        **launch_options(overlap, num_warps=tiles.num_warps),
    )
    return out


def _buffer(given: torch.Tensor | None, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_tensor("out", given, shape=shape, dtypes=(like.dtype,), device=like.device)
    return given
