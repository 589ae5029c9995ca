"""`python -m benchmarks.tenancy` (`make bench-tenancy`): what a noisy tenant can do to a quiet one, and what fairness costs.

The figures are the scripted engine's, in virtual time; the real CPU engine's stand beside them under `cpu_engine`.
"""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.tenancy import cpu, results, scripted

_MODEL = (
    "scripted engine in virtual time, 32 seats, 8192 tokens a step, step = 5.5 ms + 0.22 ms a sequence + 25 us a prompt token "
    "(near GPT-OSS-20B with eight adapters on an H200); the governor is the worker's own"
)
_FLOOD = "A keeps 200 requests open (1600 prompt tokens, 300 to 900 out), B sends one of 32 in and 16 out a second"
HOW = {
    "quiet_p95_ttft_ratio": f"{_MODEL}; {_FLOOD}; B's p95 time to first token over that beside A held to 31 open requests, nothing queued",
    "quiet_wait_steps_p95": f"{_MODEL}; {_FLOOD}; engine steps begun between B's arrival at the worker and the step that reads its prompt",
    "quiet_itl_p99_ratio": f"{_MODEL}; B's stream beside 20 decoding streams of A, with A also sending prompts of 32,764 tokens (the most "
    "it may), 8 at a time, over the same without them; `details` has it over B alone too, with nothing of A's but the prompts",
    "throughput_kept": f"{_MODEL}; {_FLOOD}; all tenants' prompt and output tokens per second over plain vLLM's: first come, first "
    "served, whole steps",
    "weights_error": f"{_MODEL}; three tenants of weights 1, 2, 4 keep 64 requests open each (400 in, 100 to 300 out); the largest "
    "relative distance of one's part of the tokens from its weight's",
    "cpu_engine": "vLLM on this CPU, the demo's base, 32 seats, real time: A keeps 200 requests open (400 in, 150 to 450 out), B sends 24 "
    "in and 4 out once a second; a shared budget of 32 prompt tokens; steps counted in the scheduler, from a request's arrival there; "
    "B's stream beside 4 of A's, with A also sending prompts of 1,020 tokens (the most it may), 4 at a time, three times over; weights: "
    "three tenants with 24 requests open each; plain: vLLM's own scheduler, nothing governed",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenancy", description=__doc__)
    parser.add_argument("--engine", choices=["scripted", "cpu", "both"], default="both")
    parser.add_argument("--seconds", type=float, default=240.0, help="virtual seconds of each scripted run")
    parser.add_argument("--cpu-seconds", type=float, default=60.0)
    args = parser.parse_args()
    whole: dict[str, Any] = {}
    if args.engine != "cpu":
        found = scripted.figures(measure_s=args.seconds)
        whole = results.merge(found, {name: HOW[name] for name in found if name in HOW})
    if args.engine != "scripted":
        whole = results.merge({"cpu_engine": cpu.figures(args.cpu_seconds)}, {"cpu_engine": HOW["cpu_engine"]})
    table = Table("figure", "scripted engine", "CPU engine", title="tenancy")
    for name in HOW:
        if name != "cpu_engine":
            on_cpu = whole.get("cpu_engine", {}).get(name)
            table.add_row(name, *(f"{value:.3f}" if value is not None else "-" for value in (whole.get(name), on_cpu)))
    Console().print(table)


if __name__ == "__main__":
    main()
