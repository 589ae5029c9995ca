"""vLLM's punica wrapper on a GPU: the tables of a step without a host sync, and the layers' LoRA calls answered by our kernels.

A call whose shape, dtype or layout is not ours goes to vLLM's own kernels, with one log line; so do embeddings, logits and
fully sharded layers. In a step, or a captured graph, without adapters no LoRA kernel is launched at all.
"""

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
from vllm.utils.torch_utils import direct_register_custom_op

from lora_kernels.dense_lora import TokenList, dense_lora_, needs_token_list
from lora_kernels.launch import Overlap
from lora_kernels.moe_lora import Routing, moe_lora_
from lora_kernels.moe_prefill import group_tokens
from lora_kernels.pair_groups.op import MOST_PAIRS
from lora_kernels.vllm_plugin.adapter_facts import AdapterFacts
from lora_kernels.vllm_plugin.expert_calls import NOTHING, Passed, W2Call, W13Call
from lora_kernels.vllm_plugin.step_tables import NO_SLOT, StepTables, slots_of
from lora_kernels.work_list import WorkList

log = logging.getLogger(__name__)

OWN_RANKS = os.environ.get("LORA_KERNELS_OWN_RANKS") == "1"
"""Whether a slot's rows beyond its adapter's own rank are left unread: the kernels then look a rank up and mask by it. On an H200 that
costs 3 to 18% of an update at decode where ranks are full, and saves up to 13% where they are a quarter of the slot's."""

MOST_PAIRS_A_CALL = MOST_PAIRS
"""(token, expert) pairs that the decode kernels group at a time: a longer batch whose layer has no fused path goes in parts."""

_wrappers: list["GpuLoraWrapper"] = []
_told: set[str] = set()


def tell_once(message: str) -> None:
    """One warning a process, however often it is so."""
    if message not in _told:
        _told.add(message)
        log.warning(message)


@dataclass(frozen=True)
class RoutedTokens:
    """A layer's routing for w13 and w2, in runs of tokens that one call takes. overlap: with what precedes w13's update in the stream."""

    parts: list[tuple[slice, Routing]]
    overlap: Overlap

    @classmethod
    def of(
        cls,
        token_slots: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        num_slots: int,
        num_experts: int,
        slot_enabled: torch.Tensor,
        slot_ranks: torch.Tensor | None,
        overlap: Overlap,
    ) -> "RoutedTokens":
        num_tokens, top_k = topk_ids.shape
        most = max(1, MOST_PAIRS_A_CALL // top_k)
        runs = [slice(first, min(first + most, num_tokens)) for first in range(0, num_tokens, most)]
        layer = {"num_slots": num_slots, "num_experts": num_experts, "slot_enabled": slot_enabled, "slot_ranks": slot_ranks}
        return cls([(run, Routing(token_slots=token_slots[run], topk_ids=topk_ids[run], **layer)) for run in runs], overlap)

    def add_lora_(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        lora_a: tuple[torch.Tensor, ...],
        lora_b: tuple[torch.Tensor, ...],
        *,
        topk_weights: torch.Tensor | None = None,
    ) -> None:
        """out: [num_tokens, top_k, N]. x: a row for each token (w13) or each pair (w2).

        :raises ValueError: an argument does not fit; nothing is written then.
        """
        rows_a_token = len(x) // max(len(out), 1)
        for run, routing in self.parts:
            rows = x[run.start * rows_a_token : run.stop * rows_a_token]
            weights = None if topk_weights is None else topk_weights[run]
            moe_lora_(out[run], rows, lora_a, lora_b, routing, topk_weights=weights, overlap=self.overlap)


class GpuLoraWrapper(PunicaWrapperGPU):
    """num_adapters: how many adapters the step's rows have. adapter_facts: by adapter id, of those in slots; told before a step.
    slot_ranks: [max_loras] int32, each slot's own rank; None where the kernels are to read whole slots."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        metas = (self.token_mapping_meta, self.prompt_mapping_meta)
        self._tables = StepTables(self, metas, max_rows=max_num_batched_tokens, max_loras=self.max_loras)
        self.num_adapters = 0
        self.adapter_facts: dict[int, AdapterFacts] = {}
        self.slot_ranks = self._tables.slot_ranks if OWN_RANKS else None
        self._tokens_by_adapter: WorkList | None = None
        self._slots_of_head: set[int] = set()
        self._number = len(_wrappers)
        _wrappers.append(self)

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any) -> None:
        self.is_prefill = mapping.is_prefill
        tokens = slots_of(mapping.index_mapping, lora_index_to_id)
        samples = slots_of(mapping.prompt_mapping, lora_index_to_id)
        unknown = AdapterFacts(self.lora_config.max_lora_rank, changes_head=True)
        facts = [self.adapter_facts.get(lora_id or 0, unknown) for lora_id in lora_index_to_id]
        self._tables.write(tokens, samples, slot_ranks=[of.rank for of in facts], max_loras=max_loras, vocab_size=vocab_size)
        sampled = set(samples.tolist())
        self._slots_of_head = sampled if any(slot != NO_SLOT and facts[slot].changes_head for slot in sampled) else set()
        self._tokens_by_adapter = None
        self.indices_len[:] = [len(tokens), len(samples), len(samples), len(tokens)]
        self.num_adapters = len(set(tokens.tolist()) - {NO_SLOT})

    def token_slots(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int32, -1 for rows without an adapter."""
        return self.token_mapping_meta.token_lora_mapping[:num_tokens]

    def tokens_by_adapter(self, num_tokens: int, block: int) -> WorkList:
        """For the sum over choices at prefill: made once a step, for all layers whichever adapters leave them alone."""
        made = self._tokens_by_adapter
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # Each layer's own: another graph's would not be made again when this one is replayed.
            return group_tokens(self.token_slots(num_tokens), num_adapters=self.max_loras, block=block)
        if made is None or (made.num_tokens, made.block_m) != (num_tokens, block):
            made = self._tokens_by_adapter = group_tokens(self.token_slots(num_tokens), num_adapters=self.max_loras, block=block)
        return made

    def _token_list(self, num_tokens: int) -> TokenList:
        meta = self.token_mapping_meta
        order = meta.token_indices_sorted_by_lora_ids[:num_tokens]
        return TokenList(order=order, slots=meta.active_lora_ids, starts=meta.lora_token_start_loc, counts=meta.num_tokens_per_lora)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        if scale != 1.0 or not kwargs.get("add_inputs", True):
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **kwargs)
            return
        # One operation, opaque to the compiler: which launches it makes is decided when a graph is captured.
        torch.ops.vllm.tenantry_dense_lora(y, x, list(lora_a_stacked), list(lora_b_stacked), list(output_slices), self._number)

    def dense(self, y: torch.Tensor, x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], output_slices: list[int]) -> None:
        """y += B A x on the rows with adapters."""
        if not self.num_adapters:
            return
        x = x.view(-1, x.shape[-1])
        tokens = self._token_list(len(x)) if needs_token_list(len(x)) else None
        try:
            # The kernel before wrote neither slots nor adapters.
            options = {"slot_ranks": self.slot_ranks, "token_list": tokens, "overlap": Overlap.IDS_SETTLED}
            dense_lora_(y.view(-1, y.shape[-1]), x, a, b, self.token_slots(len(x)), **options)
        except ValueError as error:
            tell_once(f"a dense layer is served by vLLM's own LoRA kernels: {error}")
            super().add_lora_linear(y, x, tuple(a), tuple(b), 1.0, tuple(output_slices))

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
        """Nothing where no adapter of the step changes the head.

        Prompt log-probabilities ask for one prompt's rows and do not say whose they are; vLLM's own kernels take them for the sampled
        ones, and where they are fewer write beyond them. Here they are answered when the whole batch has one adapter. Rows as many as the
        sampled ones are taken for those.

        :raises RuntimeError: several adapters, or some and the base, one of which changes the head, and rows of which nobody can tell.
        """
        if not self._slots_of_head:
            return
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if len(x) == self.indices_len[1]:
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs)
        elif len(self._slots_of_head) == 1:
            (slot,) = self._slots_of_head
            y += (x @ lora_a_stacked[slot, 0].T @ lora_b_stacked[slot, 0].T).to(y.dtype)
        else:
            raise RuntimeError("prompt log-probabilities of a mixed batch in which an adapter changes the output head")

    def add_lora_w13(self, *args: Any, **options: Any) -> Passed:
        """The first of what it returns is for add_lora_w2: the routing where our kernels serve, else vLLM's sorted ids."""
        call = W13Call(*args, **options)
        if self.no_adapter_here(call.token_lora_mapping):
            return NOTHING
        reason = _not_ours(call)
        if reason is None:
            mapping = call.token_lora_mapping
            slots = self.token_slots(call.num_tokens) if mapping is None else mapping[: call.num_tokens]
            layer = {"num_slots": call.max_loras, "num_experts": call.local_num_experts, "overlap": overlap_after(call.expert_map)}
            ids = local_ids(call.topk_ids, call.expert_map)
            routed = RoutedTokens.of(slots, ids, slot_enabled=call.adapter_enabled, slot_ranks=self.slot_ranks, **layer)
            try:
                routed.add_lora_(_by_token(call), call.x, unshared(call.lora_a_stacked), call.lora_b_stacked)
            except ValueError as error:
                reason = str(error)
            else:
                return routed, None, None, mapping
        tell_once(f"an expert layer is served by vLLM's own LoRA kernels: {reason}")
        return super().add_lora_w13(*args, **options)

    def add_lora_w2(self, *args: Any, **options: Any) -> None:
        call = W2Call(*args, **options)
        if self.no_adapter_here(call.token_lora_mapping):
            return
        routed = call.sorted_token_ids_lora
        if isinstance(routed, RoutedTokens):
            weights = call.topk_weights
            routed.add_lora_(_by_token(call), call.x, call.lora_a_stacked, unshared(call.lora_b_stacked), topk_weights=weights)
            return
        super().add_lora_w2(*args, **options)

    def no_adapter_here(self, token_lora_mapping: torch.Tensor | None) -> bool:
        """Rows dispatched from other ranks (a mapping of their own) may have adapters that this rank's step has not."""
        return token_lora_mapping is None and not self.num_adapters


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Expert ids as this rank counts them, -1 where the expert lives on another."""
    if expert_map is None:
        return topk_ids
    return torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()].to(topk_ids.dtype), -1)


def overlap_after(expert_map: torch.Tensor | None) -> Overlap:
    """What a shrink may start before: the base's product writes neither ids nor adapters, `local_ids` with a map just wrote the ids."""
    return Overlap.IDS_SETTLED if expert_map is None else Overlap.INPUTS_FRESH


def unshared(stacks: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A factor that vLLM repeats for every expert by a stride of 0, as the one it is."""
    return tuple(stack[:, :1] if stack.stride(1) == 0 else stack for stack in stacks)


def _by_token(call: W13Call | W2Call) -> torch.Tensor:
    return call.y.view(call.num_tokens, call.top_k_num, call.y.shape[-1])


def _not_ours(call: W13Call) -> str | None:
    if call.fully_sharded:
        return "fully sharded adapters"
    if not call.add_inputs:
        return "the update apart from the base (a second stream)"
    return None


def _dense_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    output_slices: list[int],
    wrapper: int,
) -> None:
    _wrappers[wrapper].dense(y, x, lora_a, lora_b, output_slices)


def _dense_lora_shape(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    output_slices: list[int],
    wrapper: int,
) -> None:
    return


direct_register_custom_op("tenantry_dense_lora", _dense_lora, mutates_args=["y"], fake_impl=_dense_lora_shape)
