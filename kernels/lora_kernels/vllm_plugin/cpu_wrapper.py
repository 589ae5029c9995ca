"""vLLM's punica wrapper on a CPU: which rows have which adapter, and the layers' LoRA calls answered by `grouped_lora`.

vLLM's own CPU wrapper indexes the slots by -1 for a base row and so gives it the last slot's adapter; here base rows
are in no group and are never written.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from lora_kernels.grouped_lora import RowGroups, add_lora_, expand_, group_routed_rows, group_rows, shrink
from lora_kernels.vllm_plugin.expert_calls import Passed, W2Call, W13Call


class CpuLoraWrapper(PunicaWrapperCPU):
    """Groups rows once per step; all layers of the step use the same groups."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._token_groups = group_rows(self.token_lora_indices)
        self._sampler_groups = group_rows(self.sampler_indices)

    def add_shrink(
        self,
        y: tuple[torch.Tensor, ...] | torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Writes the adapters' rows of each y[i], [num_rows, R]; other rows keep what they hold."""
        x = x.view(-1, x.shape[-1])
        groups = self._token_groups
        for out, a in zip(y, lora_a_stacked, strict=True):
            shrunk = shrink(x, a, groups) * scale
            out.view(-1, out.shape[-1])[:, : shrunk.shape[1]].index_copy_(0, groups.rows, shrunk.to(out.dtype))

    def add_expand(
        self,
        y: torch.Tensor,
        x: tuple[torch.Tensor, ...] | torch.Tensor,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        column = offset_start
        for shrunk, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            expand_(y, shrunk, b, self._token_groups, column=column, add_inputs=add_inputs)
            column += width

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[torch.Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        add_lora_(y, x, lora_a_stacked, lora_b_stacked, self._token_groups, scale=scale)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        expand_(y, x, lora_b_stacked, self._token_groups, add_inputs=add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        y = y.view(-1, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        groups = self._logits_groups(y.shape[0], lora_b_stacked)
        add_lora_(y, x, (lora_a_stacked,), (lora_b_stacked,), groups, scale=scale)

    def _logits_groups(self, num_rows: int, lora_b_stacked: torch.Tensor) -> RowGroups:
        """The sampled rows' groups. Prompt log-probabilities ask for one prompt's rows and do not say whose they are:
        that is answered when no adapter of the batch changes the head, or when the whole batch has one adapter.

        :raises RuntimeError: neither is so.
        """
        slots = self.sampler_indices
        if num_rows == slots.shape[0]:
            return self._sampler_groups
        used = slots.unique()
        adapters = used[used >= 0]
        if not lora_b_stacked[adapters].any():
            return group_rows(slots.new_empty(0))
        if used.numel() == 1:
            return group_rows(used.repeat(num_rows))
        raise RuntimeError("prompt log-probabilities of a mixed batch in which an adapter changes the output head")

    def add_lora_w13(self, *args: Any, **options: Any) -> Passed:
        """Returns the row groups for add_lora_w2."""
        call = W13Call(*args, **options)
        assert call.add_inputs
        mapping = call.token_lora_mapping
        slots = self.token_lora_indices if mapping is None else mapping
        groups = group_routed_rows(slots[: call.num_tokens], call.topk_ids, call.adapter_enabled, num_experts=call.local_num_experts)
        add_lora_(call.y.view(-1, call.y.shape[-1]), call.x, call.lora_a_stacked, call.lora_b_stacked, groups)
        return groups, None, None, mapping

    def add_lora_w2(self, *args: Any, **options: Any) -> None:
        """The update times the router's weights, which y has already."""
        call = W2Call(*args, **options)
        assert call.add_inputs
        groups: RowGroups = call.sorted_token_ids_lora
        weights = call.topk_weights.reshape(-1).float()
        add_lora_(call.y.view(-1, call.y.shape[-1]), call.x, call.lora_a_stacked, call.lora_b_stacked, groups, row_weights=weights)
