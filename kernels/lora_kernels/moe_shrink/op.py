"""moe_shrink: checks its arguments, chooses tiles, launches."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, check, check_routing, check_slots, check_stacks, check_tensor, check_values, three
from lora_kernels.configs import Tiles, padded_rank, tuned
from lora_kernels.launch import Overlap, launch_options, overlap_on, widens_by_ptx
from lora_kernels.moe_shrink.kernel import shrink_groups_kernel, shrink_pairs_kernel
from lora_kernels.pair_groups import GROUP, PairGroups


def moe_shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int,
    slot_enabled: torch.Tensor | None = None,
    slot_ranks: torch.Tensor | None = None,
    groups: PairGroups | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> torch.Tensor:
    """Float32 partials of h = A x, [splits, num_pairs, slices, padded rank], for moe_expand. Rows without an adapter stay unwritten.

    x: [num_tokens, K] (w13), or [num_pairs, K] (w2). lora_a: 1 to 3 stacks [slots, num_experts or 1, R, K].
    token_slots: [num_tokens] int. topk_ids: [num_tokens, top_k] int. Ids out of range count as no adapter.
    slot_enabled: [>= slots] int, 0 where an adapter leaves this layer alone. slot_ranks: [slots] int32, ranks below R.
    groups: of the same ids; needed for the path "groups" (which takes disabled adapters from them).

    :raises ValueError: an argument does not fit.
    """
    check_tensor("x", x, shape=(None, None), dtypes=DTYPES, device=x.device)
    num_pairs = check_routing(token_slots, topk_ids, device=x.device)
    num_tokens, top_k = topk_ids.shape
    check("x", f"{num_tokens} or {num_pairs} rows", f"{len(x)} rows", holds=len(x) in (num_tokens, num_pairs))
    slots, a_experts, rank, k = check_stacks("lora_a", lora_a, num_experts=num_experts, like=x)
    for index, stack in enumerate(lora_a):
        check(f"lora_a[{index}]", f"[*, *, {rank}, {x.shape[1]}]", list(stack.shape), holds=stack.shape[2:] == (rank, x.shape[1]))
    check_slots(slots, slot_enabled, slot_ranks, device=x.device)
    check_values(token_slots=(token_slots, slots), topk_ids=(topk_ids, num_experts), slot_ranks=slot_ranks, rank=rank)
    pairs_per_row = 1 if len(x) == num_pairs else top_k
    shape = {"rank": rank, "width": k, "slices": len(lora_a), "adapters": slots, "rows": num_pairs, "rows_sharing_x": pairs_per_row}
    tiles = tiles or tuned("moe_shrink", x, **shape)
    steps = min(tiles.steps, triton.cdiv(k, tiles.block))
    splits = triton.cdiv(k, tiles.block * steps)
    partials = torch.empty(splits, num_pairs, len(lora_a), padded_rank(rank), dtype=torch.float32, device=x.device)
    if num_pairs == 0:
        return partials
    overlap = overlap_on(x.device, overlap)
    a0, a1, a2 = three(lora_a)
    constants = {
        "PAIRS_PER_ROW": pairs_per_row,
        "EXPERTS": num_experts,
        "A_EXPERTS": a_experts,
        "K": k,
        "R": rank,
        "R_PAD": padded_rank(rank),
        "SLICES": len(lora_a),
        "BLOCK_K": tiles.block,
        "HAS_RANKS": slot_ranks is not None,
        "PDL": int(overlap),
    }
    options = launch_options(overlap, num_warps=tiles.num_warps)
    ranks = token_slots if slot_ranks is None else slot_ranks
    if tiles.path == "groups":
        check("groups", "the pairs' groups for tiles of path groups", groups, holds=groups is not None)
        assert groups is not None
        shrink_groups_kernel[(groups.num_groups * len(lora_a) * splits,)](
            x, a0, a1, a2, partials, groups.records, ranks, num_pairs,
            GROUP=GROUP, STEPS=steps, STAGES=tiles.stages, **constants, **options,
        )  # fmt: skip
    else:
        shrink_pairs_kernel[(num_pairs * len(lora_a), splits * tiles.r_parts)](
            x, a0, a1, a2, partials, token_slots, topk_ids, token_slots if slot_enabled is None else slot_enabled, ranks,
            num_pairs, slots, TOP_K=top_k, STEPS=steps, R_PARTS=tiles.r_parts, HAS_ENABLED=slot_enabled is not None,
            PTX=widens_by_ptx(x), **constants, **options,
        )  # fmt: skip
    return partials
