"""w2 expand and the sum over choices in one launch: base rows are read once, out is written once, deltas stay in the L2 cache.

A chunk is (tokens of one adapter, CHUNK_N columns). Programs take items in one order: the tiles that make chunk k's deltas,
then the tokens that sum chunk k - LEAD. Deltas lie in a ring of RING chunks, small enough to be overwritten before they
are ever written to memory. An item waits only for items before it in that order, so somebody can always go on.
"""

import triton
import triton.language as tl

from lora_kernels.moe_prefill.shrink import load_hidden, loaded_ranks, rank_of

TICKET = 0
EXITED = 1
FIRST_COUNT = 2


@triton.jit
def _wait_for(count, expected):
    """Until `expected` programs have released `count`; what they wrote is then visible here."""
    seen = tl.atomic_add(count, 0, sem="acquire")
    while seen < expected:
        seen = tl.atomic_add(count, 0, sem="acquire")


@triton.jit
def _tiles_before(starts, cell):
    return (tl.load(starts + cell) >> 32).to(tl.int32)


@triton.jit
def _places_before(starts, cell):
    return (tl.load(starts + cell) & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "max_token_tiles"])
def expand_sum_kernel(
    down,  # [num_pairs, N]: the base's rows, with bias and routing weight
    hidden,  # [SPLITS, num_pairs, BLOCK_R] float32, rows in the list's order
    b,  # [L, E, N, R]
    topk_weights,  # [num_pairs] float32
    out,  # [num_tokens, N]
    deltas,  # [RING, num_pairs, CHUNK_N], B's dtype, rows by place in their adapter's part of the list
    ranks,  # [>= L] int32, where HAS_RANKS
    progress,  # [PROGRESS] int32, zero before and after: ticket, exited, made by chunk, summed by chunk
    places,  # [num_pairs] int32: place in the list's order, -1 where the expert lives elsewhere
    tiles,
    starts,  # by cell: places before it, and in the upper half tiles before it
    max_tiles,
    num_pairs,
    token_order,  # tokens by adapter: a work list whose pairs are tokens and whose cells are adapters
    token_tiles,
    token_starts,
    max_token_tiles,
    b_adapter_stride,
    b_expert_stride,
    NUM_ADAPTERS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    TOKEN_LIST_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK_N: tl.constexpr,
    LEAD: tl.constexpr,
    RING: tl.constexpr,
    PHASES: tl.constexpr,
    PROGRESS: tl.constexpr,
):
    CHUNKS: tl.constexpr = (N + CHUNK_N - 1) // CHUNK_N
    TILE_PARTS: tl.constexpr = LIST_BLOCK // BLOCK_M
    TOKEN_PARTS: tl.constexpr = TOKEN_LIST_BLOCK // BLOCK_T
    phase = tl.arange(0, PHASES)
    group = phase // CHUNKS
    makes = group < NUM_ADAPTERS
    tiles_after = tl.load(starts + (group + 1) * NUM_EXPERTS, mask=makes, other=0) >> 32
    made = (tiles_after - (tl.load(starts + group * NUM_EXPERTS, mask=makes, other=0) >> 32)).to(tl.int32) * TILE_PARTS
    late_group = (phase - LEAD) // CHUNKS
    sums = (phase >= LEAD) & (late_group <= NUM_ADAPTERS)
    tokens_after = tl.load(token_starts + late_group + 1, mask=sums, other=0) >> 32
    summed = (tokens_after - (tl.load(token_starts + late_group, mask=sums, other=0) >> 32)).to(tl.int32) * TOKEN_PARTS
    through = tl.cumsum(made + summed, 0)
    total = tl.max(through)
    ends = (phase + 1).to(tl.int64) << 32 | through.to(tl.int64)

    item = tl.atomic_add(progress, 1, sem="relaxed")
    while item < total:
        begun = tl.max(tl.where(through <= item, ends, 0))
        at = (begun >> 32).to(tl.int32)
        offset = item - (begun & 0xFFFFFFFF).to(tl.int32)
        own = tl.minimum(at // CHUNKS, NUM_ADAPTERS)
        first_tile = _tiles_before(starts, own * NUM_EXPERTS)
        num_made = (_tiles_before(starts, tl.minimum(own + 1, NUM_ADAPTERS) * NUM_EXPERTS) - first_tile) * TILE_PARTS
        if offset < num_made:
            index = first_tile * TILE_PARTS + offset
            skip = index % TILE_PARTS * BLOCK_M
            cell = tl.load(tiles + index // TILE_PARTS)
            start = tl.load(tiles + max_tiles + index // TILE_PARTS) + skip
            rows = tl.load(tiles + 2 * max_tiles + index // TILE_PARTS) - skip
            if rows > 0:
                first_place = _places_before(starts, own * NUM_EXPERTS)
                _make_deltas(
                    hidden,
                    b + (cell // NUM_EXPERTS).to(tl.int64) * b_adapter_stride + (cell % NUM_EXPERTS).to(tl.int64) * b_expert_stride,
                    rank_of(ranks, own, R, HAS_RANKS),
                    deltas + ((at % RING).to(tl.int64) * num_pairs + (start - first_place)) * CHUNK_N,
                    progress,
                    token_starts,
                    start,
                    rows,
                    at,
                    num_pairs,
                    NUM_ADAPTERS,
                    N,
                    R,
                    BLOCK_R,
                    HAS_RANKS,
                    SPLITS,
                    BLOCK_M,
                    BLOCK_N,
                    CHUNK_N,
                    RING,
                    TOKEN_PARTS,
                )
            tl.debug_barrier()
            tl.atomic_add(progress + 2 + at, 1, sem="release")
        else:
            chunk = at - LEAD
            adapter = chunk // CHUNKS
            index = _tiles_before(token_starts, adapter) * TOKEN_PARTS + offset - num_made
            skip = index % TOKEN_PARTS * BLOCK_T
            start = tl.load(token_tiles + max_token_tiles + index // TOKEN_PARTS) + skip
            rows = tl.load(token_tiles + 2 * max_token_tiles + index // TOKEN_PARTS) - skip
            t = tl.arange(0, BLOCK_T)
            token = tl.load(token_order + start + t, mask=t < rows, other=0)
            column = tl.arange(0, CHUNK_N)
            n = chunk % CHUNKS * CHUNK_N + column
            mask = (t < rows)[:, None] & (n < N)[None, :]
            pair = token.to(tl.int64) * TOP_K
            acc = tl.zeros((BLOCK_T, CHUNK_N), tl.float32)
            for choice in tl.static_range(TOP_K):
                kept = mask
                if not ALL_LOCAL:
                    kept = mask & (tl.load(places + pair + choice) >= 0)[:, None]
                base = tl.load(down + (pair[:, None] + choice) * N + n[None, :], mask=kept, other=0.0, eviction_policy="evict_first")
                acc += base.to(tl.float32)
            if adapter < NUM_ADAPTERS:
                first_place = _places_before(starts, adapter * NUM_EXPERTS)
                end_place = _places_before(starts, (adapter + 1) * NUM_EXPERTS)
                made_tiles = _tiles_before(starts, (adapter + 1) * NUM_EXPERTS) - _tiles_before(starts, adapter * NUM_EXPERTS)
                ring = deltas + (chunk % RING).to(tl.int64) * num_pairs * CHUNK_N
                _wait_for(progress + 2 + chunk, made_tiles * TILE_PARTS)
                for choice in tl.static_range(TOP_K):
                    place = tl.load(places + pair + choice)
                    kept = mask & ((place >= first_place) & (place < end_place))[:, None]
                    weight = tl.load(topk_weights + pair + choice)
                    rows_at = (place - first_place).to(tl.int64)[:, None] * CHUNK_N
                    delta = tl.load(ring + rows_at + column[None, :], mask=kept, other=0.0, cache_modifier=".cg")
                    acc += weight[:, None] * delta.to(tl.float32)
                tl.debug_barrier()
                tl.atomic_add(progress + 2 + NUM_ADAPTERS * CHUNKS + chunk, 1, sem="release")
            tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)
        item = tl.atomic_add(progress, 1, sem="relaxed")
    tl.debug_barrier()
    if tl.atomic_add(progress + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        every = tl.arange(0, PROGRESS)
        tl.store(progress + every, tl.zeros((PROGRESS,), tl.int32), mask=every < 2 + 2 * NUM_ADAPTERS * CHUNKS)


@triton.jit
def _make_deltas(
    hidden,
    b_cell,
    rank,
    ring_rows,
    progress,
    token_starts,
    start,
    rows,
    chunk,
    num_pairs,
    NUM_ADAPTERS: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK_N: tl.constexpr,
    RING: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
):
    """hidden B^T of BLOCK_M rows of one cell, without the routing weight, into the chunk's place in the ring."""
    CHUNKS: tl.constexpr = (N + CHUNK_N - 1) // CHUNK_N
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    row_mask = (m < rows)[:, None]
    loaded = loaded_ranks(rank, BLOCK_R, HAS_RANKS)
    place = (start + m).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
    h = load_hidden(hidden, 0, place, row_mask & loaded[None, :], num_pairs, BLOCK_R, 1, SPLITS).to(b_cell.dtype.element_ty)
    # The ring's place is free once the last chunk in it was summed; chunks of adapters without tokens never used it.
    before = chunk - RING
    waiting = 0
    while (before >= 0) & (waiting == 0):
        adapter = before // CHUNKS
        waiting = (_tiles_before(token_starts, adapter + 1) - _tiles_before(token_starts, adapter)) * TOKEN_PARTS
        if waiting == 0:
            before -= RING
    if waiting > 0:
        _wait_for(progress + 2 + NUM_ADAPTERS * CHUNKS + before, waiting)
    for step in tl.static_range(CHUNK_N // BLOCK_N):
        column = step * BLOCK_N + tl.arange(0, BLOCK_N)
        n = chunk % CHUNKS * CHUNK_N + column
        if N % CHUNK_N == 0 and R == BLOCK_R and not HAS_RANKS:
            b_tile = tl.load(b_cell + n[None, :] * R + r[:, None])
        else:
            b_tile = tl.load(b_cell + n[None, :] * R + r[:, None], mask=(n < N)[None, :] & (loaded & (r < R))[:, None], other=0.0)
        delta = tl.dot(h, b_tile, input_precision="ieee")
        tl.store(ring_rows + m[:, None] * CHUNK_N + column[None, :], delta.to(ring_rows.dtype.element_ty), mask=row_mask)
