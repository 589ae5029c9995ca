"""Sorts a decode batch's pairs by cell in one launch: no atomics, no host, every program derives what it needs itself."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def cells_of(slots_ptr, experts_ptr, enabled_ptr, pairs, num_pairs, num_slots, TOP_K, EXPERTS, NO_CELL, HAS_ENABLED: tl.constexpr):
    """slot * EXPERTS + expert of each pair, NO_CELL where it has no adapter."""
    there = pairs < num_pairs
    slot = tl.load(slots_ptr + pairs // TOP_K, mask=there, other=-1).to(tl.int32)
    expert = tl.load(experts_ptr + pairs, mask=there, other=-1).to(tl.int32)
    used = (slot >= 0) & (slot < num_slots) & (expert >= 0) & (expert < EXPERTS)
    if HAS_ENABLED:
        used = used & (tl.load(enabled_ptr + slot, mask=used, other=0) != 0)
    return tl.where(used, slot * EXPERTS + expert, NO_CELL)


@triton.jit(do_not_specialize=["num_pairs", "num_slots"])
def group_pairs_kernel(
    slots_ptr,
    experts_ptr,
    enabled_ptr,
    order_ptr,
    groups_ptr,
    num_groups_ptr,
    num_pairs,
    num_slots,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CELLS_PAD: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [ceil(num_pairs / OWN)]: counts all pairs by cell, then places OWN of them.

    A pair's place: the pairs of lower cells, then those of its own cell before it. Each GROUP-th of a cell opens a group.
    """
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    everyone = tl.arange(0, PAIRS_PAD)
    all_cells = cells_of(slots_ptr, experts_ptr, enabled_ptr, everyone, num_pairs, num_slots, TOP_K, EXPERTS, CELLS_PAD, HAS_ENABLED)
    counts = tl.histogram(all_cells, CELLS_PAD, mask=all_cells < CELLS_PAD)
    blocks = (counts + GROUP - 1) // GROUP
    cell = tl.arange(0, CELLS_PAD)

    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    my_cells = cells_of(slots_ptr, experts_ptr, enabled_ptr, mine, num_pairs, num_slots, TOP_K, EXPERTS, CELLS_PAD, HAS_ENABLED)
    lower = cell[None, :] < my_cells[:, None]
    first = tl.sum(tl.where(lower, counts[None, :], 0), axis=1)
    first_group = tl.sum(tl.where(lower, blocks[None, :], 0), axis=1)
    held = tl.sum(tl.where(cell[None, :] == my_cells[:, None], counts[None, :], 0), axis=1)
    before = tl.zeros((OWN,), tl.int32)
    for start in range(0, tl.program_id(0) * OWN + OWN, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = cells_of(slots_ptr, experts_ptr, enabled_ptr, other, num_pairs, num_slots, TOP_K, EXPERTS, CELLS_PAD, HAS_ENABLED)
        same = (others[None, :] == my_cells[:, None]) & (other[None, :] < mine[:, None])
        before += tl.sum(same.to(tl.int32), axis=1)

    if PDL == 2:  # the memory written may still be read by launches before
        gdc_wait()
        gdc_launch_dependents()
    placed = my_cells < CELLS_PAD
    tl.store(order_ptr + first + before, mine, mask=placed)
    opens = placed & (before % GROUP == 0)
    record = groups_ptr + (first_group + before // GROUP) * 3
    tl.store(record, my_cells, mask=opens)
    tl.store(record + 1, first + before, mask=opens)
    tl.store(record + 2, tl.minimum(held - before, GROUP), mask=opens)
    if tl.program_id(0) == 0:
        tl.store(num_groups_ptr, tl.sum(blocks, axis=0))
