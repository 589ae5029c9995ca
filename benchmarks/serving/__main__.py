"""`python -m benchmarks.serving --model gptoss-20b` (`make bench-serving`): what serving eight adapters costs, on one GPU with vLLM 0.26.

a: vLLM alone without adapters, b: vLLM alone with eight, c: Tenantry's engine with eight, d: client, router, NATS and worker around
c's engine. Random weights of the published model's
shape, random token ids as prompts; one system at a time on the card, the next one importing meanwhile. Rows are written as they come.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine
from benchmarks.serving import engines, figures, model_files, shapes
from benchmarks.serving.child import Child, SystemFailed, wait_for_card
from benchmarks.serving.results import Results

_START_LIMIT_S = 420.0
_MEASURE_LIMIT_S = 300.0
console = Console(width=max(120, Console().width), highlight=False)
_STARTED_S = time.monotonic()


def say(text: str) -> None:
    console.print(f"{time.monotonic() - _STARTED_S:6.1f} s {text}", markup=False, soft_wrap=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    args = _arguments()
    batches = tuple(int(part) for part in args.batches.split(","))
    names = [name for name in args.systems.split(",") if name != "d"]  # around c's engine, once that is measured
    scratch = Path(tempfile.mkdtemp(prefix="tenantry-serving-", dir=args.scratch or _scratch()))
    plan = engines.Plan(
        model=args.model,
        folder=str(scratch / args.model),
        adapters=str(scratch / "cache" / "adapters"),
        layers=args.layers,
        batches=batches,
        max_seqs=max(batches) + 2,  # Tenantry keeps a seat free for whoever has none
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        compiled=args.compiled,
        device=args.device,
    )
    out = args.out / f"serving-{args.device_name}.json"
    about_run = {"card": _card(), "plan": _plan_of(plan), "engine_args": engines.engine_args(plan, tenantry=False)}
    context = machine.context()
    context["command"] = re.sub(r" --(out|scratch) \S+", "", context["command"])  # says nothing of a figure
    results = Results(out, context | about_run)
    making: subprocess.Popen[bytes] | None = None
    children: list[Child] = []
    try:
        model_files.write_model(Path(plan.folder), plan.config, plan.seed)
        children = [Child(names[0], plan, scratch)]
        if "c" in names:
            making = _make_adapters(plan)
        say(f"{plan.model}, {plan.config['num_hidden_layers']} layers, in {scratch}")
        for number, name in enumerate(names):
            child = children[number]
            if name == "c" and making is not None and making.wait(_START_LIMIT_S):
                raise SystemExit("the adapters could not be made")
            child.open_gate()
            try:
                ready = child.wait_ready(_START_LIMIT_S)
                say(f"{figures.SYSTEMS[name]} ready after {ready['ready_s']} s {json.dumps(ready['about'])[:600]}")
                if number + 1 < len(names):
                    children.append(Child(names[number + 1], plan, scratch))
                results.about(figures.SYSTEMS[name], ready)
                run_system(child, plan, results, args)
            except SystemFailed as failure:
                say(f"{figures.SYSTEMS[name]} failed: {failure}")
                results.about(figures.SYSTEMS[name], {"failed": str(failure)[:2000]})
                if len(children) == number + 1 and number + 1 < len(names):
                    children.append(Child(names[number + 1], plan, scratch))
            child.end()
            if plan.device == "cuda":
                wait_for_card()
        results.show(console)
    finally:
        for child in children:
            child.end()
            if args.keep_logs:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / child.log.name).write_bytes(child.log.read_bytes()[-200_000:])
        if making is not None:
            making.kill()
        shutil.rmtree(scratch, ignore_errors=True)


def run_system(child: Child, plan: engines.Plan, results: Results, args: argparse.Namespace) -> None:
    """Timings first: the profiler stays in the process that has used it."""
    system = figures.SYSTEMS[child.name]
    for batch in plan.batches:
        found = child.ask("measure", _MEASURE_LIMIT_S, batch=batch, repeats=args.repeats, output_tokens=plan.output_tokens)
        say(f"  {system} batch {batch}: {_short(found)}")
        results.row(plan.model, system, batch, found)
    if child.name == "c" and "d" in args.systems.split(","):
        whole = figures.SYSTEMS["d"]
        rates = [float(part) for part in args.rates.split(",") if part]
        order = {"batches": plan.batches, "repeats": args.repeats, "output_tokens": plan.output_tokens}
        by_batch = child.ask("measure_path", _MEASURE_LIMIT_S, **order, rates=rates, seconds=args.rate_seconds)
        for row in by_batch.get("arrivals", []):
            say(f"  {whole}: {_short(row)}")
        results.about(whole, {"arrivals": by_batch.get("arrivals", [])})
        for batch in plan.batches:
            say(f"  {whole} batch {batch}: {_short(by_batch[str(batch)])}")
            results.row(plan.model, whole, batch, by_batch[str(batch)])
    if child.name in figures.OVER_HTTP and args.http:
        order = {"batches": plan.batches, "repeats": args.http, "output_tokens": plan.output_tokens}
        by_batch = child.ask("measure_http", _MEASURE_LIMIT_S, **order)
        for batch in plan.batches:
            say(f"  {figures.OVER_HTTP[child.name]} batch {batch}: {_short(by_batch[str(batch)])}")
            results.row(plan.model, figures.OVER_HTTP[child.name], batch, by_batch[str(batch)])
    if child.name == "c" and args.switching:
        found = child.ask("switching", _MEASURE_LIMIT_S, rounds=args.switching, per_block=16, mounts=2)
        for row in found["beside_8_streams"]:
            say(f"  mounting beside 8 streams: {json.dumps(row)}")
        for order, row in found["first_token"].items():
            say(f"  first token, {order}: {_short(row)}")
        results.about(system, {"switching": found})
    if plan.device == "cpu":
        return
    for batch in plan.batches:
        found = child.ask("profile", _MEASURE_LIMIT_S, batch=batch, decode=args.profile)
        say(f"  {system} batch {batch}: {_short(found)}")
        results.row(plan.model, system, batch, {key: value for key, value in found.items() if not isinstance(value, list)})
        if args.profile:
            results.kernels(plan.model, system, batch, found)
    results.about(system, child.ask("memory", _MEASURE_LIMIT_S))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--model", default="gptoss-20b", choices=list(shapes.MODELS))
    known = ", ".join(f"{key} {name}" for key, name in figures.SYSTEMS.items())
    parser.add_argument("--systems", default="a,b,c", help=f"some of: {known}")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=1600)
    parser.add_argument("--output-tokens", type=int, default=600)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model's: a smoke test")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 8, one repeat of 100 tokens")
    parser.add_argument("--profile", action="store_true", help="decode steps kernel by kernel too")
    parser.add_argument("--http", type=int, default=0, metavar="REPEATS", help="with a and b: vLLM's own server over HTTP too")
    parser.add_argument("--rates", default="", help="with d: requests per second that arrive by themselves, such as 1,2,4")
    parser.add_argument("--rate-seconds", type=float, default=20.0)
    parser.add_argument("--switching", type=int, default=0, metavar="ROUNDS", help="with c: the cost of switching and of mounting")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile and piecewise graphs, as vLLM starts by default")
    parser.add_argument("--scratch", type=Path, help="for model and adapters; without it memory where there is room")
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    parser.add_argument("--device-name", default="h200")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--keep-logs", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.batches, args.repeats, args.output_tokens = "1,8", 1, 100
    return args


def _make_adapters(plan: engines.Plan) -> "subprocess.Popen[bytes]":
    seeds = [str(seed) for seed in plan.adapter_seeds]
    argv = [plan.model, str(plan.layers), str(plan.rank), plan.adapters, *seeds]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.serving.adapter_files", *argv])


def _scratch() -> str:
    """Memory, where eight adapters of the larger model (27 GB) fit twice."""
    shared_memory = Path("/dev/shm")
    roomy = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 56 << 30
    return str(shared_memory) if roomy else tempfile.gettempdir()


def _card() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return "none"


def _plan_of(plan: engines.Plan) -> dict[str, Any]:
    names = ("rank", "adapter_seeds", "seed", "layers", "prompt_tokens", "output_tokens", "compiled", "max_seqs")
    return {name: getattr(plan, name) for name in names}


def _short(found: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in found.items() if isinstance(value, int | float))


if __name__ == "__main__":
    main()
