"""What was set out for (benchmarks/targets.json: us at most, times vLLM's at least), and whether rows reach it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lora_kernels.bench.revision import ROOT
from lora_kernels.bench.rows import Key, Row, key_of

TARGETS = ROOT / "kernels" / "benchmarks" / "targets.json"


@dataclass(frozen=True, kw_only=True)
class Missed:
    """most_us, times: as set out for, None where reached or where nothing was."""

    row: Row
    most_us: float | None
    times: float | None


def targets() -> dict[Key, dict[str, Any]]:
    return {key_of(row): row for row in _document()["rows"]}


def judge(rows: Iterable[Row]) -> tuple[list[Row], list[Missed]]:
    """Of rows that something was set out for, those that reach it, a shortfall of 5% tolerated, and those that do not."""
    tolerated, by_key = _document()["tolerated"], {}
    for row in rows:
        by_key.setdefault(key_of(row), []).append(row)
    reached, missed = [], []
    for row, target in ((row, target) for key, target in targets().items() for row in by_key.get(key, ())):
        most, times = target.get("us"), target.get("times")
        slow = most is not None and row["us"] > most * tolerated
        close = times is not None and row["vllm_us"] is not None and row["vllm_us"] / row["us"] < times / tolerated
        if slow or close:
            missed.append(Missed(row=row, most_us=most if slow else None, times=times if close else None))
        else:
            reached.append(row)
    return reached, missed


@cache
def _document() -> dict[str, Any]:
    """Nothing is set out for where the file was not copied along."""
    return json.loads(TARGETS.read_text()) if TARGETS.exists() else {"tolerated": 1.05, "rows": []}
