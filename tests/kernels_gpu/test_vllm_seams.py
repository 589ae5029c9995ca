"""The GPU plugin on vLLM 0.26's own classes: the wrapper's expert and dense calls, and the seams of an experts class.

Needs that vLLM to be importable (its source is enough: the interpreter runs the kernels); skipped elsewhere.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_kernels.configs.plans import LayerShape, plan_for
from lora_kernels.moe_prefill import PrefillPlan, SumTiles
from lora_kernels.moe_prefill.plan import TokenTiles

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own imports
    vllm = pytest.importorskip("vllm", reason="needs vLLM 0.26")
    from lora_kernels.vllm_plugin import expert_seams, fused_steps, gpu_wrapper
    from lora_kernels.vllm_plugin.adapter_facts import AdapterFacts
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE, RANK, SLOTS = 18, 2, 4, 64, 32, 16, 3
IDS = (7,) * 6 + (0,) * 5 + (9,) * 7
SLOT_OF_TOKEN = (2,) * 6 + (-1,) * 5 + (0,) * 7
SLOT_IDS = [9, None, 7]


@pytest.fixture(autouse=True)
def tables_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hides its triton operations, and with them a plain dataclass, where no GPU is found."""
    if not hasattr(punica_gpu, "LoRAKernelMeta"):
        path = Path(vllm.__file__).parent / "lora/ops/triton_ops/lora_kernel_metadata.py"
        spec = importlib.util.spec_from_file_location("lora_kernel_metadata", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "lora_kernel_metadata", module)
        spec.loader.exec_module(module)
        monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", module.LoRAKernelMeta, raising=False)


@pytest.fixture
def wrapper() -> gpu_wrapper.GpuLoraWrapper:
    config = SimpleNamespace(max_loras=SLOTS, max_lora_rank=RANK, specialize_active_lora=False)
    made = gpu_wrapper.GpuLoraWrapper(64, 8, torch.device(DEVICE), lora_config=config)
    made.update_metadata(LoRAMapping(IDS, (7, 0, 9)), SLOT_IDS, SLOTS + 1, 1000)
    return made


@pytest.fixture
def random() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    yield lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)


def routing(random: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return random(TOKENS, EXPERTS).topk(TOP_K).indices.int(), random(TOKENS, TOP_K).abs()


def update(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, slot: int, expert: int) -> torch.Tensor:
    a_expert, b_expert = min(expert, a.shape[1] - 1), min(expert, b.shape[1] - 1)
    return b[slot, b_expert].double() @ (a[slot, a_expert].double() @ x.double())


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("shared", "pairs_a_call"), [(False, 4096), (True, 4096), (False, 10)], ids=["apart", "shared", "in parts"])
def test_both_expert_projections_get_the_update_of_each_tokens_own_adapter(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, monkeypatch: pytest.MonkeyPatch, slices: int, shared: bool, pairs_a_call: int
) -> None:
    monkeypatch.setattr(gpu_wrapper, "MOST_PAIRS_A_CALL", pairs_a_call)
    ids, weights = routing(random)
    x, y = random(TOKENS, HIDDEN), random(TOKENS, TOP_K, 2 * INTERMEDIATE)
    a = tuple(random(SLOTS, 1 if shared else EXPERTS, RANK, HIDDEN) for _ in range(slices))
    b = tuple(random(SLOTS, EXPERTS, 2 * INTERMEDIATE // slices, RANK) for _ in range(slices))
    x2, y2 = random(TOKENS * TOP_K, INTERMEDIATE), random(TOKENS, TOP_K, HIDDEN)
    a2, b2 = random(SLOTS, EXPERTS, RANK, INTERMEDIATE), random(SLOTS, 1 if shared else EXPERTS, HIDDEN, RANK)
    enabled = torch.ones(SLOTS + 1, dtype=torch.int32, device=DEVICE)
    expected, expected2 = y.double(), y2.double()
    for token, slot in enumerate(SLOT_OF_TOKEN):
        for choice in range(TOP_K if slot >= 0 else 0):
            expert, pair = int(ids[token, choice]), token * TOP_K + choice
            expected[token, choice] += torch.cat([update(a_, b_, x[token], slot, expert) for a_, b_ in zip(a, b, strict=True)])
            expected2[token, choice] += weights[token, choice].double() * update(a2, b2, x2[pair], slot, expert)
    base_rows, base_rows2 = y[6:11].clone(), y2[6:11].clone()

    repeated = tuple(stack.expand(-1, EXPERTS, -1, -1) for stack in a)
    passed = wrapper.add_lora_w13(
        y, x, repeated, b, ids, weights, None, None, None, TOKENS, TOP_K, SLOTS, enabled, EXPERTS, TOP_K, slices, False, False
    )  # fmt: skip
    repeated2 = (b2.expand(-1, EXPERTS, -1, -1),)
    wrapper.add_lora_w2(
        y2, x2, (a2,), repeated2, weights, *passed, TOKENS, None, None, TOP_K, SLOTS, enabled, TOP_K, False, 0, False
    )  # fmt: skip

    assert error(y, expected) < 2e-6 and error(y2, expected2) < 2e-6
    assert torch.equal(y[6:11], base_rows) and torch.equal(y2[6:11], base_rows2)


def test_experts_of_other_ranks_are_left_alone(wrapper: gpu_wrapper.GpuLoraWrapper, random: Any) -> None:
    ids, _ = routing(random)
    expert_map = torch.tensor([-1, 0, 1, -1], dtype=torch.int32, device=DEVICE)

    local = gpu_wrapper.local_ids(ids, expert_map)

    assert local.tolist() == [[(-1, 0, 1, -1)[expert] for expert in row] for row in ids.tolist()]
    skipped = torch.full((1, 1), -1, dtype=torch.int32, device=DEVICE)
    assert gpu_wrapper.local_ids(skipped, expert_map).tolist() == [[-1]]


@pytest.mark.parametrize("listed", [False, True], ids=["short", "long"])
def test_a_dense_layer_of_three_slices_is_updated_in_place(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    monkeypatch.setattr(gpu_wrapper, "needs_token_list", lambda num_tokens: listed)
    widths = (48, 16, 16)
    x, y = random(TOKENS, HIDDEN), random(TOKENS, sum(widths))
    a, b = [random(SLOTS, 1, RANK, HIDDEN) for _ in widths], [random(SLOTS, 1, width, RANK) for width in widths]
    expected = y.double()
    for token, slot in enumerate(SLOT_OF_TOKEN):
        if slot >= 0:
            expected[token] += torch.cat([update(a_, b_, x[token], slot, 0) for a_, b_ in zip(a, b, strict=True)])

    wrapper.dense(y, x, a, b, list(widths))

    assert error(y, expected) < 2e-6


def test_a_step_without_adapters_launches_nothing(wrapper: gpu_wrapper.GpuLoraWrapper, random: Any) -> None:
    wrapper.update_metadata(LoRAMapping((0, 0), (0,)), SLOT_IDS, SLOTS + 1, 1000)
    y = random(2, 16)
    before = y.clone()

    wrapper.dense(y, None, None, None, [])  # would fail at the first look at any of them

    assert torch.equal(y, before)


WITH_HEAD, WITHOUT_HEAD = AdapterFacts(RANK, changes_head=True), AdapterFacts(RANK, changes_head=False)


def logits(wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits before, after) of fewer rows than the step samples."""
    memory, x = random(num_rows + 8, 48), random(num_rows, HIDDEN)
    before = memory.clone()
    wrapper.add_lora_logits(memory[:num_rows], x, random(SLOTS, 1, RANK, HIDDEN), random(SLOTS, 1, 48, RANK), 1.0)
    assert torch.equal(memory[num_rows:], before[num_rows:])
    return before[:num_rows], memory[:num_rows]


def test_prompt_log_probabilities_of_rows_fewer_than_are_sampled_write_nothing_where_no_adapter_changes_the_head(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any
) -> None:
    wrapper.adapter_facts = {7: WITHOUT_HEAD, 9: WITHOUT_HEAD}
    wrapper.update_metadata(LoRAMapping(IDS, (7, 0, 9)), SLOT_IDS, SLOTS + 1, 1000)

    before, after = logits(wrapper, random, 2)

    assert torch.equal(before, after)


@pytest.mark.parametrize("num_rows", [2, 20])
def test_prompt_log_probabilities_of_a_batch_of_one_adapter_get_its_heads_update(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, num_rows: int
) -> None:
    wrapper.adapter_facts = {7: WITH_HEAD, 9: WITH_HEAD}
    wrapper.update_metadata(LoRAMapping((7,) * TOKENS, (7,) * 3), SLOT_IDS, SLOTS + 1, 1000)
    x, y = random(num_rows, HIDDEN), random(num_rows, 48)
    a, b = random(SLOTS, 1, RANK, HIDDEN), random(SLOTS, 1, 48, RANK)
    expected = y.double() + torch.stack([update(a, b, row, 2, 0) for row in x])

    wrapper.add_lora_logits(y, x, a, b, 1.0)

    assert error(y, expected) < 2e-6


def test_prompt_log_probabilities_of_a_mixed_batch_are_refused_where_an_adapter_changes_the_head(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any
) -> None:
    wrapper.adapter_facts = {7: WITHOUT_HEAD, 9: WITH_HEAD}
    wrapper.update_metadata(LoRAMapping(IDS, (7, 0, 9)), SLOT_IDS, SLOTS + 1, 1000)

    with pytest.raises(RuntimeError, match="prompt log-probabilities"):
        logits(wrapper, random, 2)


class TorchExperts:
    """An experts class as vLLM's are built: hooks around two products."""

    def __init__(self, activation: MoEActivation) -> None:
        self.moe_config = SimpleNamespace(activation=activation)
        self.quant_config = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None)

    def activation(self, activation: MoEActivation, output: torch.Tensor, input: torch.Tensor) -> None:
        if activation == MoEActivation.SILU:
            gate, up = input.chunk(2, -1)
            output.copy_(torch.nn.functional.silu(gate) * up)
        else:
            gate, up = input[:, ::2].clamp(max=7), input[:, 1::2].clamp(-7, 7)
            output.copy_((up + 1) * gate * torch.sigmoid(1.702 * gate))

    def moe_sum(self, input: torch.Tensor, output: torch.Tensor) -> None:
        torch.sum(input, 1, out=output)

    def run(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer = {"topk_weights": weights, "w1": w1, "w2": w2, "num_tokens": len(x), "top_k_num": TOP_K}
        gate_up = torch.einsum("tkoi,ti->tko", w1[ids.long()], x).contiguous()
        passed = self.apply_w13_lora(self._lora_context, y=gate_up, x=x, topk_ids=ids, expert_map=None, **layer)
        hidden = gate_up.new_empty(len(x) * TOP_K, INTERMEDIATE)
        self.activation(self.moe_config.activation, hidden, gate_up.view(len(hidden), -1))
        down = torch.einsum("tkoi,tki->tko", w2[ids.long()], hidden.view(len(x), TOP_K, -1)) * weights[..., None]
        down = down.contiguous()
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora", "token_lora_mapping")
        self.apply_w2_lora(self._lora_context, y=down, x=hidden, **layer, **dict(zip(names, passed, strict=True)))
        out = x.new_empty(len(x), HIDDEN)
        self.moe_sum(down, out)
        return out


class SeamTorchExperts(expert_seams.SeamExperts, TorchExperts):
    pass


def layer_context(wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, slices: int) -> MoELoRAContext:
    return MoELoRAContext(
        w13_lora_a_stacked=tuple(random(SLOTS, EXPERTS, RANK, HIDDEN) / 8 for _ in range(slices)),
        w13_lora_b_stacked=tuple(random(SLOTS, EXPERTS, 2 * INTERMEDIATE // slices, RANK) / 8 for _ in range(slices)),
        w2_lora_a_stacked=(random(SLOTS, EXPERTS, RANK, INTERMEDIATE) / 8,),
        w2_lora_b_stacked=(random(SLOTS, EXPERTS, HIDDEN, RANK) / 8,),
        adapter_enabled=torch.ones(SLOTS + 1, dtype=torch.int32, device=DEVICE),
        max_loras=SLOTS,
        top_k=TOP_K,
        w13_num_slices=slices,
        fully_sharded=False,
        tp_rank=0,
        tp_size=1,
        local_num_experts=EXPERTS,
        punica_wrapper=wrapper,
        use_tuned_config=False,
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("activation", "slices"), [(MoEActivation.SILU, 2), (MoEActivation.SWIGLUOAI, 1)])
def test_the_fused_paths_in_the_seams_give_what_the_path_by_call_gives(
    wrapper: gpu_wrapper.GpuLoraWrapper,
    random: Any,
    monkeypatch: pytest.MonkeyPatch,
    activation: MoEActivation,
    slices: int,
    phase: str,
) -> None:
    context = layer_context(wrapper, random, slices)
    experts = SeamTorchExperts(activation)
    experts.set_lora_context(context)
    ids, weights = routing(random)
    case = (random(TOKENS, HIDDEN), random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8, random(EXPERTS, HIDDEN, INTERMEDIATE) / 8, ids, weights)
    monkeypatch.setattr(expert_seams, "DECODE_UP_TO_TOKENS", 0)
    as_vllm = SeamTorchExperts(activation)
    as_vllm.set_lora_context(context)
    as_vllm._fused = None
    by_call = as_vllm.run(*case)
    fused_calls = []
    step = fused_steps.PrefillStep if phase == "prefill" else fused_steps.DecodeStep
    activate = step.activate
    monkeypatch.setattr(step, "activate", lambda *call: (fused_calls.append(1), activate(*call)))
    if phase == "prefill":
        monkeypatch.setattr(expert_seams, "choose_path", lambda shape: "prefill")
    else:
        monkeypatch.setattr(expert_seams, "DECODE_UP_TO_TOKENS", TOKENS)

    fused = experts.run(*case)
    wrapper.num_adapters = 0
    base = experts.run(*case)

    assert fused_calls == [1]
    assert error(fused, by_call.double()) < 2e-6
    assert error(base[:6], by_call[:6].double()) > 0.01
    assert torch.equal(base[6:11], fused[6:11])
    monkeypatch.setattr(expert_seams, "DECODE_UP_TO_TOKENS", 0)
    monkeypatch.setattr(expert_seams, "choose_path", lambda shape: "decode")
    wrapper.num_adapters = 2
    between = experts.run(*case)
    assert fused_calls == [1]
    assert error(between, by_call.double()) < 2e-6
    assert torch.equal(base[6:11], between[6:11])


@pytest.mark.parametrize("by_tokens", [False, True], ids=["schedule", "experts"])
def test_an_adapter_that_leaves_the_experts_alone_changes_nothing_at_prefill_and_no_unwritten_row_is_read(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, monkeypatch: pytest.MonkeyPatch, by_tokens: bool
) -> None:
    def plan_with_listed_tokens(shape: LayerShape, device: torch.device) -> PrefillPlan:
        plan = plan_for(shape, device)
        if by_tokens:
            one_part = replace(plan.activate, parts=1)
            tiles = TokenTiles(block_t=16, block_n=64, num_warps=4, num_stages=2)
            return replace(plan, activate=one_part, expand_sum=None, sum_experts=tiles)
        return replace(plan, expand_sum=SumTiles(block_m=plan.block_m, chunk_n=64, lead=1, ring=2), sum_experts=None)

    monkeypatch.setattr(fused_steps, "plan_for", plan_with_listed_tokens)
    monkeypatch.setattr(expert_seams, "DECODE_UP_TO_TOKENS", 0)
    monkeypatch.setattr(expert_seams, "choose_path", lambda shape: "prefill")
    context = layer_context(wrapper, random, 2)
    experts = SeamTorchExperts(MoEActivation.SILU)
    experts.set_lora_context(context)
    ids, weights = routing(random)
    case = (random(TOKENS, HIDDEN), random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 8, random(EXPERTS, HIDDEN, INTERMEDIATE) / 8, ids, weights)
    torch.use_deterministic_algorithms(True)  # torch.empty is full of NaN then
    try:
        with_both = experts.run(*case)
        context.adapter_enabled[2] = 0
        with_one = experts.run(*case)
        wrapper.num_adapters = 0
        base = experts.run(*case)
    finally:
        torch.use_deterministic_algorithms(False)

    assert torch.equal(with_one[:11], base[:11])
    assert error(with_one[11:], with_both[11:].double()) < 2e-6
    assert error(with_both[:6], base[:6].double()) > 0.01


def test_a_layer_of_more_slices_than_three_is_left_to_vllms_kernels_and_told_once(
    wrapper: gpu_wrapper.GpuLoraWrapper, random: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    widths, calls = (16, 16, 16, 16), []
    a, b = [random(SLOTS, 1, RANK, HIDDEN) for _ in widths], [random(SLOTS, 1, width, RANK) for width in widths]
    monkeypatch.setattr(gpu_wrapper, "_told", set())
    monkeypatch.setattr(gpu_wrapper.PunicaWrapperGPU, "add_lora_linear", lambda self, *call: calls.append(call[4:]))

    for _ in range(2):
        wrapper.dense(random(TOKENS, 64), random(TOKENS, HIDDEN), a, b, list(widths))

    assert calls == [(1.0, widths)] * 2
    assert [record.message for record in caplog.records] == [
        "a dense layer is served by vLLM's own LoRA kernels: lora_a: expected 1 to 3 stacks, given 4 stacks"
    ]


def test_tokens_are_grouped_by_adapter_once_a_step(wrapper: gpu_wrapper.GpuLoraWrapper) -> None:
    first = wrapper.tokens_by_adapter(TOKENS, 16)

    assert wrapper.tokens_by_adapter(TOKENS, 16) is first
    assert wrapper.tokens_by_adapter(TOKENS, 64).block_m == 64
    first = wrapper.tokens_by_adapter(TOKENS, 16)
    assert wrapper.tokens_by_adapter(TOKENS - 1, 16).num_tokens == TOKENS - 1
    wrapper.update_metadata(LoRAMapping(IDS[::-1], (7, 0, 9)), SLOT_IDS, SLOTS + 1, 1000)
    assert wrapper.tokens_by_adapter(TOKENS, 16) is not first


def test_what_lies_beyond_an_adapters_own_rank_is_not_read(random: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_wrapper, "OWN_RANKS", True)
    config = SimpleNamespace(max_loras=SLOTS, max_lora_rank=RANK, specialize_active_lora=False)
    wrapper = gpu_wrapper.GpuLoraWrapper(64, 8, torch.device(DEVICE), lora_config=config)
    wrapper.adapter_facts = {7: AdapterFacts(rank=8, changes_head=False)}
    wrapper.update_metadata(LoRAMapping(IDS, (7, 0, 9)), SLOT_IDS, SLOTS + 1, 1000)
    assert wrapper.slot_ranks is not None and wrapper.slot_ranks.tolist() == [RANK, RANK, 8]
    ids, _ = routing(random)
    x, y, dense = random(TOKENS, HIDDEN), random(TOKENS, TOP_K, 32), random(TOKENS, 32)
    a, b = random(SLOTS, EXPERTS, RANK, HIDDEN), random(SLOTS, EXPERTS, 32, RANK)
    enabled = torch.ones(SLOTS + 1, dtype=torch.int32, device=DEVICE)
    expected, expected_dense = y.double(), dense.double()
    for token, slot in enumerate(SLOT_OF_TOKEN):
        if slot >= 0:
            rank = 8 if slot == 2 else RANK
            for choice, expert in enumerate(ids[token].tolist()):
                expected[token, choice] += update(a[:, :, :rank], b[..., :rank], x[token], slot, expert)
            expected_dense[token] += update(a[:, :1, :rank], b[:, :1, :, :rank], x[token], slot, 0)
    a[2, :, 8:], b[2, ..., 8:] = float("nan"), float("nan")

    wrapper.add_lora_w13(y, x, (a,), (b,), ids, None, None, None, None, TOKENS, TOP_K, SLOTS, enabled, EXPERTS, TOP_K, 1, False, False)
    wrapper.dense(dense, x, [a[:, :1].contiguous()], [b[:, :1].contiguous()], [32])

    assert error(y, expected) < 2e-6 and error(dense, expected_dense) < 2e-6
