"""The file of figures: rows of this run beside those of earlier ones; what a row replaces goes to `history/`.

`python -m lora_kernels.bench.results NEW.json INTO.json` merges what a run elsewhere wrote.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lora_kernels.bench.rows import Row, key_of

TOLERATED = 1.05


def save(file: Path, rows: list[Row], about: dict[str, Any]) -> None:
    """Each row carries the commit it was measured at; `about` (gpu, commit, versions, copy rate) is the last run's."""
    document = json.loads(file.read_text()) if file.exists() else {"rows": []}
    rows = [{"commit": about["commit"], **row} for row in rows]
    measured = {key_of(row) for row in rows}
    replaced = [row for row in document["rows"] if key_of(row) in measured]
    kept = [row for row in document["rows"] if key_of(row) not in measured]
    if replaced:
        past = file.parent / "history" / file.with_suffix(".jsonl").name
        past.parent.mkdir(parents=True, exist_ok=True)
        with past.open("a") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in replaced)
    head = json.dumps({key: value for key, value in document.items() if key != "rows"} | about)
    body = ",\n".join("  " + json.dumps(_commit_last(row)) for row in sorted(kept + rows, key=key_of))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(head[:-1] + ', "rows": [\n' + body + "\n]}\n")


def _commit_last(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "commit"} | {"commit": row["commit"]}


def slower(rows: list[Row]) -> list[Row]:
    """Rows where ours takes more than 5% longer than vLLM's."""
    return [row for row in rows if row["vllm_us"] and row["us"] > TOLERATED * row["vllm_us"]]


def table(rows: list[Row]) -> str:
    shape = f"{'op':<17}{'model':<18}{'layer':<8}{'tokens':>7}{'adapters':>9}{'rank':>5}"
    head = f"{shape} {'routing':<11}{'us':>9}{'vLLM':>9}{'times':>7}{'floor':>8}"
    return "\n".join([head, *(line(row) for row in rows)]) + "\n"


def line(row: Row) -> str:
    theirs = f"{row['vllm_us']:>9}{row['vllm_us'] / row['us']:>7.2f}" if row["vllm_us"] else f"{'-':>9}{'-':>7}"
    shape = f"{row['op']:<17}{row['model']:<18}{row.get('layer', ''):<8}{row['tokens']:>7}{row['adapters']:>9}{row['rank']:>5}"
    return f"{shape} {row.get('routing', ''):<11}{row['us']:>9}{theirs}{row['floor_us']:>8}"


def warnings(rows: list[Row]) -> str:
    found = slower(rows)
    if not found:
        return "No row is slower than vLLM's by more than 5%.\n"
    return "SLOWER THAN vLLM BY MORE THAN 5%:\n" + "\n".join(line(row) for row in found) + "\n"


def main(new: str, into: str) -> None:
    document = json.loads(Path(new).read_text())
    rows = document.pop("rows")
    save(Path(into), rows, document)


if __name__ == "__main__":
    main(*sys.argv[1:])
