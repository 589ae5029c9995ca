"""Values that only the device knows: checked where asked for, harmless where not (the ops' own tests show that)."""

import pytest
import torch
from lora_kernels import arguments
from lora_kernels.moe_expand import moe_expand_
from lora_kernels.moe_shrink import moe_shrink
from lora_kernels.pair_groups import group_pairs
from lora_kernels.testing import Layer, make_batch, make_weights
from lora_kernels.work_list import build_work_list

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYER = Layer(slots=2, experts=3, top_k=2, k=32, widths=(16,), rank=16)


@pytest.fixture
def values_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CHECK_VALUES", True)


@pytest.mark.usefixtures("values_checked")
@pytest.mark.parametrize("op", ["shrink", "expand"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_slots", [0, 2], r"token_slots: expected ids in \[-1, 2\), given ids from 0 to 2"),
        ("topk_ids", [[0, 1], [3, 1]], r"topk_ids: expected ids in \[-1, 3\), given ids from 0 to 3"),
        ("slot_ranks", [16, 17], r"slot_ranks: expected ranks in \[0, 17\), given ranks from 16 to 17"),
    ],
)
def test_an_id_or_rank_out_of_range_is_named(op: str, name: str, value: list, message: str) -> None:
    weights, batch = make_weights(LAYER, torch.float32, DEVICE), make_batch(LAYER, [0, 1], torch.float32, DEVICE)
    given = {"token_slots": batch.token_slots, "topk_ids": batch.topk_ids, "num_experts": 3}
    partials = moe_shrink(batch.x, weights.a, **given)
    given[name] = torch.tensor(value, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        if op == "shrink":
            moe_shrink(batch.x, weights.a, **given)
        else:
            moe_expand_(batch.base, partials, weights.b, **given)


@pytest.mark.usefixtures("values_checked")
def test_the_lists_of_pairs_name_them_too() -> None:
    slots, experts = (torch.tensor(ids, dtype=torch.int32, device=DEVICE) for ids in ([0, 2], [[0, 1], [2, 1]]))
    with pytest.raises(ValueError, match=r"token_slots: expected ids in \[-1, 2\), given ids from 0 to 2"):
        group_pairs(slots, experts, num_slots=2, num_experts=3)
    with pytest.raises(ValueError, match=r"topk_ids: expected ids in \[-1, 2\), given ids from 0 to 2"):
        build_work_list(experts, slots, num_adapters=3, num_experts=2, block_m=16)


@pytest.mark.usefixtures("values_checked")
def test_what_is_in_range_passes() -> None:
    weights, batch = make_weights(LAYER, torch.float32, DEVICE), make_batch(LAYER, [0, -1], torch.float32, DEVICE)
    ranks = torch.tensor([16, 0], dtype=torch.int32, device=DEVICE)
    moe_shrink(batch.x, weights.a, batch.token_slots, batch.topk_ids, num_experts=3, slot_ranks=ranks)
