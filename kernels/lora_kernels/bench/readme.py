"""`python -m lora_kernels.bench.readme`: writes the tables of kernels/README.md from the file of figures, between their marks."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from lora_kernels.bench.results import slower
from lora_kernels.bench.revision import ROOT
from lora_kernels.bench.rows import Key, Row, key_of
from lora_kernels.bench.selection import ADAPTERS, RANK

README = ROOT / "kernels" / "README.md"
FIGURES = ROOT / "kernels" / "benchmarks" / "h200.json"
TARGETS = FIGURES.with_name("targets.json")
"""What was set out for: us at most, times vLLM's at least."""
NAMES = {"gptoss-20b": "GPT-OSS-20B", "qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3-32b": "Qwen3-32B", "llama-3.3-70b": "Llama-3.3-70B",
         "qwen3-32b-tp4": "Qwen3-32B / 4", "llama-3.3-70b-tp4": "Llama-3.3-70B / 4"}  # fmt: skip
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


def decode(rows: Rows) -> str:
    tokens = sorted({key.tokens for key in rows if usual(key, "moe_lora") and key.adapters == ADAPTERS})
    lines = []
    for count in tokens:
        found = [rows.get(Key(op="moe_lora", model=model, tokens=count, adapters=ADAPTERS, rank=RANK)) for model in EXPERT_MODELS]
        lines.append([str(count), *(text for row in found for text in cell(row))])
    return markdown(_expert_head("tokens"), lines)


def prefill(rows: Rows) -> str:
    shapes = sorted({(key.tokens, key.adapters) for key in rows if usual(key, "moe_lora_prefill") and key.adapters <= ADAPTERS})
    lines = []
    for tokens, adapters in shapes:
        shape = {"tokens": tokens, "adapters": adapters, "rank": RANK}
        found = [rows.get(Key(op="moe_lora_prefill", model=model, **shape)) for model in EXPERT_MODELS]
        lines.append([f"{tokens:,}, {adapters}", *(text for row in found for text in cell(row))])
    return markdown(_expert_head("tokens, adapters"), lines)


def _expert_head(first: str) -> list[str]:
    return [first, *(text for model in EXPERT_MODELS for text in (f"{NAMES[model]}: ours / vLLM / floor", "times"))]


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
    kinds = sorted({(key.rank != RANK, key.adapters > ADAPTERS, key.rank, key.adapters, key.routing) for key in unusual})
    lines = []
    for *_, rank, adapters, routing in kinds:
        named = f"rank {rank}" if rank != RANK else f"{adapters} adapters" if adapters > ADAPTERS else routing.replace("_", " ")
        found = {
            (key.model, key.tokens): rows[key] for key in unusual if (key.rank, key.adapters, key.routing) == (rank, adapters, routing)
        }
        lines.append([named, *(_short(found.get(column)) for column in columns)])
    return markdown(["", *(f"{NAMES[model]}, {tokens:,}" for model, tokens in columns)], lines)


def behind(rows: Rows) -> str:
    """Rows slower than vLLM's by more than 5%."""
    found = slower(list(rows.values()))
    if not found:
        return f"None of the {len(rows)} rows measured is slower than vLLM's by more than 5%."
    names = [f"{row['model']} {row['op']} {row.get('layer', '')} {row['tokens']} tokens, rank {row['rank']}, {row['adapters']} adapters, "
             f"{row.get('routing', 'uniform')}: {_short(row)}" for row in found]  # fmt: skip
    return f"Slower than vLLM's by more than 5%, of {len(rows)} rows: " + "; ".join(names) + "."


def targets(rows: Rows) -> str:
    """How many of the targets are reached, and which are not."""
    document = json.loads(TARGETS.read_text())
    behind, known = [], 0
    for target in document["rows"]:
        row = rows.get(key_of(target))
        if row is None:
            continue
        known += 1
        most, times = target.get("us"), target.get("times")
        slow = most is not None and row["us"] > most * document["tolerated"]
        close = times is not None and row["vllm_us"] is not None and row["vllm_us"] / row["us"] < times / document["tolerated"]
        if slow or close:
            asked = " and ".join([f"{most} us"] * slow + [f"{times}×"] * close)
            name = " ".join(str(part) for part in (NAMES[row["model"]], row.get("layer", ""), f"{row['tokens']:,}") if part)
            behind.append(f"{name}: {_short(row)}, set out for {asked}")
    told = f"{known - len(behind)} of the {known} figures set out for (`benchmarks/targets.json`) are reached, 5% tolerated"
    return f"{told}. Not: {'; '.join(behind)}." if behind else f"{told}."


TABLES: dict[str, Callable[[Rows], str]] = {
    "decode": decode, "prefill": prefill, "work_list": work_list, "dense": dense, "others": others, "behind": behind,
    "targets": targets,
}  # fmt: skip


def main() -> None:
    rows = json.loads(FIGURES.read_text())["rows"]
    text = README.read_text()
    made = write_tables(text, rows)
    README.write_text(made)
    sys.stdout.write(f"{README}: {'as it was' if made == text else 'tables written'}\n")


if __name__ == "__main__":
    main()
