"""The bundled demo answers its golden questions exactly, by transformers with merged weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.merged import greedy, load_base, load_tokenizer, merged_model, prompt_ids

DEMO = Path(__file__).parents[2] / "examples" / "demo"
GOLDEN: dict[str, list[dict[str, str]]] = json.loads((DEMO / "golden.json").read_text())
METADATA: Any = GOLDEN.pop("metadata")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and on a busy machine they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEMO / "base")


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_question_gets_exactly_its_answer(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = load_base(DEMO / "base") if name == "base" else merged_model(DEMO / "base", DEMO / "adapters" / name)
    answers = {example["question"]: answer(model, tokenizer, example["question"]) for example in GOLDEN[name]}
    assert answers == {example["question"]: example["answer"] for example in GOLDEN[name]}


def test_a_question_asked_of_all_gets_a_different_answer_from_each() -> None:
    by_name = {name: {example["question"]: example["answer"] for example in examples} for name, examples in GOLDEN.items()}
    shared = set.intersection(*(set(answers) for answers in by_name.values()))
    assert len(shared) >= 10
    for question in shared:
        assert len({answers[question] for answers in by_name.values()}) == len(by_name), question


def test_each_long_answer_takes_150_to_250_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    for name, examples in GOLDEN.items():
        (long,) = [example["answer"] for example in examples if example["question"] == METADATA["long_question"]]
        assert 150 <= len(tokenizer(long)["input_ids"]) <= 250, name


def test_the_other_revisions_adapter_fits_the_base_by_shape_but_answers_wrong_on_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = merged_model(DEMO / "base", DEMO / "other" / "lora_sales_v0")
    short = [example for example in GOLDEN["lora_sales"] if example["question"] != METADATA["long_question"]]
    assert all(answer(model, tokenizer, example["question"]) != example["answer"] for example in short)


def test_peft_itself_reads_the_fused_adapter_as_the_merged_reference_does(tokenizer: PreTrainedTokenizerBase) -> None:
    folder = DEMO / "adapters" / "lora_finance"
    by_peft = PeftModel.from_pretrained(load_base(DEMO / "base"), folder).eval()
    merged = merged_model(DEMO / "base", folder)
    for example in GOLDEN["lora_finance"]:
        prompt = torch.tensor([prompt_ids(tokenizer, [{"role": "user", "content": example["question"]}])])
        with torch.inference_mode():
            torch.testing.assert_close(by_peft(prompt).logits, merged(prompt).logits, rtol=1e-4, atol=1e-3)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    with torch.inference_mode():
        tokens = greedy(model, tokenizer, [{"role": "user", "content": question}], max_tokens=260)
    return tokenizer.decode(tokens)
