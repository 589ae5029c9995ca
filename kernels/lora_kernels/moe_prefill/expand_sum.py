"""w2 expand and the sum over choices in one launch: base rows are read once, out is written once, deltas stay in the L2 cache.

A chunk is (tokens of one adapter, CHUNK_N columns). Programs follow a schedule: the tiles that make chunk k's deltas, then
the tokens that sum chunk k - lead. Deltas lie in a ring of some chunks, small enough to be overwritten before they are
ever written to memory. A program waits only for programs before it, which the device starts first, so somebody can
always go on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from lora_kernels.moe_prefill.shrink import load_hidden, loaded_ranks, rank_of
from lora_kernels.work_list.kernel import wait_for_inputs

ITEM = 8
"""int32 of an item. Makes deltas: cell, first place, rows, chunk, tokens before the adapter's, counter to wait for, its count. Sums:
-1 - adapter, first place among tokens, rows, chunk, the same less the tokens before the adapter's, the chunk's makers."""


@triton.jit
def _tiles_before(starts, cell):
    return (tl.load(starts + cell) >> 32).to(tl.int32)


@triton.jit
def _places_before(starts, cell):
    return (tl.load(starts + cell) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _wait_for(count, expected):
    """Until `expected` programs have released `count`; what they wrote is then visible here."""
    seen = tl.atomic_add(count, 0, sem="acquire")
    while seen < expected:
        seen = tl.atomic_add(count, 0, sem="acquire")


@triton.jit(do_not_specialize=["max_tiles", "max_token_tiles", "lead", "ring_chunks"])
def schedule_kernel(
    tiles,
    starts,  # by cell: places before it, and in the upper half tiles before it
    max_tiles,
    token_tiles,  # tokens by adapter: a work list whose pairs are tokens and whose cells are adapters
    token_starts,
    max_token_tiles,
    schedule,  # [items, ITEM] int32
    num_items,  # [1] int32
    counts,  # [2, NUM_ADAPTERS * CHUNKS] int32: zeroed; programs that have made, and summed, a chunk
    lead,
    ring_chunks,
    NUM_ADAPTERS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PHASES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per phase: the tiles that make a chunk, then the tokens that sum the one `lead` before it."""
    wait_for_inputs(OVERLAP)
    own = tl.program_id(0)
    phase = tl.arange(0, PHASES)
    group = phase // CHUNKS
    makes = group < NUM_ADAPTERS
    tiles_after = tl.load(starts + (group + 1) * NUM_EXPERTS, mask=makes, other=0) >> 32
    made = (tiles_after - (tl.load(starts + group * NUM_EXPERTS, mask=makes, other=0) >> 32)).to(tl.int32) * TILE_PARTS
    late_group = (phase - lead) // CHUNKS
    sums = (phase >= lead) & (late_group <= NUM_ADAPTERS)
    tokens_after = tl.load(token_starts + late_group + 1, mask=sums, other=0) >> 32
    summed = (tokens_after - (tl.load(token_starts + late_group, mask=sums, other=0) >> 32)).to(tl.int32) * TOKEN_PARTS
    first = tl.sum(tl.where(phase < own, made + summed, 0))
    if own == 0:
        tl.store(num_items, tl.sum(made + summed))
    lane = tl.arange(0, BLOCK)
    if own < NUM_ADAPTERS * CHUNKS:
        tl.store(counts + own, 0)
        tl.store(counts + NUM_ADAPTERS * CHUNKS + own, 0)
        adapter = own // CHUNKS
        first_token = _places_before(token_starts, adapter)
        first_tile = _tiles_before(starts, adapter * NUM_EXPERTS)
        count = (_tiles_before(starts, (adapter + 1) * NUM_EXPERTS) - first_tile) * TILE_PARTS
        # A place in the ring is free once the last chunk there was summed; chunks of adapters without tokens never used it.
        before = own - ring_chunks
        waited = 0
        while (before >= 0) & (waited == 0):
            waited = (_tiles_before(token_starts, before // CHUNKS + 1) - _tiles_before(token_starts, before // CHUNKS)) * TOKEN_PARTS
            if waited == 0:
                before -= ring_chunks
        for step in range(0, count, BLOCK):
            inside = step + lane < count
            index = first_tile * TILE_PARTS + step + lane
            skip = index % TILE_PARTS * BLOCK_M
            start = tl.load(tiles + max_tiles + index // TILE_PARTS, mask=inside, other=0) + skip
            item = schedule + (first + step + lane) * 8
            tl.store(item, tl.load(tiles + index // TILE_PARTS, mask=inside, other=0), mask=inside)
            tl.store(item + 1, start, mask=inside)
            tl.store(item + 2, tl.load(tiles + 2 * max_tiles + index // TILE_PARTS, mask=inside, other=0) - skip, mask=inside)
            tl.store(item + 3, own, mask=inside)
            tl.store(item + 4, first_token, mask=inside)
            tl.store(item + 5, NUM_ADAPTERS * CHUNKS + tl.maximum(before, 0), mask=inside)
            tl.store(item + 6, waited, mask=inside)
        first += count
    chunk = own - lead
    if (chunk >= 0) & (chunk < (NUM_ADAPTERS + 1) * CHUNKS):
        adapter = chunk // CHUNKS
        first_tile = _tiles_before(token_starts, adapter)
        count = (_tiles_before(token_starts, adapter + 1) - first_tile) * TOKEN_PARTS
        first_token = _places_before(token_starts, adapter)
        makers = 0
        if adapter < NUM_ADAPTERS:
            makers = (_tiles_before(starts, (adapter + 1) * NUM_EXPERTS) - _tiles_before(starts, adapter * NUM_EXPERTS)) * TILE_PARTS
        for step in range(0, count, BLOCK):
            inside = step + lane < count
            index = first_tile * TOKEN_PARTS + step + lane
            skip = index % TOKEN_PARTS * BLOCK_T
            at = index // TOKEN_PARTS
            item = schedule + (first + step + lane) * 8
            start = tl.load(token_tiles + max_token_tiles + at, mask=inside, other=0) + skip
            tl.store(item, -1 - adapter, mask=inside)
            tl.store(item + 1, start, mask=inside)
            tl.store(item + 2, tl.load(token_tiles + 2 * max_token_tiles + at, mask=inside, other=0) - skip, mask=inside)
            tl.store(item + 3, chunk, mask=inside)
            tl.store(item + 4, start - first_token, mask=inside)
            tl.store(item + 5, makers, mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "ring_chunks"])
def expand_sum_kernel(
    down,  # [num_pairs, N]: the base's rows, with bias and routing weight
    hidden,  # [SPLITS, num_pairs, BLOCK_R], rows in the list's order, times the routing weight
    b,  # [L, E, N, R]
    out,  # [num_tokens, N]
    deltas,  # [ring_chunks, num_pairs, CHUNK_N], B's dtype, rows by place of the token among its adapter's, then by choice
    ranks,  # [>= L] int32, where HAS_RANKS
    order,
    places,  # [num_pairs] int32: place in the list's order, -1 where the expert lives elsewhere
    token_order,
    token_places,
    schedule,
    num_items,
    counts,
    num_pairs,
    ring_chunks,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per item of the schedule."""
    if OVERLAP:
        gdc_wait()
    CHUNKS: tl.constexpr = (N + CHUNK_N - 1) // CHUNK_N
    item = tl.program_id(0)
    fields = schedule + item * 8
    kind = tl.load(fields)
    start = tl.load(fields + 1)
    rows = tl.load(fields + 2)
    chunk = tl.load(fields + 3)
    if item < tl.load(num_items):
        ring = deltas + (chunk % ring_chunks).to(tl.int64) * num_pairs * CHUNK_N
        first_n = chunk % CHUNKS * CHUNK_N
        if kind >= 0:
            adapter = kind // NUM_EXPERTS
            b_cell = b + adapter.to(tl.int64) * b_adapter_stride + (kind % NUM_EXPERTS).to(tl.int64) * b_expert_stride
            loaded = loaded_ranks(rank_of(ranks, adapter, R, HAS_RANKS), BLOCK_R, HAS_RANKS)
            m = tl.arange(0, BLOCK_M)
            r = tl.arange(0, BLOCK_R)
            row_mask = (m < rows)[:, None]
            place = (start + m).to(tl.int64)[:, None] * BLOCK_R + r[None, :]
            h = load_hidden(hidden, 0, place, row_mask & loaded[None, :], num_pairs, BLOCK_R, 1, SPLITS).to(b.dtype.element_ty)
            b_next = _load_b(b_cell, first_n, loaded, N, R, BLOCK_R, HAS_RANKS, BLOCK_N, N % CHUNK_N == 0)
            pair = tl.load(order + start + m, mask=m < rows, other=0)
            token = tl.load(token_places + pair // TOP_K, mask=m < rows, other=0) - tl.load(fields + 4)
            rows_out = ring + (token.to(tl.int64) * TOP_K + pair % TOP_K)[:, None] * CHUNK_N
            row_mask = ((m < rows) & (token >= 0))[:, None]
            _wait_for(counts + tl.load(fields + 5), tl.load(fields + 6))
            for step in tl.static_range(CHUNK_N // BLOCK_N):
                b_tile = b_next
                if step + 1 < CHUNK_N // BLOCK_N:
                    n = first_n + (step + 1) * BLOCK_N
                    b_next = _load_b(b_cell, n, loaded, N, R, BLOCK_R, HAS_RANKS, BLOCK_N, N % CHUNK_N == 0)
                delta = tl.dot(h, b_tile, input_precision="ieee")
                column = step * BLOCK_N + tl.arange(0, BLOCK_N)
                tl.store(rows_out + column[None, :], delta.to(deltas.dtype.element_ty), mask=row_mask)
            tl.debug_barrier()
            tl.atomic_add(counts + chunk, 1, sem="release")
        else:
            t = tl.arange(0, BLOCK_T)
            _sum_choices(
                down,
                out,
                ring,
                places,
                tl.load(token_order + start + t, mask=t < rows, other=0),
                t < rows,
                first_n,
                counts + chunk,
                counts + NUM_ADAPTERS * CHUNKS + chunk,
                tl.load(fields + 4) + t,
                tl.load(fields + 5),
                kind > -1 - NUM_ADAPTERS,
                ALL_LOCAL,
                TOP_K,
                N,
                BLOCK_T,
                CHUNK_N,
            )


@triton.jit
def _sum_choices(
    down,
    out,
    ring,
    places,
    token,
    inside,
    first_n,
    made,
    summed,
    own,
    makers,
    adapted,
    ALL_LOCAL: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK_N: tl.constexpr,
):
    """float32 sum of the base's rows in the order of the choices, then of the deltas; choices held elsewhere are not read."""
    column = tl.arange(0, CHUNK_N)
    n = first_n + column
    mask = inside[:, None] & (n < N)[None, :]
    pair = token.to(tl.int64) * TOP_K
    total = tl.zeros((BLOCK_T, CHUNK_N), tl.float32)
    for choice in tl.static_range(TOP_K):
        kept = mask
        if not ALL_LOCAL:
            kept = mask & (tl.load(places + pair + choice) >= 0)[:, None]
        base = tl.load(down + (pair[:, None] + choice) * N + n[None, :], mask=kept, other=0.0, eviction_policy="evict_first")
        total += base.to(tl.float32)
    if adapted:
        if makers > 0:
            _wait_for(made, makers)
            rows = ring + (own.to(tl.int64) * TOP_K)[:, None] * CHUNK_N + column[None, :]
            for choice in tl.static_range(TOP_K):
                kept = mask
                if not ALL_LOCAL:
                    kept = mask & (tl.load(places + pair + choice) >= 0)[:, None]
                total += tl.load(rows + choice * CHUNK_N, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
            tl.debug_barrier()
        tl.atomic_add(summed, 1, sem="release")
    tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_b(
    b_cell,
    first_n,
    loaded,
    N: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_N: tl.constexpr,
):
    """[BLOCK_R, BLOCK_N] of a cell's B, zero beyond N, R and what is loaded of the adapter's rank."""
    r = tl.arange(0, BLOCK_R)
    n = first_n + tl.arange(0, BLOCK_N)
    at = b_cell + n[None, :] * R + r[:, None]
    if EVEN_N and R == BLOCK_R and not HAS_RANKS:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(n < N)[None, :] & (loaded & (r < R))[:, None], other=0.0, eviction_policy="evict_first")
