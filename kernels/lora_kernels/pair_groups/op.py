"""Groups of (token, expert) pairs that share an (adapter, expert) cell, made on the device: once per layer, for w13 and w2."""

from typing import NamedTuple

import torch
import triton

from lora_kernels.arguments import IDS, check, check_tensor, check_values
from lora_kernels.launch import Overlap, launch_options, overlap_on
from lora_kernels.pair_groups.kernel import group_pairs_kernel

GROUP = 8
"""Most pairs of a group: the columns of one matrix instruction."""
FEWEST_PLACES = 256
"""Smaller batches are sorted as if they had so many pairs: one compilation for them."""
PROGRAMS = 128
"""Of a launch: each places an equal share of the pairs and clears one of the cells."""
MOST_PAIRS = 4096
MOST_CELLS = 4096


class PairGroups(NamedTuple):
    """records: [num_cells + overflow, 2 * GROUP] int32: cell, number of pairs (0: none), and from GROUP on the pairs.

    A cell's first GROUP pairs are the record of its number, slot * num_experts + expert; those behind the cells hold the rest of
    cells with more. What a record has no use for is not initialised.
    """

    records: torch.Tensor
    num_groups: int
    """Records to look at: beyond them is one that may be written and is never used."""


def can_group(num_pairs: int, *, num_slots: int, num_experts: int) -> bool:
    return num_pairs <= MOST_PAIRS and num_slots * num_experts <= MOST_CELLS


def group_pairs(
    token_slots: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_slots: int,
    num_experts: int,
    slot_enabled: torch.Tensor | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> PairGroups:
    """Leaves out pairs without an adapter, of a disabled adapter, or with an expert that is not here (-1).

    token_slots: [num_tokens] int, negative where a token has no adapter. topk_ids: [num_tokens, top_k] int.
    slot_enabled: [>= num_slots] int32, 0 for an adapter that leaves this layer alone.

    :raises ValueError: an argument does not fit, or there are more pairs or cells than one launch sorts.
    """
    device = topk_ids.device
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=IDS, device=device)
    check_tensor("token_slots", token_slots, shape=(topk_ids.shape[0],), dtypes=IDS, device=device)
    if slot_enabled is not None:
        check_tensor("slot_enabled", slot_enabled, shape=(None,), dtypes=IDS, device=device)
        check("slot_enabled", f"{num_slots} or more", len(slot_enabled), holds=len(slot_enabled) >= num_slots)
    check_values(token_slots=(token_slots, num_slots), topk_ids=(topk_ids, num_experts))
    num_pairs, num_cells = topk_ids.numel(), num_slots * num_experts
    check("topk_ids", f"at most {MOST_PAIRS} pairs", f"{num_pairs}", holds=num_pairs <= MOST_PAIRS)
    check("num_slots * num_experts", f"1 to {MOST_CELLS} cells", num_cells, holds=1 <= num_cells <= MOST_CELLS)
    records = torch.empty(num_cells + num_pairs // GROUP + 1, 2 * GROUP, dtype=torch.int32, device=device)
    if num_pairs == 0:
        return PairGroups(records, 0)
    overlap = overlap_on(device, overlap)
    pairs_pad = triton.next_power_of_2(max(num_pairs, FEWEST_PLACES))
    group_pairs_kernel[(PROGRAMS,)](
        token_slots,
        topk_ids,
        token_slots if slot_enabled is None else slot_enabled,
        records,
        num_pairs,
        num_slots,
        TOP_K=topk_ids.shape[1],
        EXPERTS=num_experts,
        PAIRS_PAD=pairs_pad,
        OWN=pairs_pad // PROGRAMS,
        OWN_CELLS=triton.next_power_of_2(triton.cdiv(num_cells, PROGRAMS)),
        GROUP=GROUP,
        HAS_ENABLED=slot_enabled is not None,
        PDL=int(overlap),
        **launch_options(overlap, num_warps=8 if pairs_pad <= 512 else 16),
    )
    return PairGroups(records, num_cells + triton.cdiv(num_pairs, GROUP))
