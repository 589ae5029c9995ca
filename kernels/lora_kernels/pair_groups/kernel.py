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
    records_ptr,
    num_pairs,
    num_slots,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS_PAD: tl.constexpr,
    OWN: tl.constexpr,
    OWN_CELLS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid [programs that between them own all pairs and all cells].

    A cell's first GROUP pairs are the record at its number. Each further GROUP of them, from place p among the pairs sorted by
    cell, is the overflow record p // GROUP: no two share one, as they begin at least GROUP apart. The pair before place
    GROUP * e is in the only cell that can overflow into e, and writes whether it does.
    """
    if PDL == 1:
        gdc_wait()
        gdc_launch_dependents()
    NONE: tl.constexpr = 1 << 30
    everyone = tl.arange(0, PAIRS_PAD)
    cells = cells_of(slots_ptr, experts_ptr, enabled_ptr, everyone, num_pairs, num_slots, TOP_K, EXPERTS, NONE, HAS_ENABLED)
    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    my_cells = cells_of(slots_ptr, experts_ptr, enabled_ptr, mine, num_pairs, num_slots, TOP_K, EXPERTS, NONE, HAS_ENABLED)
    earlier = everyone[None, :] < mine[:, None]
    same = cells[None, :] == my_cells[:, None]
    both = tl.sum(tl.where(same, tl.where(earlier, 65537, 1), 0), axis=1)
    held = both % 65536
    before = both // 65536
    place = before + tl.sum((cells[None, :] < my_cells[:, None]).to(tl.int32), axis=1)
    own_cells = tl.program_id(0) * OWN_CELLS + tl.arange(0, OWN_CELLS)
    empty = tl.sum((cells[None, :] == own_cells[:, None]).to(tl.int32), axis=1) == 0
    total = tl.sum((cells < NONE).to(tl.int32), axis=0)

    if PDL == 2:  # the memory written may still be read by launches before
        gdc_wait()
        gdc_launch_dependents()
    num_cells = num_slots * EXPERTS
    tl.store(records_ptr + own_cells * (2 * GROUP) + 1, 0, mask=empty & (own_cells < num_cells))
    used = my_cells < NONE
    chunk = before // GROUP
    overflow = num_cells + (place - before % GROUP) // GROUP
    record = records_ptr + tl.where(chunk == 0, my_cells, overflow) * (2 * GROUP)
    tl.store(record + GROUP + before % GROUP, mine, mask=used)
    first = used & (before == 0)
    tl.store(record, my_cells, mask=first)
    tl.store(record + 1, tl.minimum(held, GROUP), mask=first)
    # Of the record that begins after this place: what this cell still has beyond the chunks before it.
    left = held - (chunk + 1) * GROUP
    gate = used & (place % GROUP == GROUP - 1)
    record = records_ptr + (num_cells + (place + 1) // GROUP) * (2 * GROUP)
    tl.store(record, my_cells, mask=gate)
    tl.store(record + 1, tl.minimum(tl.maximum(left, 0), GROUP), mask=gate)
    if tl.program_id(0) == 0:
        overflows = tl.arange(0, PAIRS_PAD // GROUP)
        unreached = (overflows * GROUP > total) | (overflows == 0)
        tl.store(records_ptr + (num_cells + overflows) * (2 * GROUP) + 1, 0, mask=unreached & (overflows <= num_pairs // GROUP))


@triton.jit
def load_group(records_ptr, group, GROUP: tl.constexpr):
    """(cell, count, pairs [GROUP]) of a record: reads that do not wait for each other. Pairs are 0 past the count."""
    record = records_ptr + group * (2 * GROUP)
    m = tl.arange(0, GROUP)
    cell = tl.load(record)
    count = tl.load(record + 1)
    pairs = tl.load(record + GROUP + m)
    return cell, count, tl.where(m < count, pairs, 0)
