"""Groups (token, expert, adapter) pairs by cell in three launches: count, scan, scatter. A stable counting sort.

No floating point, no host sync, no state left between calls, and grids that follow from tensor shapes alone, so a
captured graph replays on new routing. The order is the same from run to run: a pair's place in its cell is its rank
among the pairs before it, not its turn at an atomic.
"""

import triton
import triton.language as tl

CHUNK = 256
"""Pairs one program counts and scatters; ranking them inside a chunk costs CHUNK comparisons a pair."""

COMPARED_AT_ONCE = 16
CHUNKS_PER_STEP = 512
CELLS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    topk_ids,  # [num_pairs]
    token_adapters,  # [num_tokens]
    adapter_enabled,  # [num_adapters] or the same as token_adapters
    keys,  # [num_chunks * CHUNK] int32
    counts,  # [num_chunks, BINS] int32
    finished,  # [1] int32, zeroed here for the scan
    num_pairs,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes each pair's cell, and how many pairs of each cell the chunk holds."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = pair < num_pairs
    expert = tl.load(topk_ids + pair, mask=inside, other=-1).to(tl.int32)
    adapter = tl.load(token_adapters + pair // TOP_K, mask=inside, other=-1).to(tl.int32)
    adapted = (adapter >= 0) & (adapter < NUM_ADAPTERS)
    if HAS_ENABLED:
        adapted = adapted & (tl.load(adapter_enabled + adapter, mask=adapted, other=0) != 0)
    routed = inside & (expert >= 0) & (expert < NUM_EXPERTS)
    key = tl.where(adapted, adapter * NUM_EXPERTS + expert, NUM_ADAPTERS * NUM_EXPERTS)
    key = tl.where(routed, key, NUM_ADAPTERS * NUM_EXPERTS + 1)
    tl.store(keys + pair, key)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(key, BINS))
    if chunk == 0:
        tl.store(finished, 0)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(
    counts,  # [num_chunks, BINS]: counts in, pairs of the cell in earlier chunks out
    totals,  # [BINS] int32
    starts,  # [BINS] int32
    first_tiles,  # [BINS] int32
    num_tiles,  # [1] int32
    finished,
    num_chunks,
    NUM_CELLS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS_PER_STEP: tl.constexpr,
    CELLS_PER_PROGRAM: tl.constexpr,
):
    """Sums the counts over chunks, then (the last program to finish) over cells."""
    cell = tl.program_id(0) * CELLS_PER_PROGRAM + tl.arange(0, CELLS_PER_PROGRAM)
    before = tl.zeros((CELLS_PER_PROGRAM,), tl.int32)
    for first in range(0, num_chunks, CHUNKS_PER_STEP):
        chunk = first + tl.arange(0, CHUNKS_PER_STEP)
        place = counts + chunk[:, None].to(tl.int64) * BINS + cell[None, :]
        inside = (chunk < num_chunks)[:, None]
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, before[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        before += tl.sum(count, 0)
    tl.store(totals + cell, before)
    tl.debug_barrier()
    if tl.atomic_add(finished, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        every = tl.arange(0, BINS)
        count = tl.load(totals + every, mask=every < NUM_CELLS, other=0, cache_modifier=".cg")
        tiles = (count + BLOCK_M - 1) // BLOCK_M
        tl.store(starts + every, tl.cumsum(count, 0) - count)
        tl.store(first_tiles + every, tl.cumsum(tiles, 0) - tiles)
        tl.store(num_tiles, tl.sum(tiles))


@triton.jit(do_not_specialize=["max_tiles"])
def scatter_kernel(
    keys,
    counts,
    totals,
    starts,
    first_tiles,
    order,  # [num_pairs] int32
    tiles,  # [3, max_tiles] int32
    max_tiles,
    NUM_CELLS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPARED_AT_ONCE: tl.constexpr,
):
    """Puts each pair at its place in the order; the first pair of a tile writes the tile."""
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    key = tl.load(keys + chunk * CHUNK + lane)
    rank = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, CHUNK, COMPARED_AT_ONCE):
        other_lane = first + tl.arange(0, COMPARED_AT_ONCE)
        other = tl.load(keys + chunk * CHUNK + other_lane)
        ahead = (key[:, None] == other[None, :]) & (other_lane[None, :] < lane[:, None])
        rank += tl.sum(ahead.to(tl.int32), 1)
    listed = key < NUM_CELLS
    rank += tl.load(counts + chunk * BINS + key, mask=listed, other=0)
    place = tl.load(starts + key, mask=listed, other=0) + rank
    tl.store(order + place, chunk * CHUNK + lane, mask=listed)
    opens = listed & (rank % BLOCK_M == 0)
    tile = tl.load(first_tiles + key, mask=opens, other=0) + rank // BLOCK_M
    rows = tl.minimum(tl.load(totals + key, mask=opens, other=0) - rank, BLOCK_M)
    tl.store(tiles + tile, key, mask=opens)
    tl.store(tiles + max_tiles + tile, place, mask=opens)
    tl.store(tiles + 2 * max_tiles + tile, rows, mask=opens)


@triton.jit
def load_tile(tiles, num_tiles, max_tiles, index, LIST_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(cell, first place in the order, rows) of the index-th run of BLOCK_M rows; rows <= 0 where there is none.

    A kernel whose BLOCK_M is smaller than the list's block walks each tile in LIST_BLOCK // BLOCK_M parts.
    """
    PARTS: tl.constexpr = LIST_BLOCK // BLOCK_M
    tile = index // PARTS
    skip = index % PARTS * BLOCK_M
    exists = tile < tl.load(num_tiles)
    cell = tl.load(tiles + tile, mask=exists, other=0)
    start = tl.load(tiles + max_tiles + tile, mask=exists, other=0)
    rows = tl.load(tiles + 2 * max_tiles + tile, mask=exists, other=0)
    return cell, start + skip, tl.minimum(rows - skip, BLOCK_M)
