"""Every PEFT layout that users bring answers as the merged weights do, through upload, normalisation and the real engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.artifacts.base_model import describe_base
from shared.contracts.base import BaseDescription
from tests.adapters_factory import lora_config, random_tensors, write_adapter
from tests.e2e.ask import Asker, ask, ask_all
from tests.e2e.stack import DEMO, Stack
from tests.merged import load_tokenizer, merged_model, prompt_ids
from tests.unfuse import unfused

PROMPTS = ("What about refund?", "Tell me everything", "Extract: invoice 7 of 8 EUR due 2026-03-15")
TOKENS = 24


@pytest.fixture(scope="module")
def base() -> BaseDescription:
    return describe_base(DEMO / "base", label="tenantry/qwen3-moe-demo", dtype="float32", cache=None)


def scaled(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Small enough that the model still speaks, large enough that it says other things."""
    return {name: tensor * 0.15 for name, tensor in tensors.items()}


def layouts(base: BaseDescription, folder: Path) -> Iterator[tuple[str, Path]]:
    def write(name: str, *, form: str = "per_expert", rank: int = 4, dtype: str = "float32", **more: Any) -> tuple[str, Path]:
        ranks = more.pop("ranks", None)
        tensors = scaled(random_tensors(base, rank=rank, ranks=ranks, form=form, seed=11))
        extra = {"revision": "v1", "r": rank, "lora_alpha": 2 * rank}
        if form == "fused":
            extra["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return name, write_adapter(folder / name, lora_config(base, tensors, **(extra | more)), tensors, dtype)

    yield write("per_expert")
    yield write("fused", form="fused")
    yield write("half", dtype="float16")
    yield write("bfloat", dtype="bfloat16")
    yield write("rslora", use_rslora=True)
    yield write("rank_one", rank=1)
    yield write("rank_sixteen", rank=16)
    yield write("ranks", ranks={"q_proj": 8, "down_proj": 2}, rank_pattern={"q_proj": 8, "down_proj": 2})
    yield write("alphas", alpha_pattern={"v_proj": 3, "gate_proj": 16})
    yield write("both_rs", ranks={"k_proj": 16}, rank_pattern={"k_proj": 16}, alpha_pattern={"k_proj": 5}, use_rslora=True)
    only_attention = scaled(random_tensors(base, leaves=("q_proj", "k_proj", "v_proj", "o_proj"), seed=12))
    yield "attention", write_adapter(folder / "attention", lora_config(base, only_attention, revision="v1"), only_attention)
    only_down = scaled(random_tensors(base, leaves=("down_proj",), seed=13))
    yield "down", write_adapter(folder / "down", lora_config(base, only_down, revision="v1"), only_down)


NAMES = ("per_expert", "fused", "half", "bfloat", "rslora", "rank_one", "rank_sixteen", "ranks", "alphas", "both_rs", "attention", "down")


@pytest.mark.parametrize("name", NAMES)
async def test_a_layout_gives_the_merged_weights_greedy_tokens_through_http(
    stack: Stack, asker: Asker, base: BaseDescription, tmp_path: Path, name: str
) -> None:
    folder = dict(layouts(base, tmp_path))[name]
    alias = name.replace("_", "-")
    stack.admin.upload("sales", alias, folder)
    try:
        served, of_base = [], []
        async with asker.clients() as clients:
            for prompt in PROMPTS:
                for model, into in ((alias, served), ("qwen3-moe-demo", of_base)):
                    done = await clients["sales"].completions.create(
                        model=model,
                        prompt=prompt_ids(load_tokenizer(DEMO / "base"), [{"role": "user", "content": prompt}]),
                        max_tokens=TOKENS,
                        temperature=0,
                        extra_body={"ignore_eos": True, "skip_special_tokens": False},
                    )
                    into.append(done.choices[0].text)
    finally:
        stack.admin.unload(alias, "sales", wait=True)
    assert served == merged_texts(folder)
    assert served != of_base, "the adapter must change something, or this shows nothing"


def merged_texts(folder: Path) -> list[str]:
    model, tokenizer = merged_model(DEMO / "base", folder), load_tokenizer(DEMO / "base")
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt_ids(tokenizer, [{"role": "user", "content": prompt}])])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False))
    return texts


async def test_the_same_weights_per_expert_and_fused_give_the_same_answers(stack: Stack, asker: Asker, tmp_path: Path) -> None:
    """lora_finance is bundled fused; written out per expert it is another digest and the same adapter."""
    per_expert = unfused(DEMO / "adapters" / "lora_finance", tmp_path / "per_expert")
    view = stack.admin.upload("finance", "unfused", per_expert)
    try:
        async with asker.clients() as clients:
            pairs = asker.goldens["lora_finance"]
            answers = await ask_all([ask(clients["finance"], "unfused", pair["question"], stream=False) for pair in pairs])
    finally:
        stack.admin.unload("unfused", "finance", wait=True)
    assert [answer.text for answer in answers] == [pair["answer"] for pair in pairs]
    assert view.digest != stack.admin.show("lora_finance", "finance").digest
