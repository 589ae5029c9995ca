"""Real vLLM on a CPU: every adapter's greedy tokens are the merged weights', and the base's answers never move."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.kernels import tiny_models as tiny
from tests.kernels.engine import MAX_LORA_RANK, MAX_LORAS, Answer, Engine, Row

pytestmark = pytest.mark.engine

NUM_TOKENS = 12
PROMPTS = tuple(tuple((7 * i + 3 * j * j + 1) % (tiny.VOCAB - 1) + 1 for j in range(n)) for i, n in enumerate((5, 11, 19)))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

DENSE = {
    "attention": tiny.attention("q_proj", "v_proj"),
    "combined": tiny.attention(*ATTENTION) | tiny.mlp(),
    "head": tiny.attention("q_proj") | tiny.head(),
    "embedding": tiny.embedding(),
}
MOE = {
    "attention": tiny.attention("q_proj", "v_proj"),
    "experts": tiny.experts(),
    "combined": tiny.attention(*ATTENTION) | tiny.experts(),
    "router": tiny.router(),
    "gate and up": tiny.experts(),
    "down": tiny.experts(),
}
ZERO = {"gate and up": ("down_proj",), "down": ("gate_proj", "up_proj")}
"""Projections that an adapter leaves alone: zero in its files, which the engine wants complete."""


@dataclass(frozen=True)
class Case:
    """An engine, and what each adapter (None: the base) answers to each prompt according to merged weights."""

    engine: Engine
    adapters: dict[str, Path]
    golden: dict[str | None, list[tuple[int, ...]]]
    folder: Path
    model: PreTrainedModel

    def mount_all(self) -> None:
        for name, path in self.adapters.items():
            self.engine.add(name, path)

    def remove_all(self) -> None:
        for name in self.adapters:
            self.engine.remove(name)


@pytest.fixture(scope="module", params=["dense", "moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.make_model(folder / "model", moe=request.param == "moe")
    shapes = MOE if request.param == "moe" else DENSE
    adapters = {
        name: tiny.make_adapter(folder / name, shape, seed=seed, zero=ZERO.get(name, ()))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    golden = {None: goldens(model)} | {name: goldens(tiny.merged(model, path)) for name, path in adapters.items()}
    engine = Engine(folder / "model")
    yield Case(engine, adapters, golden, folder, model)
    engine.close()


@pytest.fixture
def mounted(case: Case) -> Iterator[Case]:
    """The case with all its adapters mounted, and unmounted after."""
    case.mount_all()
    yield case
    case.remove_all()


def goldens(model: PreTrainedModel) -> list[tuple[int, ...]]:
    return [tuple(tiny.greedy(model, list(prompt), NUM_TOKENS)) for prompt in PROMPTS]


def answers(case: Case, adapters: list[str | None]) -> list[Answer]:
    """One batch: every prompt for every adapter named."""
    rows = [Row(prompt=prompt, adapter=adapter) for adapter in adapters for prompt in PROMPTS]
    return case.engine.generate(rows, num_tokens=NUM_TOKENS)


def test_the_plugin_serves_the_engine(case: Case) -> None:
    plugin = case.engine.inspect("tenantry_plugin")

    assert plugin["code"] == "active"
    assert plugin["wrappers"] == ["CpuLoraWrapper"]
    assert plugin["experts"] == (["CpuLoraExperts"] if "experts" in case.adapters else [])


def test_adapters_answer_as_merged_weights_alone(mounted: Case) -> None:
    assert len({tuple(golden) for golden in mounted.golden.values()}) == len(mounted.golden)
    for adapter, golden in mounted.golden.items():
        assert [answer.tokens for answer in answers(mounted, [adapter])] == golden, adapter


def test_adapters_and_base_answer_as_merged_weights_in_one_batch(mounted: Case) -> None:
    names: list[str | None] = [None, *mounted.adapters]

    mixed = [answer.tokens for answer in answers(mounted, names)]

    assert mixed == [tokens for name in names for tokens in mounted.golden[name]]


def test_base_answers_keep_their_bits_before_with_and_after_adapters(case: Case) -> None:
    names: list[str | None] = [None, *case.adapters]
    base_only: list[str | None] = [None] * len(names)
    before = answers(case, base_only)
    case.mount_all()
    mounted_and_idle = answers(case, base_only)
    mixed = answers(case, names)
    case.remove_all()
    after = answers(case, base_only)

    assert mounted_and_idle == before
    assert after == before
    num_base_rows = len(PROMPTS)
    assert mixed[:num_base_rows] == before[:num_base_rows]
    assert mixed[num_base_rows:] != before[num_base_rows:]


def test_what_an_idle_slot_holds_reaches_nobody(case: Case) -> None:
    before = answers(case, [None, None])
    first, *others = case.adapters
    for name in (first, *others):
        case.engine.add(name, case.adapters[name])
    case.engine.remove(first)
    case.engine.poison(slot=0)

    mixed = answers(case, [None, others[0]])
    poisoned = case.engine.inspect("tenantry_slots")["slots"][0]
    zeroed = case.engine.inspect("tenantry_zero_slot", 0)
    for name in others:
        case.engine.remove(name)

    assert poisoned == {"index": 0, "lora_int_id": None, "all_zero": False}
    assert zeroed
    assert mixed[: len(PROMPTS)] == before[: len(PROMPTS)]
    assert [answer.tokens for answer in mixed[len(PROMPTS) :]] == case.golden[others[0]]


def test_a_released_slot_is_zero_and_its_next_adapter_of_lower_rank_is_right(case: Case) -> None:
    name = "combined"
    case.engine.add(name, case.adapters[name])
    in_use = case.engine.inspect("tenantry_slots")["slots"][0]
    refused = case.engine.inspect("tenantry_zero_slot", 0)
    case.engine.remove(name)
    released = case.engine.inspect("tenantry_slots")["slots"][0]
    small = tiny.make_adapter(case.folder / "small", tiny.attention("q_proj"), seed=90, rank=2, scale=2.0)
    case.engine.add("small", small)
    reused = case.engine.inspect("tenantry_slots")["slots"][0]
    tokens = [answer.tokens for answer in answers(case, ["small"])]
    case.engine.remove("small")

    assert in_use["lora_int_id"] is not None and not in_use["all_zero"]
    assert not refused
    assert released == {"index": 0, "lora_int_id": None, "all_zero": True}
    assert reused["lora_int_id"] == in_use["lora_int_id"] + 1
    assert tokens == goldens(tiny.merged(case.model, small)) != case.golden[None]


def test_a_slot_half_written_by_a_failed_load_is_zero_once_it_is_released(case: Case) -> None:
    shapes = tiny.attention("q_proj")
    shapes["model.layers.1.self_attn.q_proj"] = (2 * tiny.HIDDEN, tiny.HEADS * tiny.HEAD_DIM)
    path = tiny.make_adapter(case.folder / "wrong-shape", shapes, seed=93)
    with pytest.raises(RuntimeError, match="size"):
        case.engine.add("wrong-shape", path)
    failed = case.engine.inspect("tenantry_slots")["slots"][0]
    case.engine.remove("wrong-shape")
    released = case.engine.inspect("tenantry_slots")["slots"][0]

    assert failed["lora_int_id"] is not None and not failed["all_zero"]
    assert released == {"index": 0, "lora_int_id": None, "all_zero": True}
    assert [answer.tokens for answer in answers(case, [None])] == case.golden[None]


def test_slot_bytes_are_those_of_the_formula(case: Case) -> None:
    slots = case.engine.inspect("tenantry_slots")
    hidden, element_bytes = tiny.HIDDEN, 4
    query, key_value = tiny.HEADS * tiny.HEAD_DIM, tiny.KV_HEADS * tiny.HEAD_DIM
    per_layer = linear(hidden, query, key_value, key_value) + linear(query, hidden)
    if "experts" in case.adapters:
        per_layer += linear(hidden, tiny.EXPERTS) + tiny.EXPERTS * 3 * (hidden + tiny.EXPERT_INTERMEDIATE)
    else:
        per_layer += linear(hidden, tiny.INTERMEDIATE, tiny.INTERMEDIATE) + linear(tiny.INTERMEDIATE, hidden)
    ends = 2 * linear(hidden, tiny.VOCAB)
    expected = (per_layer * tiny.LAYERS + ends) * element_bytes

    assert slots["bytes_per_rank"] == expected
    assert slots["slot_bytes"] == expected * MAX_LORA_RANK
    assert slots["total_bytes"] == expected * MAX_LORA_RANK * MAX_LORAS
    assert case.engine.inspect("tenantry_slot_bytes", 8) == expected * 8


def linear(num_inputs: int, *outputs: int) -> int:
    """Elements per unit of rank: one A for each output slice, one B for all."""
    return len(outputs) * num_inputs + sum(outputs)


def test_an_adapters_modules_are_those_it_changes(mounted: Case) -> None:
    layers = [f"model.layers.{layer}" for layer in range(tiny.LAYERS)]

    assert mounted.engine.inspect("tenantry_adapter_modules", "attention") == [f"{p}.self_attn.qkv_proj" for p in layers]
    combined = mounted.engine.inspect("tenantry_adapter_modules", "combined")
    feed_forward = ("mlp.experts",) if "experts" in mounted.adapters else ("mlp.down_proj", "mlp.gate_up_proj")
    assert combined == sorted(f"{p}.{m}" for p in layers for m in (*feed_forward, "self_attn.qkv_proj", "self_attn.o_proj"))
    assert mounted.engine.inspect("tenantry_adapter_modules", 999) == []
    assert all(mounted.engine.inspect("tenantry_unmatched_modules", name) == [] for name in mounted.adapters)


def test_modules_that_the_engine_has_no_place_for_are_named(case: Case) -> None:
    shapes = {name.replace("layers.1", "layers.7"): size for name, size in tiny.attention("q_proj").items()}
    case.engine.add("stray", tiny.make_adapter(case.folder / "stray", shapes, seed=91))
    matched = case.engine.inspect("tenantry_adapter_modules", "stray")
    unmatched = case.engine.inspect("tenantry_unmatched_modules", "stray")
    case.engine.remove("stray")

    assert matched == ["model.layers.0.self_attn.qkv_proj"]
    assert unmatched == ["model.layers.7.self_attn.q_proj"]


def test_prompt_logprobs_in_a_mixed_batch_are_answered_and_the_bases_keep_their_bits(mounted: Case) -> None:
    rows = [Row(prompt=prompt, adapter=name) for name in (None, "attention") for prompt in PROMPTS]
    base_rows = [Row(prompt=row.prompt) for row in rows]

    mixed = mounted.engine.generate(rows, num_tokens=2, prompt_logprobs=2)
    base = mounted.engine.generate(base_rows, num_tokens=2, prompt_logprobs=2)

    num_base_rows = len(PROMPTS)
    assert mixed[:num_base_rows] == base[:num_base_rows]
    assert all(a.prompt_logprobs != b.prompt_logprobs for a, b in zip(mixed[3:], base[3:], strict=True))
    assert [len(answer.prompt_logprobs) for answer in mixed] == [len(row.prompt) - 1 for row in rows]
