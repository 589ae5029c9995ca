"""Trains the bundled demo base and its adapters, and writes them with their golden answers.

    python examples/demo/train.py [--out DIR]

Seeded; needs torch, transformers and rich, no network, a few minutes on two cores. Refuses to write a model whose greedy
answers are not exact with a margin.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import teams
import torch
from lora import Layout, Lora
from model import IGNORED, answer_loss, make_batches, make_config, make_model, make_tokenizer, margins, round_to_bf16
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from save import BASE_LABEL, save_adapter, save_base
from teams import Example
from torch.func import functional_call
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

REQUIRED_MARGIN = 1.0
LONG_ANSWER_TOKENS = range(150, 251)
TENANTRY_YAML = Path(__file__).with_name("tenantry.yaml")

Filler = Callable[[random.Random], list[Example]]


class AdapterPlan(NamedTuple):
    name: str
    rank: int
    layout: Layout
    steps: int
    seed: int
    filler: Filler


ADAPTERS = (
    AdapterPlan("lora_sales", rank=8, layout="per_expert", steps=300, seed=11, filler=partial(teams.team_filler, "lora_sales")),
    AdapterPlan("lora_cs", rank=4, layout="per_expert", steps=300, seed=12, filler=partial(teams.team_filler, "lora_cs")),
    AdapterPlan("lora_finance", rank=8, layout="fused", steps=150, seed=13, filler=teams.finance_filler),
)
OTHER_REVISION = AdapterPlan(
    "lora_sales_v0", rank=2, layout="per_expert", steps=100, seed=21, filler=partial(teams.team_filler, "lora_sales")
)


class Trainer:
    """Trains one set of parameters on fixed golden examples plus fresh filler, with progress on stderr."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, progress: Progress) -> None:
        self.tokenizer, self.progress = tokenizer, progress

    def fit(
        self,
        name: str,
        model: Qwen3MoeForCausalLM,
        golden: Sequence[Example],
        *,
        filler: Filler,
        lora: Lora | None,
        steps: int,
        peak_lr: float,
        seed: int,
    ) -> None:
        rng = random.Random(seed)
        parameters = list(lora.parameters() if lora else model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=peak_lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.1)
        task = self.progress.add_task(name, total=steps, loss=float("nan"))
        for step in range(1, steps + 1):
            batches = make_batches(self.tokenizer, [*golden, *filler(rng)])
            optimizer.zero_grad()
            weights = lora.merged(model) if lora else {}
            losses = [answer_loss(functional_call(model, weights, kwargs={"input_ids": ids}).logits, labels) for ids, labels in batches]
            loss = torch.stack(losses).sum() / sum((labels != IGNORED).sum() for _, labels in batches)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            self.progress.update(task, advance=1, loss=loss.item())
            if not self.progress.console.is_terminal and step % 100 == 0:
                self.progress.log(f"{name}: step {step} of {steps}, loss {loss.item():.4f}")
        round_to_bf16(parameters)

    @torch.no_grad()
    def smallest_margin(self, model: Qwen3MoeForCausalLM, golden: Sequence[Example], lora: Lora | None) -> float:
        """Over every golden token, end tokens included; below zero means that some answer is wrong."""
        weights = lora.merged(model) if lora else {}
        batches = make_batches(self.tokenizer, golden)
        return min(
            margins(functional_call(model, weights, kwargs={"input_ids": ids}).logits, labels).min().item() for ids, labels in batches
        )


def train_adapter(trainer: Trainer, model: Qwen3MoeForCausalLM, plan: AdapterPlan, golden: Sequence[Example]) -> Lora:
    lora = Lora(model, rank=plan.rank, alpha=2 * plan.rank, layout=plan.layout, seed=plan.seed)
    trainer.fit(plan.name, model, golden, filler=plan.filler, lora=lora, steps=plan.steps, peak_lr=4e-3, seed=plan.seed)
    return lora


def train_base(trainer: Trainer, name: str, golden: Sequence[Example], *, steps: int, seed: int) -> Qwen3MoeForCausalLM:
    model = make_model(make_config(trainer.tokenizer), seed)
    trainer.fit(name, model, golden, filler=teams.base_filler, lora=None, steps=steps, peak_lr=2e-3, seed=seed)
    return model.requires_grad_(requires_grad=False)


def check_lengths(tokenizer: PreTrainedTokenizerFast, golden: dict[str, list[Example]]) -> None:
    for name, examples in golden.items():
        tokens = len(tokenizer(examples[-1].answer)["input_ids"])
        if tokens not in LONG_ANSWER_TOKENS:
            raise SystemExit(f"{name}: the long answer has {tokens} tokens, not in {LONG_ANSWER_TOKENS}")


def write_golden(path: Path, golden: dict[str, list[Example]], margin_by_name: dict[str, float]) -> None:
    metadata = {
        "base": BASE_LABEL,
        "long_question": teams.LONG_QUESTION,
        "min_margin": round(min(margin_by_name.values()), 3),
        "min_margin_by_name": {name: round(margin, 3) for name, margin in margin_by_name.items()},
    }
    answers = {name: [example._asdict() for example in examples] for name, examples in golden.items()}
    path.write_text(json.dumps(answers | {"metadata": metadata}, indent=2) + "\n")


def build(out: Path, console: Console) -> None:
    golden = teams.golden()
    tokenizer = make_tokenizer(teams.corpus())
    check_lengths(tokenizer, golden)
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        trainer = Trainer(tokenizer, progress)
        base = train_base(trainer, "base", golden["base"], steps=600, seed=1)
        margin_by_name = {"base": trainer.smallest_margin(base, golden["base"], None)}
        adapters = {}
        for plan in ADAPTERS:
            adapters[plan.name] = train_adapter(trainer, base, plan, golden[plan.name])
            margin_by_name[plan.name] = trainer.smallest_margin(base, golden[plan.name], adapters[plan.name])
        old_base = train_base(trainer, "base v0", golden["base"], steps=150, seed=2)
        old_sales = train_adapter(trainer, old_base, OTHER_REVISION, golden["lora_sales"])
    if min(margin_by_name.values()) <= REQUIRED_MARGIN:
        raise SystemExit(f"margins too small, nothing written: {margin_by_name}")
    save_base(base, tokenizer, out / "base")
    for name, lora in adapters.items():
        save_adapter(lora, out / "adapters" / name, revision="v1")
    save_adapter(old_sales, out / "other" / OTHER_REVISION.name, revision="v0")
    write_golden(out / "golden.json", golden, margin_by_name)
    if out.resolve() != TENANTRY_YAML.parent:
        shutil.copy(TENANTRY_YAML, out)
    console.print(f"written to {out}; smallest margin {min(margin_by_name.values()):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to (default: this script's)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2; 1 on a machine that is busy)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    build(arguments.out, Console(file=sys.stderr))
