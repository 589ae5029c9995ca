"""Groups (token, expert, adapter) pairs by cell in three launches: sort chunks, scan, scatter. A stable counting sort.

No floating point, no host sync, no state left between calls, and grids that follow from tensor shapes alone, so a
captured graph replays on new routing. The order is the same from run to run: a pair's place in its cell is its rank
among the pairs before it, not its turn at an atomic.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 512
"""Pairs one program sorts."""

CHUNKS_PER_STEP = 256
CELLS_PER_PROGRAM = 8


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """First in every kernel launched to overlap the one before it: waits until that is complete, then lets the next begin."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_chunks_kernel(
    topk_ids,  # [num_pairs]
    token_adapters,  # [num_tokens]
    adapter_enabled,  # [num_adapters] or the same as token_adapters
    entries,  # [num_chunks, CHUNK] int32: cell * CHUNK + place in the chunk, ascending
    ranks,  # [num_chunks, CHUNK] int32: of an entry among those of its cell in the chunk
    counts,  # [num_chunks, BINS] int32
    finished,  # [1] int32, zeroed here for the scan
    num_pairs,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    HAS_ENABLED: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sorts a chunk's pairs by cell, ranks them, and counts each cell's."""
    wait_for_inputs(OVERLAP)
    chunk = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    pair = chunk * CHUNK + lane
    inside = pair < num_pairs
    expert = tl.load(topk_ids + pair, mask=inside, other=-1).to(tl.int32)
    adapter = tl.load(token_adapters + pair // TOP_K, mask=inside, other=-1).to(tl.int32)
    adapted = (adapter >= 0) & (adapter < NUM_ADAPTERS)
    if HAS_ENABLED:
        adapted = adapted & (tl.load(adapter_enabled + adapter, mask=adapted, other=0) != 0)
    routed = inside & (expert >= 0) & (expert < NUM_EXPERTS)
    cell = tl.where(adapted, adapter * NUM_EXPERTS + expert, NUM_ADAPTERS * NUM_EXPERTS)
    cell = tl.where(routed, cell, NUM_ADAPTERS * NUM_EXPERTS + 1)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    if chunk == 0:
        tl.store(finished, 0)
    entry = tl.sort(cell * CHUNK + lane)
    tl.store(entries + pair, entry)
    tl.debug_barrier()
    cell = entry // CHUNK
    before = tl.load(entries + pair - 1, mask=lane > 0, other=-CHUNK) // CHUNK
    after = tl.load(entries + pair + 1, mask=lane < CHUNK - 1, other=-CHUNK) // CHUNK
    rank = lane - tl.associative_scan(tl.where(cell != before, lane, 0), 0, _larger)
    tl.store(ranks + pair, rank)
    tl.store(counts + chunk * BINS + cell, rank + 1, mask=cell != after)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(
    counts,  # [num_chunks, BINS]: counts in, pairs of the cell in earlier chunks out
    totals,  # [BINS] int32
    starts,  # [BINS] int64: places before the cell's, and in the upper half tiles before its own
    num_tiles,  # [1] int32
    finished,
    num_chunks,
    NUM_CELLS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS_PER_STEP: tl.constexpr,
    CELLS_PER_PROGRAM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sums the counts over chunks, then (the last program to finish) over cells."""
    wait_for_inputs(OVERLAP)
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
        both = (tiles.to(tl.int64) << 32) + count
        through = tl.cumsum(both, 0)
        tl.store(starts + every, through - both)
        tl.store(num_tiles, tl.sum(tiles))


@triton.jit(do_not_specialize=["max_tiles", "num_pairs"])
def scatter_kernel(
    entries,
    ranks,
    counts,
    totals,
    starts,
    order,  # [num_pairs] int32
    places,  # [num_pairs] int32
    tiles,  # [3, max_tiles] int32
    max_tiles,
    num_pairs,
    NUM_CELLS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Puts each pair at its place in the order; the first pair of a tile writes the tile."""
    wait_for_inputs(OVERLAP)
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    entry = tl.load(entries + at)
    cell = entry // CHUNK
    listed = cell < NUM_CELLS
    rank = tl.load(ranks + at) + tl.load(counts + chunk * BINS + cell, mask=listed, other=0)
    start = tl.load(starts + cell, mask=listed, other=0)
    place = (start & 0xFFFFFFFF).to(tl.int32) + rank
    pair = chunk * CHUNK + entry % CHUNK
    tl.store(order + place, pair, mask=listed)
    tl.store(places + pair, tl.where(listed, place, -1), mask=pair < num_pairs)
    opens = listed & (rank % BLOCK_M == 0)
    tile = (start >> 32).to(tl.int32) + rank // BLOCK_M
    rows = tl.minimum(tl.load(totals + cell, mask=opens, other=0) - rank, BLOCK_M)
    tl.store(tiles + tile, cell, mask=opens)
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
