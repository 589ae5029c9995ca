"""moe_expand_: checks its arguments, chooses tiles, launches."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, check, check_routing, check_slots, check_stacks, check_tensor, check_values, three
from lora_kernels.configs import Tiles, padded_rank, tuned
from lora_kernels.launch import Overlap, launch_options, overlap_on, widens_by_ptx
from lora_kernels.moe_expand.kernel import expand_groups_kernel, expand_pairs_kernel
from lora_kernels.pair_groups import GROUP, PairGroups


def moe_expand_(
    out: torch.Tensor,
    partials: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    topk_weights: torch.Tensor | None = None,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
    groups: PairGroups | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.IDS_SETTLED,
) -> None:
    """Adds topk_weight * B h to the base output, in place; rows without an adapter keep their bits.

    out: [num_tokens, top_k, sum of N], slices side by side. partials: moe_shrink's, of the same ids. lora_b: 1 to 3 stacks
    [slots, num_experts or 1, N, R] in out's dtype. topk_weights: [num_tokens, top_k], given for w2. The rest as in moe_shrink.

    :raises ValueError: an argument does not fit.
    """
    num_pairs = check_routing(token_slots, topk_ids, device=out.device)
    num_tokens, top_k = topk_ids.shape
    slots, b_experts, _, rank = check_stacks("lora_b", lora_b, num_experts=num_experts, like=out)
    for index, stack in enumerate(lora_b):
        check(f"lora_b[{index}]", f"rank {rank}", f"rank {stack.shape[3]}", holds=stack.shape[3] == rank)
    widths = [stack.shape[2] for stack in lora_b]
    check_tensor("out", out, shape=(num_tokens, top_k, sum(widths)), dtypes=DTYPES, device=out.device)
    shape = (None, num_pairs, len(lora_b), padded_rank(rank))
    check_tensor("partials", partials, shape=shape, dtypes=(torch.float32,), device=out.device)
    check_slots(slots, slot_enabled, slot_ranks, device=out.device)
    check_values(token_slots=(token_slots, slots), topk_ids=(topk_ids, num_experts), slot_ranks=slot_ranks, rank=rank)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, shape=(num_tokens, top_k), dtypes=DTYPES, device=out.device)
    if num_pairs == 0:
        return
    tiles = tiles or tuned("moe_expand", out, rank=rank, width=sum(widths), slices=len(lora_b), adapters=slots, rows=num_pairs)
    overlap = overlap_on(out.device, overlap)
    splits = partials.shape[0]
    steps = tiles.steps
    b0, b1, b2 = three(lora_b)
    n0, n1, n2 = [*widths, 0, 0][:3]
    constants = {
        "EXPERTS": num_experts,
        "B_EXPERTS": b_experts,
        "N0": n0,
        "N1": n1,
        "N2": n2,
        "R": rank,
        "R_PAD": padded_rank(rank),
        "SLICES": len(lora_b),
        "BLOCK_N": tiles.block,
        "EVEN_N": all(width % (tiles.block * steps) == 0 for width in widths),
        "HAS_WEIGHTS": topk_weights is not None,
        "HAS_RANKS": slot_ranks is not None,
        "PDL": int(overlap),
    }
    options = launch_options(overlap, num_warps=tiles.num_warps)
    ranks = token_slots if slot_ranks is None else slot_ranks
    weights = partials if topk_weights is None else topk_weights
    blocks = sum(triton.cdiv(width, tiles.block * steps) for width in widths)
    if tiles.path == "groups":
        check("groups", "the pairs' groups for tiles of path groups", groups, holds=groups is not None)
        assert groups is not None
        expand_groups_kernel[(blocks * groups.num_groups,)](
            partials, b0, b1, b2, out, weights, groups.records, ranks, num_pairs, splits,
            GROUP=GROUP, STEPS=steps, STAGES=tiles.stages, SPLITS_PAD=triton.next_power_of_2(splits), **constants, **options,
        )  # fmt: skip
    else:
        expand_pairs_kernel[(num_pairs, blocks)](
            partials, b0, b1, b2, out, weights, token_slots, topk_ids, token_slots if slot_enabled is None else slot_enabled,
            ranks, num_pairs, slots, splits, TOP_K=top_k, SPLITS_PAD=triton.next_power_of_2(splits),
            STEPS=steps, HAS_ENABLED=slot_enabled is not None, PTX=widens_by_ptx(out), **constants, **options,
        )  # fmt: skip
