"""What only a GPU can show of the prefill kernels: graph replay, equal bits, large offsets, no recompilation, vLLM beside."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from lora_kernels.moe_prefill import Activation, combine, expand_activate, group_tokens, shrink
from lora_kernels.moe_prefill.combine import add_down_kernel, sum_choices_kernel
from lora_kernels.moe_prefill.expand_activate import expand_activate_kernel
from lora_kernels.moe_prefill.expand_sum import expand_sum_kernel, schedule_kernel
from lora_kernels.moe_prefill.shrink import shrink_kernel
from lora_kernels.moe_prefill.sum_experts import sum_experts_kernel
from lora_kernels.moe_prefill.vllm_peer import VllmLayer
from prefill_cases import Case, Form, error, expected, list_of, make_case, plan_of, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = pytest.mark.parametrize("activation", list(Activation))
FORMS = pytest.mark.parametrize("form", list(Form))


def model_case(
    activation: Activation, dtype: torch.dtype = torch.bfloat16, *, num_tokens: int = 1600, num_adapters: int = 8, seed: int = 0
) -> Case:
    if activation is Activation.GPT_OSS:
        shape = {"top_k": 4, "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880}
    else:
        shape = {"top_k": 8, "num_experts": 128, "hidden_size": 2048, "intermediate_size": 768}
    return make_case(activation, dtype, num_tokens=num_tokens, num_adapters=num_adapters, rank=32, seed=seed, **shape)


@BOTH
@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_have_the_same_bits_from_run_to_run(activation: Activation, form: Form, dtype: torch.dtype) -> None:
    case = model_case(activation, dtype)
    plan = plan_of(case, form=form)
    first = run(case, plan)
    for _ in range(5):
        for again, before in zip(run(case, plan), first, strict=True):
            assert torch.equal(again, before)


@BOTH
@FORMS
@pytest.mark.parametrize("num_adapters", [1, 8])
def test_tokens_of_requests_lie_side_by_side(activation: Activation, form: Form, num_adapters: int) -> None:
    case = model_case(activation, num_tokens=2500, num_adapters=num_adapters)
    case = replace(case, token_adapters=case.token_adapters.sort(descending=True).values)
    acts, out = run(case, plan_of(case, form=form))
    ref_acts, ref_out = expected(case, dtype=torch.float32)
    assert error(acts, ref_acts) < 1.2e-2
    assert error(out, ref_out) < 1.2e-2


@BOTH
@FORMS
def test_a_captured_layer_replays_on_other_batches_base_only_ones_too(activation: Activation, form: Form) -> None:
    case = model_case(activation, num_tokens=300, num_adapters=1)
    plan = plan_of(case, form=form)
    run(case, plan, all_local=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = list_of(case, plan)
        hidden = shrink(case.x, case.lora, work, plan)
        acts, down_hidden = expand_activate(case.gate_up, hidden, case.lora, work, plan, case.topk_weights)
        tokens = group_tokens(case.token_adapters, num_adapters=1, block=plan.token_block) if plan.token_block else None
        out = combine(
            case.down.clone(),
            down_hidden,
            case.lora,
            work,
            plan,
            case.topk_ids,
            tokens_by_adapter=tokens,
            all_experts_local=True,
        )
    for seed, base_only in ((1, False), (2, True), (3, False)):
        other = model_case(activation, num_tokens=300, num_adapters=1, seed=seed)
        adapters = torch.full_like(other.token_adapters, -1) if base_only else other.token_adapters
        for name in ("x", "gate_up", "down", "topk_ids", "topk_weights"):
            getattr(case, name).copy_(getattr(other, name))
        case.token_adapters.copy_(adapters)
        acts.fill_(float("nan"))
        out.fill_(float("nan"))
        graph.replay()
        eager_acts, eager_out = run(case, plan, all_local=True)
        assert torch.equal(acts, eager_acts)
        assert torch.equal(out, eager_out)


@BOTH
@FORMS
def test_another_length_does_not_mean_another_compilation(activation: Activation, form: Form) -> None:
    last = {
        Form.ADDED: [add_down_kernel, sum_choices_kernel],
        Form.RING: [schedule_kernel, expand_sum_kernel],
        Form.TOKENS: [sum_experts_kernel],
    }
    kernels = [shrink_kernel, expand_activate_kernel, *last[form]]
    plan = plan_of(model_case(activation, num_tokens=512), form=form)
    compiled = []
    for num_tokens in (512, 513, 528, 700):
        run(model_case(activation, num_tokens=num_tokens), plan)
        compiled.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert all(count == compiled[0] for count in compiled)


@FORMS
def test_offsets_past_two_to_the_31_are_right(form: Form) -> None:
    """100,000 tokens of GPT-OSS: 400,000 rows of 5,760. The last tokens' results must be those of a batch of their own."""
    case = model_case(Activation.GPT_OSS, num_tokens=100_000, num_adapters=2)
    plan = plan_of(case, form=form)
    acts, out = run(case, plan, all_local=True)
    tail = 64
    last = replace(
        case,
        x=case.x[-tail:],
        gate_up=case.gate_up[-4 * tail :],
        down=case.down[-4 * tail :],
        topk_ids=case.topk_ids[-tail:].contiguous(),
        topk_weights=case.topk_weights[-tail:].contiguous(),
        token_adapters=case.token_adapters[-tail:].contiguous(),
    )
    ref_acts, ref_out = expected(last, dtype=torch.float32)
    assert error(acts[-4 * tail :], ref_acts) < 1.2e-2
    assert error(out[-tail:], ref_out) < 1.2e-2


def test_slots_past_two_to_the_31_elements_are_right() -> None:
    case = make_case(
        Activation.SWIGLU,
        torch.bfloat16,
        num_tokens=100,
        top_k=2,
        num_adapters=34,
        num_experts=128,
        hidden_size=4096,
        intermediate_size=64,
        rank=128,
    )
    case.token_adapters.fill_(33)
    acts, out = run(case, plan_of(case))
    ref_acts, ref_out = expected(case, dtype=torch.float32)
    assert error(acts, ref_acts) < 1.2e-2
    assert error(out, ref_out) < 1.2e-2


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM beside")
@pytest.mark.filterwarnings("default")
@BOTH
@FORMS
def test_errors_are_no_larger_than_vllms(activation: Activation, form: Form) -> None:
    case = model_case(activation)
    ref_acts, ref_out = expected(case)
    acts, out = run(case, plan_of(case, form=form), all_local=True)
    peer = VllmLayer(case.lora, case.topk_ids, case.token_adapters)
    peer_acts, peer_out = peer.run(case.x, case.gate_up.clone(), case.down.clone(), case.topk_weights)
    assert error(acts, ref_acts) <= 1.02 * error(peer_acts, ref_acts)
    assert error(out, ref_out) <= 1.02 * error(peer_out, ref_out)
