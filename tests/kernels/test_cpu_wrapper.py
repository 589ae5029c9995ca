"""vLLM's punica interface on a CPU, with vLLM's own step metadata, against one row at a time."""

import pytest
import torch
from lora_kernels.vllm_plugin.cpu_wrapper import CpuLoraWrapper
from vllm.lora.layers import LoRAMapping

SLOTS, RANK, HIDDEN, EXPERTS, TOP_K, INTERMEDIATE = 3, 4, 16, 6, 2, 10
SLOT_IDS = [11, None, 13]
"""Slot 1 is idle; its weights are poisoned in every test."""


def wrapper(token_ids: list[int], sampled_ids: list[int] | None = None) -> CpuLoraWrapper:
    """A wrapper that was told which adapter id each token's (and each sampled row's) request has; 0 is the base."""
    made = CpuLoraWrapper(max_num_batched_tokens=64, max_batches=16, device="cpu")
    mapping = LoRAMapping(tuple(token_ids), tuple(token_ids if sampled_ids is None else sampled_ids), is_prefill=True)
    made.update_metadata(mapping, SLOT_IDS, SLOTS + 1, 100)
    return made


def stack(*shape: int, seed: int) -> torch.Tensor:
    weights = torch.randn(SLOTS, *shape, generator=torch.Generator().manual_seed(seed))
    weights[1] = float("nan")
    return weights


def slot_of(adapter_id: int) -> int:
    return SLOT_IDS.index(adapter_id)


def test_a_merged_linear_layer_gets_each_slices_update() -> None:
    ids = [0, 13, 11, 0, 13]
    widths = (6, 3, 3)
    a = tuple(stack(1, RANK, HIDDEN, seed=i) for i in range(3))
    b = tuple(stack(1, width, RANK, seed=10 + i) for i, width in enumerate(widths))
    x, before = torch.randn(5, HIDDEN), torch.randn(5, 12)
    y = before.clone()

    wrapper(ids).add_lora_linear(y, x, a, b, 1.0, widths)

    for row, adapter_id in enumerate(ids):
        if not adapter_id:
            assert torch.equal(y[row], before[row])
            continue
        deltas = [b[i][slot_of(adapter_id), 0] @ (a[i][slot_of(adapter_id), 0] @ x[row]) for i in range(3)]
        torch.testing.assert_close(y[row], before[row] + torch.cat(deltas), atol=1e-4, rtol=1e-4)


def test_shrink_and_expand_called_apart_give_the_same_as_together() -> None:
    ids = [0, 13, 11, 0, 13]
    widths = (6, 6)
    a = tuple(stack(1, RANK, HIDDEN, seed=i) for i in range(2))
    b = tuple(stack(1, width, RANK, seed=10 + i) for i, width in enumerate(widths))
    x, together = torch.randn(5, HIDDEN), torch.randn(5, 12)
    apart = together.clone()
    buffers = torch.zeros(2, 5, RANK)
    made = wrapper(ids)

    made.add_lora_linear(together, x, a, b, 1.0, widths)
    made.add_shrink(buffers, x, a, 1.0)
    made.add_expand(apart, buffers, b, widths, add_inputs=True)

    assert torch.equal(together, apart)


def test_embedding_rows_of_the_base_keep_their_bits() -> None:
    ids = [13, 0, 0]
    b = stack(1, HIDDEN, RANK, seed=0)
    x, before = torch.randn(3, RANK), torch.randn(3, HIDDEN)
    x[1:] = float("nan")
    y = before.clone()

    wrapper(ids).add_lora_embedding(y, x, b)

    torch.testing.assert_close(y[0], before[0] + b[2, 0] @ x[0])
    assert torch.equal(y[1:], before[1:])


def test_logits_follow_the_sampled_rows_not_the_tokens() -> None:
    a, b = stack(1, RANK, HIDDEN, seed=0), stack(1, 20, RANK, seed=1)
    x, before = torch.randn(2, HIDDEN), torch.randn(2, 24)
    y = before.clone()

    wrapper([11, 11, 11, 0, 0], sampled_ids=[11, 0]).add_lora_logits(y, x, a, b, 1.0)

    torch.testing.assert_close(y[0, :20], before[0, :20] + b[0, 0] @ (a[0, 0] @ x[0]), atol=1e-4, rtol=1e-4)
    assert torch.equal(y[1], before[1])
    assert torch.equal(y[0, 20:], before[0, 20:])


@pytest.mark.parametrize("sampled_ids", [[0, 0], [11, 0]])
def test_prompt_logits_are_the_bases_where_no_adapter_changes_the_head(sampled_ids: list[int]) -> None:
    before = torch.randn(5, 20)
    y = before.clone()

    wrapper([11, 0], sampled_ids).add_lora_logits(
        y, torch.randn(5, HIDDEN), torch.zeros(SLOTS, 1, RANK, HIDDEN), torch.zeros(SLOTS, 1, 20, RANK), 1.0
    )

    assert torch.equal(y, before)


def test_prompt_logits_of_one_adapters_batch_are_that_adapters() -> None:
    a, b = stack(1, RANK, HIDDEN, seed=0), stack(1, 20, RANK, seed=1)
    x, y = torch.randn(5, HIDDEN), torch.zeros(5, 20)

    wrapper([13, 13]).add_lora_logits(y, x, a, b, 1.0)

    torch.testing.assert_close(y, x @ a[2, 0].t() @ b[2, 0].t(), atol=1e-4, rtol=1e-4)


def test_prompt_logits_whose_adapter_cannot_be_known_are_refused() -> None:
    with pytest.raises(RuntimeError, match="output head"):
        wrapper([13, 0]).add_lora_logits(
            torch.zeros(5, 20), torch.randn(5, HIDDEN), stack(1, RANK, HIDDEN, seed=0), stack(1, 20, RANK, seed=1), 1.0
        )


@pytest.mark.parametrize("ids", [[0, 0, 0], [11], [13, 0, 11, 0, 13, 13, 0]], ids=["base only", "one", "mixed"])
@pytest.mark.parametrize("adapted", ["both", "w13", "w2"])
@pytest.mark.parametrize("disabled", [None, 11])
def test_expert_layers_get_gate_up_and_down_updates(ids: list[int], adapted: str, disabled: int | None) -> None:
    num_tokens, rows = len(ids), len(ids) * TOP_K
    w13_a = tuple(stack(EXPERTS, RANK, HIDDEN, seed=i) for i in range(2))
    w13_b = tuple(stack(EXPERTS, INTERMEDIATE, RANK, seed=4 + i) * (adapted != "w2") for i in range(2))
    w2_a = (stack(EXPERTS, RANK, INTERMEDIATE, seed=8),)
    w2_b = (stack(EXPERTS, HIDDEN, RANK, seed=9) * (adapted != "w13"),)
    enabled = torch.tensor([int(i is not None and i != disabled) for i in [*SLOT_IDS, None]], dtype=torch.int)
    generator = torch.Generator().manual_seed(3)
    topk_ids = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    topk_weights = torch.rand(num_tokens, TOP_K, generator=generator)
    x, hidden = torch.randn(num_tokens, HIDDEN), torch.randn(rows, INTERMEDIATE)
    gate_up_before, down_before = torch.randn(num_tokens, TOP_K, 2 * INTERMEDIATE), torch.randn(num_tokens, TOP_K, HIDDEN)
    gate_up, down = gate_up_before.clone(), down_before.clone()
    made, none = wrapper(ids), torch.empty(0)

    rows_of, cells, sizes, token_mapping = made.add_lora_w13(
        gate_up, x, w13_a, w13_b, topk_ids, topk_weights, None, none, none, num_tokens, TOP_K, SLOTS, enabled,
        EXPERTS, TOP_K, 2, False, False,
    )  # fmt: skip
    made.add_lora_w2(
        down, hidden, w2_a, w2_b, topk_weights, rows_of, cells, sizes, token_mapping, num_tokens, none, none, TOP_K,
        SLOTS, enabled, TOP_K, False, 0, False,
    )  # fmt: skip

    for token, adapter_id in enumerate(ids):
        if adapter_id in (0, disabled):
            assert torch.equal(gate_up[token], gate_up_before[token])
            assert torch.equal(down[token], down_before[token])
            continue
        slot = slot_of(adapter_id)
        for choice, expert in enumerate(topk_ids[token].tolist()):
            gate, up = (w13_b[i][slot, expert] @ (w13_a[i][slot, expert] @ x[token]) for i in range(2))
            delta = w2_b[0][slot, expert] @ (w2_a[0][slot, expert] @ hidden[token * TOP_K + choice])
            expected_gate_up = gate_up_before[token, choice] + torch.cat((gate, up))
            expected_down = down_before[token, choice] + delta * topk_weights[token, choice]
            torch.testing.assert_close(gate_up[token, choice], expected_gate_up, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(down[token, choice], expected_down, atol=1e-4, rtol=1e-4)
