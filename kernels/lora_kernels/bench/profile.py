"""`python -m lora_kernels.bench.profile --ops moe --models gptoss-20b --tokens 64`: what each kernel of a row does with the memory.

One step under NVIDIA's ncu, kernel by kernel, caches flushed before each and launches not overlapping: the sum of the times is more
than the row's own. Prints time, bytes from and to memory, share of the peak bandwidth, L2 hits, occupancy, the commonest stall.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lora_kernels.bench.rows import Key

SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats")
METRICS = "dram__bytes_read.sum,dram__bytes_write.sum"
MARK = "spin_kernel"
"""What torch.cuda._sleep launches: stands between two keys."""
STALL = "smsp__average_warps_issue_stalled_"


def profile(keys: Sequence[Key], *, peer: bool) -> list[list[dict[str, str]]]:
    """ncu's raw values for each key: a dict for each kernel.

    :raises RuntimeError: ncu did not run, or saw no kernel.
    """
    command = ["ncu", "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off", "--target-processes", "all"]
    for section in SECTIONS:
        command += ["--section", section]
    command += ["--metrics", METRICS, "--page", "raw", "--csv", "--print-units", "base"]
    command += [
        sys.executable,
        "-m",
        "lora_kernels.bench.profile",
        "--child",
        json.dumps({"peer": peer, "keys": [asdict(key) for key in keys]}),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    starts = [index for index, text in enumerate(lines) if text.startswith('"ID"')]
    if not starts:
        raise RuntimeError(f"ncu gave no table: {ran.stdout[-1500:]} {ran.stderr[-1500:]}")
    table = csv.DictReader(io.StringIO("\n".join(lines[starts[0] :])))
    found: list[list[dict[str, str]]] = [[]]
    for row in table:
        if MARK in (row["Kernel Name"] or ""):
            found.append([])
        elif row["ID"]:  # the line below the head holds units
            found[-1].append(row)
    return found[:-1]


def run_child(text: str) -> None:
    """For each key: compiles on one step, then lets ncu see another, and a mark."""
    import torch

    from lora_kernels.bench.cases import build

    wanted = json.loads(text)
    for key in wanted["keys"]:
        case = build(Key(**key), steps=2, layers=1)
        step = case.vllm() if wanted["peer"] and case.vllm else case.ours
        step(0)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        step(case.steps - 1)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        del case, step
        torch.cuda.empty_cache()


def number(row: dict[str, str], *names: str) -> float:
    """The first of these metrics that ncu gave."""
    text = next((row[name] for name in names if row.get(name)), "nan")
    return float(text.replace(",", "")) if text != "n/a" else float("nan")


def stall(row: dict[str, str]) -> str:
    """The commonest reason why a warp that could not issue waited, as a share of all."""
    waits = {
        name.removeprefix(STALL).removesuffix("_per_issue_active.ratio"): number(row, name)
        for name in row
        if name.startswith(STALL) and name.endswith("_per_issue_active.ratio") and "not_issued" not in name
    }
    if not waits:
        return "-"
    reason = max(waits, key=lambda name: waits[name])
    return f"{reason} {100 * waits[reason] / max(sum(waits.values()), 1e-9):.0f}%"


COLUMNS = (
    ("grid", 8, 0, 1, ("launch__grid_size",)),
    ("regs", 6, 0, 1, ("launch__registers_per_thread",)),
    ("us", 9, 2, 1e-3, ("gpu__time_duration.sum",)),
    ("MB read", 9, 2, 1e-6, ("dram__bytes_read.sum",)),
    ("written", 9, 2, 1e-6, ("dram__bytes_write.sum",)),
    ("peak %", 8, 1, 1, ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "dram__throughput.avg.pct_of_peak_sustained_elapsed")),
    ("L2 hit %", 10, 1, 1, ("lts__t_sector_hit_rate.pct",)),
    ("occup. %", 10, 1, 1, ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
)
"""Title, width, digits, factor, ncu's metric (the first that is there)."""


def describe(rows: list[dict[str, str]]) -> str:
    lines = [f"{'kernel':<34}" + "".join(f"{title:>{width}}" for title, width, *_ in COLUMNS) + "  stall"]
    for row in rows:
        values = (f"{factor * number(row, *names):>{width}.{digits}f}" for _, width, digits, factor, names in COLUMNS)
        lines.append(f"{row['Kernel Name'][:33]:<34}" + "".join(values) + f"  {stall(row)}")
    total = sum(number(row, "gpu__time_duration.sum") for row in rows) / 1000
    return "\n".join([*lines, f"{'sum':<48}{total:>9.2f}"]) + "\n"


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        run_child(sys.argv[2])
        return 0
    from lora_kernels.bench.options import add_options, wanted_of
    from lora_kernels.bench.selection import select

    parser = argparse.ArgumentParser(prog="lora_kernels.bench.profile", description=__doc__)
    add_options(parser)
    parser.add_argument("--vllm", action="store_true", help="vLLM's kernels instead of ours")
    parser.add_argument("--raw", action="store_true", help="all that ncu gave, as JSON lines")
    chosen = parser.parse_args()
    keys = select(wanted_of(chosen))
    for key, rows in zip(keys, profile(keys, peer=chosen.vllm), strict=True):
        if chosen.raw:
            sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
        sys.stdout.write(f"{key}\n{describe(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
