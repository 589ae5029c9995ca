"""`python -m lora_kernels.bench.readme`: writes the tables of kernels/README.md from the file of figures, between their marks."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from lora_kernels.bench.results import slower
from lora_kernels.bench.revision import ROOT
from lora_kernels.bench.rows import Key, Row, key_of
from lora_kernels.bench.selection import ADAPTERS, RANK, UNTUNED
from lora_kernels.bench.targets import Missed, judge

README = ROOT / "kernels" / "README.md"
FIGURES = ROOT / "kernels" / "benchmarks" / "h200.json"
NAMES = {"gptoss-20b": "GPT-OSS-20B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-32b": "Qwen3-32B", "llama-3.3-70b": "Llama-3.3-70B",
         "qwen3-32b-tp4": "Qwen3-32B / 4", "llama-3.3-70b-tp4": "Llama-3.3-70B / 4",
         "deepseek-v2-lite": "DeepSeek-V2-Lite", "mixtral-8x7b": "Mixtral-8x7B"}  # fmt: skip
EXPERT_MODELS = ("gptoss-20b", "qwen3-30b-a3b")
Rows = dict[Key, Row]


def write_tables(text: str, rows: Sequence[Row]) -> str:
    """The text with each part between `<!-- figures: NAME -->` and `<!-- end -->` made anew.

    :raises KeyError: a mark names no table.
    """
    by_key = {key_of(row): row for row in rows}

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{TABLES[mark[2]](by_key)}\n{mark[3]}"

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def cell(row: Row | None) -> tuple[str, str]:
    """("ours / vLLM / floor", "times")."""
    if row is None:
        return "–", "–"
    theirs = row["vllm_us"]
    return f"{figure(row['us'])} / {figure(theirs)} / {figure(row['floor_us'])}", f"{theirs / row['us']:.1f}×" if theirs else "–"


def figure(us: float | None) -> str:
    return "–" if us is None else f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def usual(key: Key, op: str) -> bool:
    """Rank and routing as in the main tables; adapters too where it is not prefill, which has 1 at its shortest."""
    return key.op == op and key.rank == RANK and key.routing == "uniform"


def decode(rows: Rows, models: Sequence[str] = EXPERT_MODELS) -> str:
    tokens = sorted({key.tokens for key in rows if usual(key, "moe_lora") and key.adapters == ADAPTERS and key.model in models})
    lines = []
    for count in tokens:
        found = [rows.get(Key(op="moe_lora", model=model, tokens=count, adapters=ADAPTERS, rank=RANK)) for model in models]
        lines.append([str(count), *(text for row in found for text in cell(row))])
    return markdown(_expert_head("tokens", models), lines)


def untuned(rows: Rows) -> str:
    return decode(rows, UNTUNED)


def prefill(rows: Rows) -> str:
    shapes = sorted({(key.tokens, key.adapters) for key in rows if usual(key, "moe_lora_prefill") and key.adapters <= ADAPTERS})
    lines = []
    for tokens, adapters in shapes:
        shape = {"tokens": tokens, "adapters": adapters, "rank": RANK}
        found = [rows.get(Key(op="moe_lora_prefill", model=model, **shape)) for model in EXPERT_MODELS]
        lines.append([f"{tokens:,}, {adapters}", *(text for row in found for text in cell(row))])
    return markdown(_expert_head("tokens, adapters"), lines)


def _expert_head(first: str, models: Sequence[str] = EXPERT_MODELS) -> list[str]:
    return [first, *(text for model in models for text in (f"{NAMES[model]}: ours / vLLM / floor", "times"))]


def work_list(rows: Rows) -> str:
    keys = sorted({(key.tokens, key.adapters) for key in rows if usual(key, "work_list")})
    lines = []
    for tokens, adapters in keys:
        found = [rows.get(Key(op="work_list", model=model, tokens=tokens, adapters=adapters, rank=RANK)) for model in EXPERT_MODELS]
        lines.append([f"{tokens:,}", *("–" if row is None else f"{figure(row['us'])} / {figure(row['vllm_us'])}" for row in found)])
    return markdown(["tokens", *(f"{NAMES[model]}: ours / vLLM's align" for model in EXPERT_MODELS)], lines)


def dense(rows: Rows) -> str:
    """A line a layer, a column for each number of tokens: ours / vLLM (times)."""
    keys = [key for key in rows if usual(key, "dense_lora") and key.adapters in (1, ADAPTERS)]
    tokens = sorted({key.tokens for key in keys})
    layers = sorted({(list(NAMES).index(key.model), key.model, key.layer) for key in keys if key.model in NAMES})
    lines = []
    for _, model, layer in layers:
        found = {key.tokens: rows[key] for key in keys if (key.model, key.layer) == (model, layer)}
        lines.append([f"{NAMES[model]} {layer}", *(_short(found.get(count)) for count in tokens)])
    return markdown(["layer", *(f"{count:,}" for count in tokens)], lines)


def _short(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{figure(row['us'])} / {figure(row['vllm_us'])}" + (f" ({row['vllm_us'] / row['us']:.1f}×)" if row["vllm_us"] else "")


def others(rows: Rows) -> str:
    """Ranks, adapters and routings other than the usual: a line each, a column for each model and number of tokens."""
    keys = [key for key in rows if key.op in ("moe_lora", "moe_lora_prefill") and key.model in EXPERT_MODELS]
    unusual = [key for key in keys if (key.rank, key.routing) != (RANK, "uniform") or key.adapters > ADAPTERS]
    columns = sorted({(key.model, key.tokens) for key in unusual})
    lines = []
    for kind in sorted({_kind(key) for key in unusual}):
        found = {(key.model, key.tokens): rows[key] for key in unusual if _kind(key) == kind}
        lines.append([_named(kind), *(_short(found.get(column)) for column in columns)])
    return markdown(["", *(f"{NAMES[model]}, {tokens:,}" for model, tokens in columns)], lines)


def dense_others(rows: Rows) -> str:
    """The same of dense layers, a line each layer."""
    unusual = [key for key in rows if key.op == "dense_lora" and ((key.rank, key.routing) != (RANK, "uniform") or key.adapters > ADAPTERS)]
    tokens = sorted({key.tokens for key in unusual})
    kinds = sorted({(key.layer, _kind(key), key.model) for key in unusual})
    lines = []
    for layer, kind, model in kinds:
        found = {key.tokens: rows[key] for key in unusual if (key.layer, _kind(key), key.model) == (layer, kind, model)}
        lines.append([f"{NAMES[model]} {layer}, {_named(kind)}", *(_short(found.get(count)) for count in tokens)])
    return markdown(["", *(f"{count:,}" for count in tokens)], lines)


Kind = tuple[bool, bool, int, int, str]


def _kind(key: Key) -> Kind:
    """What is not the usual about a row, in the order of the tables."""
    return (key.rank != RANK, key.adapters > ADAPTERS, key.rank, key.adapters, key.routing)


def _named(kind: Kind) -> str:
    *_, rank, adapters, routing = kind
    return f"rank {rank}" if rank != RANK else f"{adapters} adapters" if adapters > ADAPTERS else routing.replace("_", " ")


def behind(rows: Rows) -> str:
    """Rows slower than vLLM's by more than 5%."""
    found = slower(list(rows.values()))
    if not found:
        return f"None of the {len(rows)} rows measured is slower than vLLM's by more than 5%."
    names = [f"{row['model']} {row['op']} {row.get('layer', '')} {row['tokens']} tokens, rank {row['rank']}, {row['adapters']} adapters, "
             f"{row.get('routing', 'uniform')}: {_short(row)}" for row in found]  # fmt: skip
    return f"Slower than vLLM's by more than 5%, of {len(rows)} rows: " + "; ".join(names) + "."


def set_out_for(rows: Rows) -> str:
    """How many of the targets are reached, and which are not."""
    reached, missed = judge(rows.values())
    told = f"{len(reached)} of the {len(reached) + len(missed)} figures set out for (`benchmarks/targets.json`) are reached, 5% tolerated"
    return f"{told}. Not: {'; '.join(_missed(one) for one in missed)}." if missed else f"{told}."


def _missed(one: Missed) -> str:
    row = one.row
    asked = " and ".join([f"{one.most_us} us"] * (one.most_us is not None) + [f"{one.times}×"] * (one.times is not None))
    name = " ".join(str(part) for part in (NAMES[row["model"]], row.get("layer", ""), f"{row['tokens']:,}") if part)
    return f"{name}: {_short(row)}, set out for {asked}"


TABLES: dict[str, Callable[[Rows], str]] = {
    "decode": decode, "prefill": prefill, "work_list": work_list, "dense": dense, "others": others,
    "dense_others": dense_others, "behind": behind,
    "targets": set_out_for, "untuned": untuned,
}  # fmt: skip


def main() -> None:
    rows = json.loads(FIGURES.read_text())["rows"]
    text = README.read_text()
    made = write_tables(text, rows)
    README.write_text(made)
    sys.stdout.write(f"{README}: {'as it was' if made == text else 'tables written'}\n")


if __name__ == "__main__":
    main()
