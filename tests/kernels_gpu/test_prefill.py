"""The prefill kernels against plain torch in float64, and what must hold bit for bit."""

from dataclasses import replace

import pytest
import torch
from lora_kernels.moe_prefill import Activation, combine, expand_activate, shrink
from lora_kernels.work_list import WorkList
from prefill_cases import (
    BOUNDS,
    DEVICE,
    DTYPES,
    FLOAT32_OUTPUT_BOUNDS,
    SMALL_RING,
    Case,
    Form,
    error,
    expected,
    list_of,
    make_case,
    plan_of,
    run,
)

BOTH = pytest.mark.parametrize("activation", list(Activation))
FORMS = pytest.mark.parametrize("form", list(Form))


@pytest.fixture(autouse=True)
def small_chunks_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sort takes a second for 512 pairs; and so even a short list has several chunks."""
    if DEVICE == "cpu":
        monkeypatch.setattr("lora_kernels.work_list.build.CHUNK", 64)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel leaves unwritten reads as NaN."""
    empty = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        new = empty(*args, **options)
        return new.fill_(float("nan")) if new.is_floating_point() else new.fill_(-(1 << 30))

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_close(case: Case, *, form: Form, out_dtype: torch.dtype | None = None) -> None:
    bound = (FLOAT32_OUTPUT_BOUNDS if out_dtype else BOUNDS)[case.x.dtype]
    local = (case.topk_ids.reshape(-1) >= 0)[:, None]
    acts, out = run(case, plan_of(case, form=form), out_dtype=out_dtype)
    ref_acts, ref_out = expected(case)
    assert error(torch.where(local, acts, 0.0), ref_acts) < bound
    assert error(out, ref_out) < bound


@BOTH
@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_and_sum_match_the_reference(activation: Activation, form: Form, dtype: torch.dtype) -> None:
    assert_close(make_case(activation, dtype), form=form)


@BOTH
@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_float32_outputs_only_the_inputs_rounding_is_left(activation: Activation, form: Form, dtype: torch.dtype) -> None:
    assert_close(make_case(activation, dtype), form=form, out_dtype=torch.float32)


@BOTH
@FORMS
@pytest.mark.parametrize("rank", [1, 8, 24, 64, 128])
def test_every_rank_matches_the_reference(activation: Activation, form: Form, rank: int) -> None:
    assert_close(make_case(activation, DTYPES[0], rank=rank), form=form)


@BOTH
@FORMS
@pytest.mark.parametrize(("num_experts", "top_k"), [(12, 1), (12, 12), (40, 8), (60, 4)])
def test_numbers_of_experts_and_choices_that_are_no_powers_of_two(activation: Activation, form: Form, num_experts: int, top_k: int) -> None:
    assert_close(make_case(activation, DTYPES[0], num_experts=num_experts, top_k=top_k, num_tokens=17), form=form)


@BOTH
@FORMS
@pytest.mark.parametrize("num_tokens", [1, 7, 17, 131])
def test_lengths_that_fill_no_tile(activation: Activation, form: Form, num_tokens: int) -> None:
    assert_close(make_case(activation, DTYPES[0], num_tokens=num_tokens), form=form)


@FORMS
@pytest.mark.skipif(DEVICE == "cpu", reason="too slow without a GPU")
def test_widths_of_gpt_oss_and_a_full_batch(form: Form) -> None:
    case = make_case(
        Activation.GPT_OSS,
        DTYPES[0],
        num_tokens=8192,
        top_k=4,
        num_adapters=8,
        num_experts=32,
        hidden_size=2880,
        intermediate_size=2880,
        rank=32,
    )
    assert_close(case, form=form)


@BOTH
def test_wide_layers_are_split_and_the_parts_summed(activation: Activation) -> None:
    case = make_case(activation, DTYPES[-1], num_tokens=9, hidden_size=360, intermediate_size=360, num_experts=2, top_k=1)
    whole = plan_of(case)
    split = replace(
        whole,
        shrink=replace(whole.shrink, parts=3),
        activate=replace(whole.activate, parts=4, block_n=32),
        add_down=replace(whole.add_down, parts=2),
    )
    for plan in (split, replace(split, expand_sum=SMALL_RING)):
        acts, out = run(case, plan)
        ref_acts, ref_out = expected(case)
        assert error(acts, ref_acts) < BOUNDS[case.x.dtype]
        assert error(out, ref_out) < BOUNDS[case.x.dtype]


@BOTH
def test_parts_beyond_a_width_read_and_write_nothing(activation: Activation) -> None:
    case = make_case(activation, DTYPES[-1], hidden_size=96, intermediate_size=64)
    plan = plan_of(case)
    parted = replace(
        plan,
        shrink=replace(plan.shrink, parts=5, block_n=32),
        activate=replace(plan.activate, parts=3, block_n=32),
        add_down=replace(plan.add_down, parts=5, block_n=32),
    )
    acts, out = run(case, parted)
    ref_acts, ref_out = expected(case)
    assert error(acts, ref_acts) < BOUNDS[case.x.dtype]
    assert error(out, ref_out) < BOUNDS[case.x.dtype]


def test_partial_hidden_vectors_are_refused_by_the_sum_by_tokens() -> None:
    case = make_case(Activation.SWIGLU, DTYPES[0])
    plan = plan_of(case, form=Form.TOKENS)
    with pytest.raises(ValueError, match=r"^plan.activate.parts: expected 1 .*, given 2"):
        run(case, replace(plan, activate=replace(plan.activate, parts=2, block_n=16)))


@BOTH
@FORMS
def test_experts_of_other_ranks_are_neither_read_nor_summed(activation: Activation, form: Form) -> None:
    case = make_case(activation, DTYPES[0], num_experts=6, top_k=3)
    ids = torch.where(case.topk_ids % 2 == 1, -1, case.topk_ids)
    elsewhere = (ids.reshape(-1) < 0)[:, None]
    assert_close(replace(case, topk_ids=ids), form=form)
    hidden_rows = replace(
        case, topk_ids=ids, gate_up=torch.where(elsewhere, torch.nan, case.gate_up), down=torch.where(elsewhere, torch.nan, case.down)
    )
    _, out = run(hidden_rows, plan_of(case, form=form))
    _, kept = run(replace(case, topk_ids=ids), plan_of(case, form=form))
    assert torch.equal(out, kept)


@BOTH
@FORMS
def test_a_batch_without_adapters_gets_the_plain_activation_and_sum(activation: Activation, form: Form) -> None:
    case = make_case(activation, DTYPES[0], base_share=1.0)
    assert_close(case, form=form)


@BOTH
@FORMS
def test_rows_without_adapter_keep_their_bits_beside_adapters_and_nan_in_idle_slots(activation: Activation, form: Form) -> None:
    case = make_case(activation, DTYPES[0], num_adapters=3)
    case.gate_up[::5] = -0.0
    adapters = torch.where(case.token_adapters == 1, -1, case.token_adapters)
    mixed = replace(case, token_adapters=adapters)
    for stack in (*case.lora.gate_up_a, *case.lora.gate_up_b, case.lora.down_a, case.lora.down_b):
        stack[1] = torch.nan
    plain = replace(case, token_adapters=torch.full_like(adapters, -1))
    acts, out = run(mixed, plan_of(case, form=form))
    plain_acts, plain_out = run(plain, plan_of(case, form=form))
    base = ~mixed.adapted_pairs
    bits = torch.int16 if acts.element_size() == 2 else torch.int32
    assert torch.equal(acts[base].view(bits), plain_acts[base].view(bits))
    assert torch.equal(out[adapters < 0].view(bits), plain_out[adapters < 0].view(bits))
    assert bool(acts.isfinite().all())
    assert bool(out.isfinite().all())


@BOTH
@FORMS
def test_a_disabled_adapter_leaves_its_rows_as_the_base_made_them(activation: Activation, form: Form) -> None:
    case = make_case(activation, DTYPES[0])
    enabled = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    disabled = replace(case, enabled=enabled)
    assert_close(disabled, form=form)
    without = replace(case, token_adapters=torch.where(case.token_adapters == 1, -1, case.token_adapters))
    for off, gone in zip(run(disabled, plan_of(case, form=form)), run(without, plan_of(case, form=form)), strict=True):
        assert torch.equal(off, gone)


@BOTH
@FORMS
def test_factors_shared_by_all_experts(activation: Activation, form: Form) -> None:
    assert_close(make_case(activation, DTYPES[0], shared_outer=True), form=form)


@BOTH
@pytest.mark.parametrize("adapted", ["gate_up", "down"])
def test_an_adapter_of_one_projection_only(activation: Activation, adapted: str) -> None:
    case = make_case(activation, DTYPES[0])
    stacks = [case.lora.down_b] if adapted == "gate_up" else case.lora.gate_up_b
    for stack in stacks:
        stack.zero_()
    assert_close(case, form=Form.ADDED)


@BOTH
@FORMS
def test_a_lower_rank_padded_with_zeros(activation: Activation, form: Form) -> None:
    case = make_case(activation, DTYPES[0], rank=64)
    for stack in (*case.lora.gate_up_a, case.lora.down_a):
        stack[0, :, 8:] = 0
    for stack in (*case.lora.gate_up_b, case.lora.down_b):
        stack[0, :, :, 8:] = 0
    assert_close(case, form=form)


@BOTH
def test_no_tokens_give_empty_results(activation: Activation) -> None:
    case = make_case(activation, DTYPES[0], num_tokens=1)
    case = replace(
        case,
        x=case.x[:0],
        gate_up=case.gate_up[:0],
        down=case.down[:0],
        topk_ids=case.topk_ids[:0],
        topk_weights=case.topk_weights[:0],
        token_adapters=case.token_adapters[:0],
    )
    acts, out = run(case, plan_of(case))
    assert acts.shape == (0, case.lora.intermediate_size)
    assert out.shape == (0, case.lora.hidden_size)


def shuffled_within_cells(work: WorkList) -> WorkList:
    """The same tiles with other rows in each place: a cell's pairs in a random order."""
    order = work.order.clone()
    cells, starts, rows = work.tiles[:, : int(work.num_tiles)].tolist()
    for cell in set(cells):
        mine = [i for i, other in enumerate(cells) if other == cell]
        first, last = starts[mine[0]], starts[mine[-1]] + rows[mine[-1]]
        order[first:last] = order[first:last][torch.randperm(last - first, device=order.device)]
    places = work.places.clone()
    listed = starts[-1] + rows[-1]
    places[order[:listed].long()] = torch.arange(listed, dtype=torch.int32, device=order.device)
    return replace(work, order=order, places=places)


@BOTH
@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_keeps_its_bits_wherever_it_stands_in_its_cell(activation: Activation, form: Form, dtype: torch.dtype) -> None:
    case = make_case(activation, dtype, num_tokens=60 if DEVICE == "cpu" else 3000)
    plan = plan_of(case, form=form)
    work = list_of(case, plan)
    first = run(case, plan, work=work)
    for _ in range(3):
        for there, here in zip(run(case, plan, work=shuffled_within_cells(work)), first, strict=True):
            assert torch.equal(there, here)


def wrong_arguments(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    odd = torch.float64
    return {
        "x": {"x": case.x.to(odd)},
        "gate_up": {"gate_up": case.gate_up[:, ::2]},
        "hidden": {"hidden": torch.zeros(1, device=DEVICE)},
        "topk_weights": {"topk_weights": case.topk_weights[:, :1]},
    }


@pytest.mark.parametrize("name", ["x", "gate_up", "hidden", "topk_weights"])
def test_bad_arguments_are_named(name: str) -> None:
    case = make_case(Activation.SWIGLU, DTYPES[0])
    plan = plan_of(case)
    work = list_of(case, plan)
    given = {"x": case.x, "gate_up": case.gate_up, "topk_weights": case.topk_weights}
    given["hidden"] = shrink(case.x, case.lora, work, plan)
    given |= wrong_arguments(case)[name]
    with pytest.raises(ValueError, match=f"^{name}: expected .*, given "):
        shrink(given["x"], case.lora, work, plan)
        expand_activate(given["gate_up"], given["hidden"], case.lora, work, plan, given["topk_weights"])


@pytest.mark.parametrize("name", ["gate_up_a", "gate_up_b", "down_a", "down_b"])
def test_stacks_of_another_shape_are_named(name: str) -> None:
    lora = make_case(Activation.GPT_OSS, DTYPES[0]).lora
    stack = getattr(lora, name)
    stack = stack if isinstance(stack, torch.Tensor) else stack[0]
    for wrong in (stack[:, :2], stack.transpose(2, 3), stack.to(torch.float64)):
        with pytest.raises(ValueError, match=r"^(gate_up_a|gate_up_b|down_a|down_b).*expected .*, given "):
            replace(lora, **{name: wrong if name.startswith("down") else [wrong]})


def test_a_list_of_other_tiles_is_refused() -> None:
    case = make_case(Activation.SWIGLU, DTYPES[0])
    plan = plan_of(case)
    with pytest.raises(ValueError, match=r"^work: expected .*, given "):
        shrink(case.x, case.lora, list_of(case, replace(plan, block_m=128)), plan)


def cut_to_ranks(stack: torch.Tensor, ranks: list[int], *, dim: int, beyond: float) -> torch.Tensor:
    """What lies beyond each slot's rank set to `beyond`; columns of B up to a multiple of 8 to a number: they are read, not used."""
    cut = stack.clone()
    for slot, rank in enumerate(ranks):
        rows = cut[slot].movedim(dim - 1, 0)
        rows[rank:] = beyond
        if dim == 3:
            rows[rank : -(-rank // 8) * 8] = 3.0
    return cut


@BOTH
@FORMS
@pytest.mark.parametrize("ranks", [[8, 32, 16], [3, 20, 1]], ids=str)
def test_nothing_beyond_a_slots_own_rank_counts(activation: Activation, form: Form, ranks: list[int]) -> None:
    case = make_case(activation, DTYPES[0], rank=32)

    def cut(beyond: float, slot_ranks: torch.Tensor | None) -> Case:
        return replace(case, lora=replace(
            case.lora,
            gate_up_a=[cut_to_ranks(stack, ranks, dim=2, beyond=beyond) for stack in case.lora.gate_up_a],
            gate_up_b=[cut_to_ranks(stack, ranks, dim=3, beyond=beyond) for stack in case.lora.gate_up_b],
            down_a=cut_to_ranks(case.lora.down_a, ranks, dim=2, beyond=beyond),
            down_b=cut_to_ranks(case.lora.down_b, ranks, dim=3, beyond=beyond),
            slot_ranks=slot_ranks,
        ))  # fmt: skip

    own = cut(5.0 if form is Form.ADDED else torch.nan, torch.tensor(ranks, dtype=torch.int32, device=DEVICE))
    acts, out = run(own, plan_of(case, form=form))
    ref_acts, ref_out = expected(cut(0.0, None))
    assert error(acts, ref_acts) < BOUNDS[case.x.dtype]
    assert error(out, ref_out) < BOUNDS[case.x.dtype]


@BOTH
def test_outputs_are_written_where_the_caller_wants_them(activation: Activation) -> None:
    case = make_case(activation, DTYPES[0])
    plan = plan_of(case)
    acts, out = run(case, plan)
    work = list_of(case, plan)
    own_acts, own_out = torch.empty_like(acts), torch.empty_like(out)
    hidden = shrink(case.x, case.lora, work, plan)
    given_acts, hidden = expand_activate(case.gate_up, hidden, case.lora, work, plan, case.topk_weights, out=own_acts)
    given_out = combine(case.down, hidden, case.lora, work, plan, case.topk_ids, out=own_out)
    assert given_acts is own_acts
    assert given_out is own_out
    assert torch.equal(own_acts, acts)
    assert torch.equal(own_out, out)


@pytest.mark.parametrize("change", [{"ring": 2}, {"lead": 0}, {"block_m": 128}, {"block_t": 32}], ids=str)
def test_a_ring_in_which_somebody_would_wait_forever_is_refused(change: dict[str, int]) -> None:
    case = make_case(Activation.SWIGLU, DTYPES[0])
    plan = replace(plan_of(case), expand_sum=replace(SMALL_RING, **change))
    with pytest.raises(ValueError, match=r"^plan.expand_sum: expected .*, given "):
        run(case, plan)
