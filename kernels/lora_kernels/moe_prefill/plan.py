"""Tile sizes and forms by shape: what ran fastest on an H200 (bf16, rank 32), from host-known numbers alone.

Everything here becomes part of a compiled kernel's key, so values come from small sets: a batch of another length must
not mean another compilation.
"""

import math
from dataclasses import dataclass

PROGRAMS_WANTED = 264
"""Two programs for each of an H200's 132 multiprocessors."""

PROGRAMS_AHEAD = 1200
"""Of the launch that expands w2 and sums; 792 run at a time."""

L2_BYTES, RING_BYTES = 50e6, 30e6


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One kernel's launch. block_n: columns, or for the shrink elements of K. parts: programs that share one tile."""

    block_m: int
    block_n: int
    parts: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


TOKEN_BLOCK = 16
"""Tokens of one adapter in a tile of `group_tokens`."""


@dataclass(frozen=True, kw_only=True)
class SumTiles:
    """The launch that expands w2 and sums. block_m, block_n: of a product. block_t: tokens of a sum. chunk_n: columns of a chunk,
    of whose deltas the ring holds `ring`. lead: chunks between making deltas and summing them."""

    block_m: int
    block_n: int = 64
    block_t: int = 8
    chunk_n: int = 256
    lead: int
    ring: int
    num_warps: int = 4
    max_registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenTiles:
    """The launch in which a tile of block_t tokens meets every expert's w2 B. block_n: columns of out."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """block_m: rows of a work list's tile. The w2 expand and sum are one launch by tokens (sum_experts) or by a schedule
    (expand_sum), or else two, the first by add_down."""

    block_m: int
    shrink: Tiles
    activate: Tiles
    add_down: Tiles
    expand_sum: SumTiles | None = None
    sum_experts: TokenTiles | None = None

    @property
    def token_block(self) -> int | None:
        """Tokens in a tile of the `group_tokens` that `combine` reads; None where it reads none."""
        if self.sum_experts is not None:
            return self.sum_experts.block_t
        return None if self.expand_sum is None else TOKEN_BLOCK


def plan_prefill(
    *, num_tokens: int, top_k: int, num_adapters: int, num_experts: int, hidden_size: int, intermediate_size: int, rank: int
) -> PrefillPlan:
    """Tiles of about a cell's rows; parts until the device has enough programs."""
    num_pairs = num_tokens * top_k
    cells = max(1, min(num_pairs, num_adapters * num_experts))
    rows_per_cell = num_pairs / cells
    block_m = 128 if rows_per_cell >= 96 else 64 if rows_per_cell >= 24 else 32 if rows_per_cell >= 12 else 16
    narrow_m = min(block_m, 64)
    block_n = 64 if rank <= 64 else 32
    num_tiles = num_pairs // block_m + cells
    num_narrow_tiles = num_pairs // narrow_m + cells
    few = num_narrow_tiles < PROGRAMS_WANTED
    wide_down = rank <= 64 and hidden_size % 128 == 0
    parts = 3 if few and intermediate_size > 1024 else 1
    by_tokens = _by_tokens(num_experts, rank) if num_pairs * hidden_size > L2_BYTES and parts == 1 else None
    ring = None
    if num_pairs * hidden_size > L2_BYTES and by_tokens is None:
        ring = _ring(num_tokens, top_k, num_adapters, num_experts, narrow_m, rank)
    return PrefillPlan(
        block_m=block_m,
        shrink=Tiles(
            block_m=block_m if rank <= 64 else narrow_m,
            block_n=64,
            parts=_parts(num_tiles, hidden_size, 64, most=3),
            num_warps=4,
            num_stages=4 if rank <= 64 and block_m != 64 else 3,
        ),
        activate=Tiles(
            block_m=narrow_m,
            block_n=32 if few and intermediate_size > 1024 else block_n,
            parts=parts,
            num_warps=4,
            num_stages=3 if rank <= 64 else 2,
        ),
        add_down=Tiles(
            block_m=narrow_m,
            block_n=128 if wide_down else block_n,
            parts=1 if wide_down else _fitting(hidden_size, block_n, most=3)[-1],
            num_warps=8 if wide_down else 4,
            num_stages=3,
        ),
        expand_sum=ring,
        sum_experts=by_tokens,
    )


def _parts(num_tiles: int, size: int, block: int, *, most: int) -> int:
    fitting = _fitting(size, block, most=most)
    return next((parts for parts in fitting if parts * num_tiles >= PROGRAMS_WANTED), fitting[-1])


def _fitting(size: int, block: int, *, most: int) -> list[int]:
    steps = -(-size // block)
    return [parts for parts in range(1, most + 1) if steps % parts == 0]


def _by_tokens(num_experts: int, rank: int) -> TokenTiles | None:
    """None where a token would meet so many rows of B that the products take longer than a ring's deltas."""
    width = max(16, 1 << (rank - 1).bit_length())
    if num_experts * width > 1024:
        return None
    return TokenTiles(block_t=64, block_n=128, num_warps=4, num_stages=4 if width <= 32 else 2, max_registers=120 if width <= 32 else None)


def _ring(num_tokens: int, top_k: int, num_adapters: int, num_experts: int, block_m: int, rank: int) -> SumTiles | None:
    """Sums follow when the device has had time to start a set and a half of programs after those that make their deltas; the ring
    keeps well within the L2 cache. None where it cannot, or where cells are so many that most programs would find nothing to do."""
    sum_tokens, chunk_n = 8, 256
    rows = num_tokens * top_k / (num_adapters * num_experts)
    programs = num_experts * math.ceil(rows / block_m) + num_tokens / num_adapters / sum_tokens
    most = int(RING_BYTES // (num_tokens * top_k / num_adapters * chunk_n * 2))
    if most < 3 or block_m < 64:
        return None
    lead = max(1, min(12, round(PROGRAMS_AHEAD / programs), most - 2))
    return SumTiles(
        block_m=block_m,
        block_n=64 if rank <= 64 else 32,
        block_t=sum_tokens,
        chunk_n=chunk_n,
        lead=lead,
        ring=min(lead + 3, most),
        max_registers=80 if rank <= 32 else None,
    )
