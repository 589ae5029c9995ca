"""The work list of one batch and layer: made on the device, read by every grouped kernel of the layer."""

from dataclasses import dataclass

import torch
import triton

from lora_kernels.arguments import check, check_tensor, check_values
from lora_kernels.launch import Overlap, launch_options, overlap_on
from lora_kernels.work_list.kernel import (
    CELLS_PER_PROGRAM,
    CHUNK,
    CHUNKS_PER_STEP,
    scan_kernel,
    scatter_kernel,
    sort_chunks_kernel,
)

MAX_BINS = 1 << 15
"""Most cells, rounded up to a power of two, that one program scans."""


@dataclass(frozen=True, kw_only=True)
class WorkList:
    """Pairs (token * top_k + choice) by cell, cut into tiles of at most block_m rows of one cell.

    order: [num_pairs] int32, the pairs by cell and then by number; the places after the last listed pair are not
    written. tiles: [3, max_tiles] int32: cell, first place in `order`, rows; only the first num_tiles[0] are written.
    A cell is adapter * num_experts + expert; the last one, num_adapters * num_experts, holds the pairs without an
    adapter. A pair whose expert is negative (held by another rank) is in no tile.
    places: [num_pairs] int32, each pair's place in `order`, -1 in none. starts: [> cells] int64, by cell: places before
    it, and in the upper half tiles before it. token_adapters, adapter_enabled: what the list was made of.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    token_adapters: torch.Tensor
    adapter_enabled: torch.Tensor | None
    num_tokens: int
    top_k: int
    num_adapters: int
    num_experts: int
    block_m: int

    @property
    def num_pairs(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[1]


def build_work_list(
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    *,
    num_adapters: int,
    num_experts: int,
    block_m: int,
    adapter_enabled: torch.Tensor | None = None,
) -> WorkList:
    """Groups a batch's pairs by (adapter, expert) in three launches, without a host sync.

    topk_ids: [num_tokens, top_k] int32 or int64, negative where the expert lives on another rank.
    token_adapters: [num_tokens] int32 or int64; an id outside [0, num_adapters) means no adapter.
    adapter_enabled: [>= num_adapters] int or bool, 0 for an adapter that leaves this layer alone.
    :raises ValueError: an argument is off; it names the argument, what was expected and what was given.
    """
    _check(topk_ids, token_adapters, num_adapters, num_experts, block_m, adapter_enabled)
    num_tokens, top_k = topk_ids.shape
    num_pairs = num_tokens * top_k
    num_cells = num_adapters * num_experts + 1
    bins = max(128, triton.next_power_of_2(num_cells + 1))
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    max_tiles = num_pairs // block_m + min(num_pairs, num_cells)
    new = {"dtype": torch.int32, "device": topk_ids.device}
    order, tiles, num_tiles = torch.empty(num_pairs, **new), torch.empty((3, max_tiles), **new), torch.empty(1, **new)
    places = torch.empty(num_pairs, **new)
    starts = torch.empty(bins, dtype=torch.int64, device=topk_ids.device)
    if num_pairs == 0:
        num_tiles.zero_()
        starts.zero_()
    else:
        (entries, ranks), counts = torch.empty((2, num_chunks, CHUNK), **new), torch.empty((num_chunks, bins), **new)
        totals, finished = torch.empty(bins, **new), torch.empty(1, **new)
        num_warps = 4 if bins <= 4096 else 8
        overlap = overlap_on(topk_ids.device, Overlap.INPUTS_FRESH)
        sort_chunks_kernel[(num_chunks,)](
            topk_ids,
            token_adapters,
            token_adapters if adapter_enabled is None else adapter_enabled,
            entries,
            ranks,
            counts,
            finished,
            num_pairs,
            TOP_K=top_k,
            NUM_EXPERTS=num_experts,
            NUM_ADAPTERS=num_adapters,
            HAS_ENABLED=adapter_enabled is not None,
            BINS=bins,
            CHUNK=CHUNK,
            OVERLAP=int(overlap),
            **launch_options(overlap, num_warps=num_warps),
        )
        scan_kernel[(triton.cdiv(num_cells, CELLS_PER_PROGRAM),)](
            counts,
            totals,
            starts,
            num_tiles,
            finished,
            num_chunks,
            NUM_CELLS=num_cells,
            BINS=bins,
            BLOCK_M=block_m,
            CHUNKS_PER_STEP=CHUNKS_PER_STEP,
            CELLS_PER_PROGRAM=CELLS_PER_PROGRAM,
            OVERLAP=int(overlap),
            **launch_options(overlap, num_warps=num_warps),
        )
        scatter_kernel[(num_chunks,)](
            entries,
            ranks,
            counts,
            totals,
            starts,
            order,
            places,
            tiles,
            max_tiles,
            num_pairs,
            NUM_CELLS=num_cells,
            BINS=bins,
            BLOCK_M=block_m,
            CHUNK=CHUNK,
            OVERLAP=int(overlap),
            **launch_options(overlap, num_warps=4),
        )
    return WorkList(
        order=order,
        tiles=tiles,
        num_tiles=num_tiles,
        places=places,
        starts=starts,
        token_adapters=token_adapters,
        adapter_enabled=adapter_enabled,
        num_tokens=num_tokens,
        top_k=top_k,
        num_adapters=num_adapters,
        num_experts=num_experts,
        block_m=block_m,
    )


def _check(
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    num_adapters: int,
    num_experts: int,
    block_m: int,
    adapter_enabled: torch.Tensor | None,
) -> None:
    ints, device = (torch.int32, torch.int64), topk_ids.device
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=ints, device=device)
    check_tensor("token_adapters", token_adapters, shape=(topk_ids.shape[0],), dtypes=ints, device=device)
    check("top_k", "at least 1", topk_ids.shape[1], holds=topk_ids.shape[1] >= 1)
    check("num_adapters", "at least 1", num_adapters, holds=num_adapters >= 1)
    check("num_experts", "at least 1", num_experts, holds=num_experts >= 1)
    check_values(token_adapters=(token_adapters, num_adapters), topk_ids=(topk_ids, num_experts))
    num_cells = num_adapters * num_experts
    check("num_adapters * num_experts", f"at most {MAX_BINS - 2}", num_cells, holds=num_cells <= MAX_BINS - 2)
    check("block_m", "a power of two, at least 16", block_m, holds=block_m >= 16 and block_m & (block_m - 1) == 0)
    if adapter_enabled is not None:
        flags = (torch.bool, torch.uint8, torch.int8, torch.int16, *ints)
        check_tensor("adapter_enabled", adapter_enabled, shape=(None,), dtypes=flags, device=device)
        enough = adapter_enabled.shape[0] >= num_adapters
        check("adapter_enabled", f"at least {num_adapters} flags", adapter_enabled.shape[0], holds=enough)
