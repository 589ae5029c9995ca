"""`python -m benchmarks.switch_cost` (`make bench-switch`): what it costs that a request names another adapter than the one before.

The whole stack on the real CPU engine, one request at a time: blocks that repeat one adapter take turns with blocks that go
round three. Same prompts, same answers' length; every prompt has been asked before, so that its prefix is cached in both.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from tests.e2e.stack import DEMO, Stack, goldens, running

ADAPTERS = {"lora_sales": "sales", "lora_cs": "cs", "lora_finance": "finance"}


class Asker:
    """One keep-alive connection; `ask` gives the milliseconds to the first body byte of a stream."""

    def __init__(self, stack: Stack, max_tokens: int) -> None:
        self._http = httpx.Client(base_url=stack.url, trust_env=False, timeout=60)
        self._keys = stack.keys
        self._max_tokens = max_tokens
        self._question = goldens()["base"][0]["question"]

    def ask(self, adapter: str) -> float:
        body = {
            "model": adapter,
            "messages": [{"role": "user", "content": self._question}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {self._keys[ADAPTERS[adapter]]}"}
        started_s = perf_counter()
        with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            first_ms = (perf_counter() - started_s) * 1000.0
            for _ in pieces:
                pass
            assert answer.status_code == 200, answer.status_code
            assert answer.headers["x-tenantry-adapter"].startswith(adapter)
        return first_ms


def blocks(asker: Asker, rounds: int, per_block: int) -> dict[str, list[float]]:
    names = list(ADAPTERS)
    taken: dict[str, list[float]] = {"repeated": [], "alternating": []}
    for number in range(rounds):
        same = names[number % len(names)]
        for mode, order in (("repeated", [same] * per_block), ("alternating", [names[i % len(names)] for i in range(per_block)])):
            asker.ask(order[-1])  # the block's first request continues what went before
            taken[mode] += [asker.ask(name) for name in order]
    return taken


def figures(values: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"ttft_p50_ms": cuts[49], "ttft_p99_ms": cuts[98], "mean_ms": statistics.fmean(values), "requests": len(values)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.switch_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--per-block", type=int, default=18)
    parser.add_argument("--max-tokens", type=int, default=2)
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "switch.json")
    args = parser.parse_args()
    context = machine.context()
    with tempfile.TemporaryDirectory(prefix="tenantry-bench-") as folder, running(Stack(Path(folder), max_loras=6)) as stack:
        stack.allow_label()
        for adapter, tenant in ADAPTERS.items():
            stack.add_tenant(tenant)
            stack.admin.upload(tenant, adapter, DEMO / "adapters" / adapter)
        asker = Asker(stack, args.max_tokens)
        blocks(asker, 1, 9)
        taken = blocks(asker, args.rounds, args.per_block)
    rows = {mode: figures(values) for mode, values in taken.items()}
    extra = {key: rows["alternating"][key] - rows["repeated"][key] for key in ("ttft_p50_ms", "ttft_p99_ms", "mean_ms")}
    result = {"rows": [{"order": mode, **row} for mode, row in rows.items()], "switch_cost": extra, **context}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table(title=f"first token, real engine on {context['machine']['cpu']}, load {context['machine']['load_1m']}")
    for column in ("adapters", "p50 ms", "p99 ms", "mean ms", "requests"):
        table.add_column(column, justify="left" if column == "adapters" else "right")
    for mode, row in rows.items():
        table.add_row(mode, *(f"{row[key]:.2f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "mean_ms")), str(row["requests"]))
    table.add_row("difference", *(f"{extra[key]:+.2f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "mean_ms")), "")
    Console().print(table)


if __name__ == "__main__":
    main()
