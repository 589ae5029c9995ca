"""The work list in plain torch: what the kernels must produce, bit for bit, since a stable grouping has one answer."""

import torch


def cells_of_pairs(
    topk_ids: torch.Tensor,
    token_adapters: torch.Tensor,
    *,
    num_adapters: int,
    num_experts: int,
    adapter_enabled: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cell of each (token, choice) pair: [num_tokens * top_k] int64.

    adapter * num_experts + expert; num_adapters * num_experts for a pair without an (enabled) adapter; one more for a
    pair whose expert lives elsewhere.
    """
    top_k = topk_ids.shape[1]
    experts = topk_ids.reshape(-1).long()
    adapters = token_adapters.long().repeat_interleave(top_k)
    adapted = (adapters >= 0) & (adapters < num_adapters)
    if adapter_enabled is not None:
        adapted &= adapter_enabled[adapters.clamp(0, num_adapters - 1)] != 0
    cells = torch.where(adapted, adapters * num_experts + experts, num_adapters * num_experts)
    routed = (experts >= 0) & (experts < num_experts)
    return torch.where(routed, cells, num_adapters * num_experts + 1)


def work_list(cells: torch.Tensor, *, num_cells: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, tiles): the listed pairs by cell, then by number; and [3, num_tiles]: cell, first place in order, rows.

    cells: as `cells_of_pairs` gives them. num_cells: those with a number below it are listed.
    """
    order = torch.argsort(cells, stable=True)
    order = order[cells[order] < num_cells]
    tiles: list[tuple[int, int, int]] = []
    start = 0
    for cell, count in enumerate(torch.bincount(cells, minlength=num_cells)[:num_cells].tolist()):
        tiles += [(cell, start + skip, min(count - skip, block_m)) for skip in range(0, count, block_m)]
        start += count
    return order, torch.tensor(tiles, dtype=torch.int64, device=cells.device).reshape(-1, 3).t()
