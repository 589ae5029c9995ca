"""One expert projection's LoRA at decode: groups of pairs where the tiles want them, shrink, expand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lora_kernels.configs import Shape, Tiles, group_tiles, tuned
from lora_kernels.launch import Overlap
from lora_kernels.moe_expand import moe_expand_
from lora_kernels.moe_shrink import moe_shrink
from lora_kernels.pair_groups import PairGroups, can_group, group_pairs

CROWDED = 3
"""Pairs for each cell."""


@dataclass(kw_only=True)
class Routing:
    """Which adapter and experts each token of a layer has; made once a layer, for w13 and w2.

    token_slots: [num_tokens] int, negative where a token has no adapter. topk_ids: [num_tokens, top_k] int.
    slot_enabled, slot_ranks: as in moe_shrink.
    """

    token_slots: torch.Tensor
    topk_ids: torch.Tensor
    num_slots: int
    num_experts: int
    slot_enabled: torch.Tensor | None = None
    slot_ranks: torch.Tensor | None = None
    _groups: PairGroups | None = field(default=None, repr=False)

    @property
    def grouped(self) -> bool:
        return self._groups is not None

    def groups(self, overlap: Overlap = Overlap.INPUTS_FRESH) -> PairGroups:
        """Launched at the first call only."""
        if self._groups is None:
            counts = {"num_slots": self.num_slots, "num_experts": self.num_experts}
            self._groups = group_pairs(self.token_slots, self.topk_ids, slot_enabled=self.slot_enabled, overlap=overlap, **counts)
        return self._groups


def moe_lora_(
    out: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    routing: Routing,
    *,
    topk_weights: torch.Tensor | None = None,
    tiles: tuple[Tiles, Tiles] | None = None,
    overlap: Overlap = Overlap.INPUTS_FRESH,
) -> None:
    """Adds w * B A x to the base output [num_tokens, top_k, sum of N] in place; shapes as in moe_shrink and moe_expand_.

    overlap: of the shrink with what precedes it in the stream. IDS_SETTLED may be said when that kernel (the base product, the
    activation) writes neither ids nor adapter weights.

    :raises ValueError: an argument does not fit.
    """
    chosen = tiles or decode_tiles(out, x, lora_a, lora_b, routing)
    groups = None
    if "groups" in (chosen[0].path, chosen[1].path):
        # Made before the shrink, and a grouped shrink that follows at once waits for them. One by pair reads ids and weights beside
        # the list: when that lets it start, what came before the list is complete.
        made_before = routing.grouped
        groups = routing.groups(overlap)
        if chosen[0].path == "groups" and not made_before:
            overlap = min(overlap, Overlap.INPUTS_FRESH)
    options = {
        "num_experts": routing.num_experts,
        "slot_enabled": routing.slot_enabled,
        "slot_ranks": routing.slot_ranks,
        "groups": groups,
    }
    partials = moe_shrink(x, lora_a, routing.token_slots, routing.topk_ids, tiles=chosen[0], overlap=overlap, **options)
    moe_expand_(out, partials, lora_b, routing.token_slots, routing.topk_ids, topk_weights=topk_weights, tiles=chosen[1], **options)


def decode_tiles(
    out: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor], routing: Routing
) -> tuple[Tiles, Tiles]:
    """Tuned or default tiles of the shrink and the expand; by pair where there are too many pairs or cells to group.

    Groups are looked for in all cells: where fewer than half as many pairs are, most programs would find none. Where pairs are several
    times the cells, weights are read so often by pair that they are grouped whatever other models' entries say.
    """
    rows, adapters, rank = routing.topk_ids.numel(), routing.num_slots, lora_a[0].shape[2]
    can = can_group(rows, num_slots=adapters, num_experts=routing.num_experts) and 2 * rows >= adapters * routing.num_experts
    chosen = []
    for op, like, width, slices in (("moe_shrink", x, x.shape[-1], len(lora_a)), ("moe_expand", out, out.shape[-1], len(lora_b))):
        shape = {"rank": rank, "width": width, "slices": slices, "adapters": adapters}
        shape["rows_sharing_x"] = rows // max(len(x), 1) if op == "moe_shrink" else 1
        tiles = tuned(op, like, rows=rows, **shape)
        if tiles.path == "groups" and not can:
            tiles = tuned(op, like, rows=1, **shape)
        elif tiles.path == "pairs" and can and rows >= CROWDED * adapters * routing.num_experts:
            tiles = group_tiles(Shape(op=op, dtype=str(like.dtype).removeprefix("torch."), rows=rows, **shape))
        chosen.append(tiles)
    return chosen[0], chosen[1]
