"""`python -m benchmarks.serving.report [FIGURES.json]`: the tables in docs/gpu-worker.md and README.md, and the plot."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.serving import figures

NAMES = {"gptoss-20b": "GPT-OSS-20B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
TITLES = {
    "vllm": "vLLM, no adapters",
    "vllm+8": "vLLM, 8 adapters",
    "tenantry-engine+8": "Tenantry's engine, 8 adapters",
    "tenantry+8": "the whole path, 8 adapters",
    "vllm-serve": "vLLM's server over HTTP, no adapters",
    "vllm-serve+8": "vLLM's server over HTTP, 8 adapters",
}
_COLORS = {
    "vllm": "#8a8f98",
    "vllm+8": "#c9702b",
    "tenantry-engine+8": "#2b6cb0",
    "tenantry+8": "#5fa8dd",
    "vllm-serve": "#c4c8cf",
    "vllm-serve+8": "#dda15e",
}
Figures = dict[str, Any]


def table(found: Figures) -> str:
    """A line for each model, batch and system: to the first token, between tokens, tokens/s, GPU time of the prompts, and what is kept."""
    kept = {(share["model"], share["system"], share["batch"]): share for share in figures.kept(found["rows"])}
    lines = ["| model, batch | system | first token ms | between tokens ms | tokens/s of a request, of all | prompts' GPU ms |"]
    lines.append("|---|---|---|---|---|---|")
    order = list(TITLES)
    for row in sorted(found["rows"], key=lambda row: (list(NAMES).index(row["model"]), row["batch"], order.index(row["system"]))):
        share = kept.get((row["model"], row["system"], row["batch"]), {})
        cells = [
            f"{NAMES[row['model']]}, {row['batch']}",
            TITLES[row["system"]],
            _cell(row, "ttft_ms", 1),
            _cell(row, "itl_ms", 2) + _share(share, "decode"),
            f"{_cell(row, 'otps', 0)}, {_cell(row, 'otps_all', 0)}",
            _cell(row, "prefill_gpu_ms", 1) + _share(share, "prefill"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def switching(found: Figures) -> str:
    """What eight streams notice of a mount, and first tokens after a switch; of every model that it was measured with."""
    parts: list[str] = []
    for model, run in found["runs"].items():
        measured = run["systems"].get("tenantry-engine+8", {}).get("switching")
        if measured is None:
            continue
        parts += [
            f"{NAMES[model]}:",
            "",
            "| beside 8 streams | lasts ms | p50 | p99 | longest | p99 times idle |",
            "|---|---|---|---|---|---|",
        ]
        for row in measured["beside_8_streams"]:
            lasts = ", ".join(f"{lasts:,.0f}" for lasts in row["lasts_ms"])
            cells = [
                row["window"],
                lasts,
                *(_cell(row, name, 2) for name in ("itl_p50_ms", "itl_p99_ms", "itl_longest_ms", "p99_times_idle")),
            ]
            parts.append("| " + " | ".join(cells) + " |")
        parts += [
            "",
            "| adapter of the request | requests | first token p50 ms | p99 | more than repeating, p50 | p99 |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in measured["first_token"].items():
            cells = [name, str(row["requests"])]
            cells += [_cell(row, column, 2) for column in ("ttft_p50_ms", "ttft_p99_ms", "extra_p50_ms", "extra_p99_ms")]
            parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts).rstrip() or "Switching and mounting were not measured in this run."


def plot(found: Figures) -> str:
    """An SVG: output tokens per second of one request, by batch; a group of bars for each model and batch."""
    rows = [row for row in found["rows"] if "otps" in row and row["model"] in NAMES]
    groups = sorted({(list(NAMES).index(row["model"]), row["batch"]) for row in rows})
    systems = [system for system in TITLES if any(row["system"] == system for row in rows)]
    value = {(list(NAMES).index(row["model"]), row["batch"], row["system"]): row["otps"] for row in rows}
    highest = max(value.values(), default=1.0)
    bar, gap, height, left = 26, 22, 220, 40
    width = left + len(groups) * (len(systems) * bar + gap) + 20
    size = f'width="{width}" height="{height + 60 + 18 * len(systems)}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    parts.append(f'<text x="{left}" y="14">output tokens per second of a request</text>')
    for number, (model, batch) in enumerate(groups):
        x = left + number * (len(systems) * bar + gap)
        parts.append(f'<text x="{x}" y="{height + 36}">{list(NAMES.values())[model]}, batch {batch}</text>')
        for at, system in enumerate(systems):
            tall = value.get((model, batch, system), 0.0) / highest * (height - 40)
            top = height + 20 - tall
            parts.append(f'<rect x="{x + at * bar}" y="{top:.1f}" width="{bar - 4}" height="{tall:.1f}" fill="{_COLORS[system]}"/>')
            if tall:
                parts.append(f'<text x="{x + at * bar}" y="{top - 3:.1f}" font-size="9">{value[model, batch, system]:.0f}</text>')
    for at, system in enumerate(systems):
        y = height + 56 + 18 * at
        parts.append(f'<rect x="{left}" y="{y - 9}" width="10" height="10" fill="{_COLORS[system]}"/>')
        parts.append(f'<text x="{left + 16}" y="{y}">{TITLES[system]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


TABLES: dict[str, Callable[[Figures], str]] = {"serving": table, "switching": switching}


def write_tables(text: str, found: Figures) -> str:
    """The text with each part between `<!-- figures: NAME -->` and `<!-- end -->` made anew.

    :raises KeyError: a mark names no table.
    """

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}\n{TABLES[mark[2]](found)}\n{mark[3]}"

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?(<!-- end -->)", fill, text, flags=re.DOTALL)


def _cell(row: dict[str, Any], name: str, digits: int) -> str:
    return f"{row[name]:,.{digits}f}" if name in row else "–"


def _share(share: dict[str, Any], phase: str) -> str:
    if f"{phase}_kept" not in share:
        return ""
    bar = f", asked {share[f'{phase}_bar']:.0%}" if f"{phase}_bar" in share else ""
    return f" ({share[f'{phase}_kept']:.0%}{bar})"


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0]) if arguments else machine.RESULTS / "serving-h200.json"
    found: Figures = json.loads(path.read_text())
    kept_at = machine.RESULTS / "serving-h200.json"
    if path != kept_at:
        kept_at.write_text(json.dumps(found, indent=1) + "\n")
    kept_at.with_suffix(".svg").write_text(plot(found))
    for page in (machine.ROOT / "README.md", machine.ROOT / "docs" / "gpu-worker.md"):
        page.write_text(write_tables(page.read_text(), found))
        sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
