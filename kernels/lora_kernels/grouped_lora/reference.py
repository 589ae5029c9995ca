"""Shrink and expand over rows grouped by (slot, expert) cell, in plain torch with float32 accumulation.

A row without an adapter is in no group: it is neither read nor written, so whatever an idle slot holds cannot reach it.
Weights are stacked as vLLM stacks them: A `[num_slots, num_experts, R, K]`, B `[num_slots, num_experts, N, R]`, a dense
layer having one expert.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

GATHER_LIMIT_ELEMENTS = 1 << 20
"""Largest weight gather, in elements, for which one batched product replaces a product per cell."""


class RowGroups(NamedTuple):
    """Rows that have an adapter, sorted by cell; a cell is slot * num_experts + expert.

    rows: [num_grouped_rows] int64, each a row of the layer's output. cells: [num_grouped_rows] int64, the cell of each.
    sizes: [num_cells] int64, rows of each cell that has any, in the order of `rows`.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    sizes: torch.Tensor


def group_rows(slots: torch.Tensor) -> RowGroups:
    """Groups for a dense layer. slots: [num_rows] int, the slot of each row, negative where it has none."""
    rows = (slots >= 0).nonzero().flatten()
    return _sorted(rows, slots[rows])


def group_routed_rows(slots: torch.Tensor, topk_ids: torch.Tensor, slot_enabled: torch.Tensor, *, num_experts: int) -> RowGroups:
    """Groups for an expert layer, whose output rows are (token, choice) pairs: row = token * top_k + choice.

    slots: [num_tokens] int. topk_ids: [num_tokens, top_k] int, the chosen experts. slot_enabled: [>= num_slots] int, 0
    for a slot whose adapter leaves this layer alone.
    """
    top_k = topk_ids.shape[1]
    tokens = ((slots >= 0) & (slot_enabled[slots.clamp_min(0)] != 0)).nonzero()
    rows = (tokens * top_k + torch.arange(top_k, device=tokens.device)).flatten()
    cells = (slots[tokens] * num_experts + topk_ids[tokens.flatten()]).flatten()
    return _sorted(rows, cells)


def add_lora_(
    y: torch.Tensor,
    x: torch.Tensor,
    a_stacks: Sequence[torch.Tensor],
    b_stacks: Sequence[torch.Tensor],
    groups: RowGroups,
    *,
    scale: float = 1.0,
    row_weights: torch.Tensor | None = None,
) -> None:
    """Adds scale * row_weight * (x A^T) B^T to the grouped rows of y: the stacks' outputs side by side from column 0.

    y: [num_rows, >= sum of N]. x: [num_rows, K], or [num_tokens, K] where num_rows is a multiple of num_tokens: each
    token's rows then share its x. row_weights: [num_rows] or None.
    """
    if groups.rows.numel() == 0:
        return
    grouped_x = _grouped_inputs(x, groups, num_rows=y.shape[0])
    if scale != 1.0:
        grouped_x = grouped_x * scale
    column = 0
    for a, b in zip(a_stacks, b_stacks, strict=True):
        delta = grouped_matmul(grouped_matmul(grouped_x, a, groups), b, groups)
        if row_weights is not None:
            delta *= row_weights[groups.rows].unsqueeze(1)
        y[:, column : column + delta.shape[1]].index_add_(0, groups.rows, delta.to(y.dtype))
        column += delta.shape[1]


def shrink(x: torch.Tensor, a: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """x A^T of the grouped rows, in their order: [num_grouped_rows, R] float32. x: [num_rows, K]."""
    return grouped_matmul(x[groups.rows].float(), a, groups)


def expand_(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    groups: RowGroups,
    *,
    column: int = 0,
    add_inputs: bool = True,
) -> None:
    """Adds shrunk B^T to (or puts it in place of) the grouped rows of y[:, column : column + N].

    shrunk: [num_rows, R], one row per row of y.
    """
    delta = grouped_matmul(shrunk[groups.rows].float(), b, groups).to(y.dtype)
    columns = y[:, column : column + delta.shape[1]]
    if add_inputs:
        columns.index_add_(0, groups.rows, delta)
    else:
        columns.index_copy_(0, groups.rows, delta)


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Each row of x times its cell's weights transposed. x: [num_grouped_rows, K] float32. Returns [.., N] float32."""
    num_outputs, num_inputs = weights.shape[-2:]
    by_cell = weights.flatten(0, 1)
    if x.shape[0] * num_outputs * num_inputs <= GATHER_LIMIT_ELEMENTS:
        gathered = by_cell.index_select(0, groups.cells).float()
        return torch.bmm(x.unsqueeze(1), gathered.transpose(1, 2)).squeeze(1)
    out = x.new_empty((x.shape[0], num_outputs))
    start = 0
    for size in groups.sizes.tolist():
        end = start + size
        torch.mm(x[start:end], by_cell[groups.cells[start]].float().t(), out=out[start:end])
        start = end
    return out


def _grouped_inputs(x: torch.Tensor, groups: RowGroups, *, num_rows: int) -> torch.Tensor:
    rows_per_token = num_rows // x.shape[0]
    return x[groups.rows if rows_per_token == 1 else groups.rows // rows_per_token].float()


def _sorted(rows: torch.Tensor, cells: torch.Tensor) -> RowGroups:
    cells, order = torch.sort(cells, stable=True)
    _, sizes = torch.unique_consecutive(cells, return_counts=True)
    return RowGroups(rows=rows[order], cells=cells, sizes=sizes)
