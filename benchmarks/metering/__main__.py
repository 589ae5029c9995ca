"""`python -m benchmarks.metering` (`make bench-metering`): whether the engine's time adds up, who pays for it, and what measuring costs.

On a CPU the figures stand at the top of benchmarks/results/metering.json, on a GPU (`--dtype bfloat16`) under `h200`.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.metering import engine, figures
from benchmarks.tenancy import results

PATH = machine.RESULTS / "metering.json"
_ENGINE = f"the demo's base with two adapters, {engine.SEATS} seats; prompts that no cache knows"
HOW = {
    "gpu_time_unaccounted": f"{_ENGINE}; three tenants' mixed load (long prompts, long answers, n=2) until idle: wall time "
    "less busy, idle and overhead as measured",
    "alone_billed_of_busy": f"{_ENGINE}; each of the three tenants alone: what its attempts were charged of the busy time; the least",
    "prefill_billed_of_shapley": f"{_ENGINE}; prompts of 400 beside streams of 150: charged over the Shapley share of solo and joint runs "
    "(the least times of the rounds, medians of parts); `…_by_token_count…` is what a split by tokens would charge",
    "metering_overhead": f"{_ENGINE}; 32 short requests at a time, engines with metering and without in turn: 1 - metered / unmetered "
    "requests per second of the best of many bursts, which the rest of the machine disturbed least",
    "metering_cpu_overhead": "the same bursts: CPU time of the worker's and the model runner's processes for a request, metered / "
    "unmetered - 1, "
    "the least of each (the engine's own process spins while it waits)",
    "metering_us_per_token": "CPU time of the hook, its records and the ledger for 32 decoding rows a step, without an engine",
}
BARS = {
    "gpu_time_unaccounted": (None, 0.01),
    "alone_billed_of_busy": (0.97, None),
    "prefill_billed_of_shapley": (0.85, 1.15),
    "decode_billed_of_shapley": (0.85, 1.15),
    "metering_overhead": (None, 0.02),
    "metering_cpu_overhead": (None, 0.02),
    "metering_us_per_token": (None, 5.0),
}


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": args.dtype, "engine_args": json.loads(args.engine_args)}
    per_token = figures.us_per_token()
    found: dict[str, Any] = {"metering_us_per_token": sum(per_token.values()), "us_per_token": per_token}
    async with engine.engine(**options) as desk:
        found |= await figures.accounts(desk, args.scale, args.rounds)
        if not args.pairs:
            found["requests_per_s"] = {"metered": [await figures.rate(desk, args.scale)]}
    if args.pairs:
        found |= await figures.overhead(args.scale, args.pairs, **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metering", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="requests, in parts of the usual ones")
    parser.add_argument("--rounds", type=int, default=3, help="of solo and joint runs")
    parser.add_argument("--pairs", type=int, default=2, help="of engines with metering and without; 0: not compared")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engine-args", default="{}", help="vLLM's own, as JSON")
    parser.add_argument("--under", default="", help="the key of the results file that the figures go under")
    parser.add_argument("--out", type=Path, default=PATH)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.under:
        results.merge({args.under: found | {"measured": machine.context()}}, {}, args.out)
    else:
        results.merge(found, {name: text for name, text in HOW.items() if name in found}, args.out)
    table = Table("figure", "value", "bar", title="metering")
    for name, (least, most) in BARS.items():
        if name in found:
            bar = f"{least} to {most}" if least is not None and most is not None else f"≥ {least}" if least is not None else f"≤ {most}"
            table.add_row(name, f"{found[name]:.4f}", bar)
    Console().print(table)


if __name__ == "__main__":
    main()
