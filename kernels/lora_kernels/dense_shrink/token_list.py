"""The list that serves long batches of dense layers: tokens sorted by adapter slot, made once for all layers of a forward pass."""

from dataclasses import dataclass

import torch

from lora_kernels.arguments import IDS, check, check_tensor


@dataclass(frozen=True, kw_only=True)
class TokenList:
    """Tokens by group of one slot each. In a captured graph its tensors are overwritten between replays, never replaced.

    order: [num_tokens], the tokens group by group. slots: [groups], each at most once; outside the stacks' range: no adapter.
    starts, counts: [groups] and more, the group's first place in the order and its tokens. Groups without tokens may have any slot.
    vLLM's LoRAKernelMeta holds these as token_indices_sorted_by_lora_ids, active_lora_ids, lora_token_start_loc, num_tokens_per_lora.
    """

    order: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @property
    def num_groups(self) -> int:
        return len(self.slots)


def list_tokens(token_slots: torch.Tensor, *, num_slots: int) -> TokenList:
    """The list of a batch, made on the device without a synchronisation. token_slots: [num_tokens]; out of range: no adapter.

    :raises ValueError: an argument does not fit.
    """
    check_tensor("token_slots", token_slots, shape=(None,), dtypes=IDS, device=token_slots.device)
    check("num_slots", "1 or more", num_slots, holds=num_slots >= 1)
    by_slot, order = token_slots.sort(stable=True)
    slots = torch.arange(num_slots + 1, device=token_slots.device, dtype=token_slots.dtype)
    bounds = torch.searchsorted(by_slot, slots, out_int32=True)
    return TokenList(order=order.to(torch.int32), slots=slots[:-1].to(torch.int32), starts=bounds[:-1], counts=bounds.diff())


def check_token_list(token_list: TokenList | None, *, num_tokens: int, device: torch.device) -> None:
    """:raises ValueError: it is not for this many tokens, or a tensor of it does not fit."""
    if token_list is None:
        return
    check_tensor("token_list.order", token_list.order, shape=(num_tokens,), dtypes=IDS, device=device)
    check_tensor("token_list.slots", token_list.slots, shape=(None,), dtypes=IDS, device=device)
    for name, per_group in (("starts", token_list.starts), ("counts", token_list.counts)):
        check_tensor(f"token_list.{name}", per_group, shape=(None,), dtypes=IDS, device=device)
        check(
            f"token_list.{name}", f"{token_list.num_groups} or more groups", len(per_group), holds=len(per_group) >= token_list.num_groups
        )
