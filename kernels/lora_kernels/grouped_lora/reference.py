"""Shrink and expand over rows grouped by (slot, expert) cell, in plain torch with float32 accumulation.

A row without an adapter is in no group: it is neither read nor written, so whatever an idle slot holds cannot reach it.
Weights are stacked as vLLM stacks them: A `[num_slots, num_experts, R, K]`, B `[num_slots, num_experts, N, R]`, a dense
layer having one expert.
"""

from typing import NamedTuple

import torch

GATHER_LIMIT_ELEMENTS = 1 << 20
"""Largest weight gather, in elements, for which one batched product replaces a product per cell."""


class RowGroups(NamedTuple):
    """Rows that have an adapter, sorted by cell.

    rows: [num_rows] int64, each a row of the layer's output. cells: [num_cells, 2] int64, (slot, expert).
    sizes: [num_cells] int64, rows of each cell, in the order of `rows`.
    """

    rows: torch.Tensor
    cells: torch.Tensor
    sizes: torch.Tensor


def group_rows(slots: torch.Tensor) -> RowGroups:
    """Groups for a dense layer. slots: [num_rows] int, the slot of each row, negative where it has none."""
    rows = (slots >= 0).nonzero().flatten()
    return _grouped(rows, slots[rows], torch.zeros_like(rows))


def group_routed_rows(slots: torch.Tensor, topk_ids: torch.Tensor, slot_enabled: torch.Tensor) -> RowGroups:
    """Groups for an expert layer, whose output rows are (token, choice) pairs: row = token * top_k + choice.

    slots: [num_tokens] int. topk_ids: [num_tokens, top_k] int, the chosen experts. slot_enabled: [>= num_slots] int, 0
    for a slot whose adapter leaves this layer alone.
    """
    top_k = topk_ids.shape[1]
    enabled = (slots >= 0) & (slot_enabled[slots.clamp_min(0)] != 0)
    tokens = enabled.nonzero().flatten()
    rows = (tokens.unsqueeze(1) * top_k + torch.arange(top_k, device=tokens.device)).flatten()
    return _grouped(rows, slots[tokens].repeat_interleave(top_k), topk_ids.reshape(-1)[rows])


def add_lora_(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: RowGroups,
    *,
    column: int = 0,
    scale: float = 1.0,
    row_weights: torch.Tensor | None = None,
) -> None:
    """Adds scale * row_weight * (x A^T) B^T to the grouped rows of y[:, column : column + N], in place.

    y: [num_rows, >= column + N]. x: [num_rows, K], or [num_tokens, K] where num_rows is a multiple of num_tokens: each
    token's rows then share its x. row_weights: [num_rows] or None.
    """
    if groups.rows.numel() == 0:
        return
    delta = grouped_matmul(shrink(x, a, groups, num_rows=y.shape[0]), b, groups).mul_(scale)
    if row_weights is not None:
        delta *= row_weights[groups.rows].unsqueeze(1)
    y[:, column : column + delta.shape[1]].index_add_(0, groups.rows, delta.to(y.dtype))


def shrink(x: torch.Tensor, a: torch.Tensor, groups: RowGroups, *, num_rows: int) -> torch.Tensor:
    """x A^T of the grouped rows, in their order: [num_grouped_rows, R] float32. num_rows: rows of the output."""
    rows_per_token = num_rows // x.shape[0]
    return grouped_matmul(x[groups.rows // rows_per_token].float(), a, groups)


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
    if groups.rows.numel() == 0:
        return
    delta = grouped_matmul(shrunk[groups.rows].float(), b, groups).to(y.dtype)
    columns = y[:, column : column + delta.shape[1]]
    if add_inputs:
        columns.index_add_(0, groups.rows, delta)
    else:
        columns.index_copy_(0, groups.rows, delta)


def grouped_matmul(x: torch.Tensor, weights: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """Each row of x times its cell's weights transposed. x: [num_grouped_rows, K] float32. Returns [.., N] float32."""
    num_outputs, num_inputs = weights.shape[-2:]
    if x.shape[0] * num_outputs * num_inputs <= GATHER_LIMIT_ELEMENTS and len(groups.sizes) > 1:
        cells = groups.cells.repeat_interleave(groups.sizes, dim=0)
        gathered = weights[cells[:, 0], cells[:, 1]].float()
        return torch.bmm(gathered, x.unsqueeze(2)).squeeze(2)
    out = x.new_empty((x.shape[0], num_outputs))
    start = 0
    for (slot, expert), size in zip(groups.cells.tolist(), groups.sizes.tolist(), strict=True):
        torch.mm(x[start : start + size], weights[slot, expert].float().t(), out=out[start : start + size])
        start += size
    return out


def _grouped(rows: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor) -> RowGroups:
    stride = int(experts.max()) + 1 if experts.numel() else 1
    keys, order = torch.sort(slots.long() * stride + experts.long(), stable=True)
    cells, sizes = torch.unique_consecutive(keys, return_counts=True)
    return RowGroups(rows=rows[order], cells=torch.stack((cells // stride, cells % stride), dim=1), sizes=sizes)
