"""dense_shrink: checks its arguments, chooses tiles, launches."""

from collections.abc import Sequence

import torch
import triton

from lora_kernels.arguments import DTYPES, GRID_LIMIT, IDS, check, check_slots, check_stacks, check_tensor, three
from lora_kernels.configs import Tiles, padded_rank, tuned
from lora_kernels.dense_shrink.kernel import shrink_slots_kernel
from lora_kernels.launch import Overlap, launch_options, overlap_on
from lora_kernels.moe_shrink.kernel import shrink_pairs_kernel

MOST_TOKENS_A_PROGRAM = 64


def dense_shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    token_slots: torch.Tensor,
    *,
    slot_ranks: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> torch.Tensor:
    """Float32 partials of h = A x, [splits, num_tokens, slices, padded rank], for dense_expand_. Base rows stay unwritten.

    x: [num_tokens, K]. lora_a: 1 to 3 stacks [slots, 1, R, K]. token_slots: [num_tokens] int; out of range counts as no adapter.

    :raises ValueError: an argument does not fit.
    """
    check_tensor("x", x, shape=(None, None), dtypes=DTYPES, device=x.device)
    num_tokens, k = x.shape
    check_tensor("token_slots", token_slots, shape=(num_tokens,), dtypes=IDS, device=x.device)
    slots, _, rank, _ = check_stacks("lora_a", lora_a, num_experts=1, like=x)
    for index, stack in enumerate(lora_a):
        check(f"lora_a[{index}]", f"[*, *, {rank}, {k}]", list(stack.shape), holds=stack.shape[2:] == (rank, k))
    check_slots(slots, None, slot_ranks, device=x.device)
    tiles = tiles or tuned("dense_shrink", x, rank=rank, width=k, slices=len(lora_a), adapters=slots, rows=num_tokens)
    splits = triton.cdiv(k, tiles.block * tiles.steps)
    partials = torch.empty(splits, num_tokens, len(lora_a), padded_rank(rank), dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return partials
    overlap = overlap_on(x.device, overlap)
    a0, a1, a2 = three(lora_a)
    constants = {
        "K": k,
        "R": rank,
        "R_PAD": padded_rank(rank),
        "SLICES": len(lora_a),
        "BLOCK_K": tiles.block,
        "STEPS": tiles.steps,
        "HAS_RANKS": slot_ranks is not None,
        "PDL": int(overlap),
    }
    options = launch_options(overlap, num_warps=tiles.num_warps)
    ranks = token_slots if slot_ranks is None else slot_ranks
    if tiles.path == "slots":
        check("lora_a", f"at most {GRID_LIMIT // len(lora_a)} slots", f"{slots}", holds=slots * len(lora_a) <= GRID_LIMIT)
        tokens = tokens_a_program(num_tokens)
        shrink_slots_kernel[(triton.cdiv(num_tokens, tokens), slots * len(lora_a), splits)](
            x, a0, a1, a2, partials, token_slots, ranks, num_tokens, TOKENS=tokens, STAGES=tiles.stages, **constants, **options
        )  # fmt: skip
    else:
        shrink_pairs_kernel[(num_tokens * len(lora_a), splits)](
            x, a0, a1, a2, partials, token_slots, token_slots, token_slots, ranks, num_tokens, slots,
            TOP_K=1, PAIRS_PER_ROW=1, EXPERTS=0, A_EXPERTS=1, HAS_ENABLED=False, **constants, **options,
        )  # fmt: skip
    return partials


def tokens_a_program(num_tokens: int) -> int:
    return min(MOST_TOKENS_A_PROGRAM, max(16, triton.next_power_of_2(num_tokens)))
