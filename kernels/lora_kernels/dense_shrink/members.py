"""Which tokens a program serves: those of one adapter slot, found by the program itself or in a list made before."""

import triton
import triton.language as tl


@triton.jit
def members_of(slots_ptr, slot, block, num_tokens, TOKENS: tl.constexpr):
    """(tokens of the block, whether each has the slot, how many have it up to and with it, how many there are)."""
    t = block * TOKENS + tl.arange(0, TOKENS)
    mine = (tl.load(slots_ptr + t, mask=t < num_tokens, other=-1) == slot).to(tl.int32)
    return t, mine, tl.cumsum(mine, 0), tl.sum(mine, 0)


@triton.jit
def members_from(t, mine, through, count, first, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """(tokens, whether there is one) of the members from the first-th on, ROWS at most."""
    if ROWS >= TOKENS:
        rows = t
        inside = mine > 0
    else:
        place = first + tl.arange(0, ROWS)
        here = (mine[:, None] > 0) & (through[:, None] == place[None, :] + 1)
        rows = tl.sum(tl.where(here, t[:, None], 0), 0)
        inside = place < count
    return rows, inside


@triton.jit
def listed_rows(groups_ptr, starts_ptr, counts_ptr, index, num_groups, num_slots, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """(slot, first place in the order, tokens) of the index-th run of ROWS tokens of one slot; no tokens past the last run."""
    g = tl.arange(0, GROUPS)
    inside = g < num_groups
    slots = tl.load(groups_ptr + g, mask=inside, other=-1)
    counts = tl.load(counts_ptr + g, mask=inside, other=0)
    starts = tl.load(starts_ptr + g, mask=inside, other=0)
    runs = tl.where((slots >= 0) & (slots < num_slots), (counts + ROWS - 1) // ROWS, 0)
    through = tl.cumsum(runs, 0)
    here = (index >= through - runs) & (index < through)
    skip = tl.sum(tl.where(here, (index - through + runs) * ROWS, 0), 0)
    count = tl.minimum(tl.sum(tl.where(here, counts, 0), 0) - skip, ROWS)
    return tl.sum(tl.where(here, slots, 0), 0), tl.sum(tl.where(here, starts, 0), 0) + skip, count
