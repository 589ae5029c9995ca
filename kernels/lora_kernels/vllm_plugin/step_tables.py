"""Which rows of a step have which adapter, as the device tables that vLLM's kernels and ours read.

Made from the scheduler's own lists on the host and sent in two copies: nothing is read back from the device, and the rows
that only fill up a captured graph carry -1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm.lora.ops.triton_ops import LoRAKernelMeta
    from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

NO_SLOT = -1


def slots_of(lora_ids: Sequence[int], slot_ids: Sequence[int | None]) -> np.ndarray:
    """The slot of each row's adapter id, NO_SLOT for the base (ids of 0 and below): int32.

    :raises KeyError: an id is in no slot.
    """
    slot_by_id = {lora_id: slot for slot, lora_id in enumerate(slot_ids) if lora_id is not None}
    ids, rows = np.unique(np.asarray(lora_ids, dtype=np.int64), return_inverse=True)
    slots = [slot_by_id[int(lora_id)] if lora_id > 0 else NO_SLOT for lora_id in ids]
    return np.asarray(slots, dtype=np.int32)[rows] if slots else np.empty(0, np.int32)


class StepTables:
    """The tables of one punica wrapper: views of two device buffers, so their addresses stay while their contents change."""

    def __init__(self, wrapper: "PunicaWrapperBase", metas: Sequence["LoRAKernelMeta"], *, max_rows: int, max_loras: int) -> None:
        """metas: of the tokens, and of the rows that are sampled. Their tensors, and the wrapper's index tensors, are replaced.

        slot_ranks: [max_loras] int32, the own rank of the adapter in each slot.
        """
        self._max_rows = max_rows
        self._sizes = (max_rows, max_rows, max_loras + 1, max_loras + 1, max_loras + 2)
        self._metas = metas
        self._max_loras = max_loras
        size = 2 * sum(map(_aligned, self._sizes)) + max_loras
        self._kernel_tables = torch.zeros(size, dtype=torch.int32, device=wrapper.device)
        self.slot_ranks = self._kernel_tables[-max_loras:]
        self._index_tables = torch.zeros(5 * max_rows, dtype=torch.int64, device=wrapper.device)
        for meta, tables in zip(metas, self._of_each_meta(self._kernel_tables), strict=True):
            (
                meta.token_lora_mapping,
                meta.token_indices_sorted_by_lora_ids,
                meta.active_lora_ids,
                meta.num_tokens_per_lora,
                meta.lora_token_start_loc,
            ) = tables
        tokens, samples, padded, embeddings = self._index_tables.split([max_rows, max_rows, max_rows, 2 * max_rows])
        wrapper._token_lora_indices, wrapper._sampler_indices, wrapper._sampler_indices_padded = tokens, samples, padded
        wrapper._embeddings_indices = embeddings.view(2, max_rows)

    def write(
        self, token_slots: np.ndarray, sample_slots: np.ndarray, *, slot_ranks: Sequence[int], max_loras: int, vocab_size: int
    ) -> None:
        """Sends the tables of a step; what follows in the stream reads them.

        slot_ranks: of each slot. max_loras: as vLLM passes it, one more than there are slots.
        """
        kernel_tables, index_tables = self._staging(self._kernel_tables), self._staging(self._index_tables)
        for meta, slots, tables in zip(self._metas, (token_slots, sample_slots), self._of_each_meta(kernel_tables), strict=True):
            num_groups = _write_kernel_tables([table.numpy() for table in tables], slots)
            meta.no_lora_flag_cpu[0] = num_groups == 0
            meta.num_active_loras_cpu[0] = next((count for count in meta.captured_lora_counts if count >= num_groups > 0), num_groups)
        kernel_tables[-self._max_loras :] = torch.tensor(slot_ranks, dtype=torch.int32)
        _write_index_tables(index_tables.numpy(), token_slots, sample_slots, self._max_rows, max_loras, vocab_size)
        self._kernel_tables.copy_(kernel_tables, non_blocking=True)
        self._index_tables.copy_(index_tables, non_blocking=True)

    def _staging(self, table: torch.Tensor) -> torch.Tensor:
        # A new one each time: the allocator keeps it until the copy is done, so no step waits for the one before it.
        return torch.zeros(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)

    def _of_each_meta(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        padded = [_aligned(size) for size in self._sizes]
        parts = buffer.split([*padded * 2, self._max_loras])[:-1]
        sized = [part[:size] for part, size in zip(parts, self._sizes * 2, strict=True)]
        return [sized[: len(padded)], sized[len(padded) :]]


def _aligned(size: int) -> int:
    """Elements of int32 up to the next 16 bytes."""
    return (size + 3) // 4 * 4


def _write_kernel_tables(tables: Sequence[np.ndarray], slots: np.ndarray) -> int:
    """Into zeroed tables: slot by row, rows by slot, and of each group of rows its slot, its size and its end.

    The number of groups, rows without an adapter being one; 0 where no row has an adapter.
    """
    row_slots, order, group_slots, group_sizes, group_ends = tables
    row_slots.fill(NO_SLOT)
    group_slots.fill(NO_SLOT)
    row_slots[: len(slots)] = slots
    found, sizes = np.unique(slots, return_counts=True)
    if not (slots >= 0).any():
        return 0
    order[: len(slots)] = np.argsort(slots, kind="stable")
    group_slots[: len(found)] = found
    group_sizes[: len(found)] = sizes
    group_ends[1 : len(found) + 1] = np.cumsum(sizes)
    return len(found)


def _write_index_tables(
    buffer: np.ndarray, token_slots: np.ndarray, sample_slots: np.ndarray, max_rows: int, max_loras: int, vocab_size: int
) -> None:
    """As vLLM's convert_mapping makes them, for its embedding and logits layers."""
    tokens, samples, padded, no_offset, embeddings = buffer.reshape(5, max_rows)
    num_tokens, num_samples = len(token_slots), len(sample_slots)
    tokens.fill(NO_SLOT)
    samples.fill(NO_SLOT)
    tokens[:num_tokens] = token_slots
    samples[:num_samples] = sample_slots
    padded[:num_samples] = np.arange(num_samples) + np.where(sample_slots < 0, max_loras - 1, sample_slots).astype(np.int64) * num_samples
    no_offset.fill(0)
    embeddings[:num_tokens] = np.maximum(token_slots, 0).astype(np.int64) * vocab_size
