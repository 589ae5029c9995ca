"""`python -m lora_kernels.bench`: the kernels' tests, then their times beside vLLM's, into benchmarks/<gpu>.json. Red tests: nothing."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton

from lora_kernels.bench.measure import copy_bandwidth, graph_us
from lora_kernels.bench.models import DENSE, MOE
from lora_kernels.bench.vllm_peer import vllm_version
from lora_kernels.dense_shrink.bench import DenseBench
from lora_kernels.moe_prefill.bench import rows as prefill_rows
from lora_kernels.moe_shrink.bench import MoeBench

ROOT = Path(__file__).resolve().parents[3]
TESTS = ROOT / "tests" / "kernels_gpu"
Row = dict[str, str | int | float | None]
KEY = ("model", "op", "tokens", "adapters", "rank")


def tests_pass() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS), "--confcutdir", str(TESTS)]
    ran = subprocess.run([*command, "-p", "no:cacheprovider", str(TESTS)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode:
        sys.stderr.write(ran.stdout)
    return ran.returncode == 0


def time_or_none(step: Callable[[int], object], *, steps: int) -> float | None:
    """None where it cannot run here: a missing peer is a missing figure, not a failure."""
    try:
        return graph_us(step, steps=steps)
    except Exception as error:  # noqa: BLE001 - the peer's own failures, of any kind
        sys.stderr.write(f"not measured: {type(error).__name__}: {str(error)[:300]}\n")
        return None


def moe_rows(names: list[str], tokens: list[int], *, rank: int, slots: int, adapters: int, peer: bool, bandwidth: float) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        bench = MoeBench(MOE[name], slots=slots, rank=rank, layers=6)
        for count in tokens:
            batch = bench.batch(count, steps=48, adapters=adapters)
            ours, theirs = graph_us(batch.ours, steps=48), None
            if peer:
                batch.prepare_vllm()
                theirs = time_or_none(batch.vllm, steps=48)
            rows.append(row(name, "moe_lora", count, adapters, rank, ours, theirs, batch.floor_bytes() / bandwidth))
            del batch
        del bench
        torch.cuda.empty_cache()
    return rows


def dense_rows(names: list[str], tokens: list[int], *, rank: int, slots: int, adapters: int, peer: bool, bandwidth: float) -> list[Row]:
    rows: list[Row] = []
    for layer in DENSE:
        if layer.model not in names:
            continue
        for count in tokens:
            bench = DenseBench(layer, count, slots=slots, adapters=adapters, rank=rank)
            ours, theirs = graph_us(bench.ours, steps=48), None
            if peer:
                bench.prepare_vllm()
                theirs = time_or_none(bench.vllm, steps=48)
            rows.append(row(layer.model, f"dense_lora_{layer.layer}", count, adapters, rank, ours, theirs, bench.floor_bytes() / bandwidth))
            del bench
            torch.cuda.empty_cache()
    return rows


def row(model: str, op: str, tokens: int, adapters: int, rank: int, us: float, vllm_us: float | None, floor_s: float) -> Row:
    theirs = None if vllm_us is None else round(vllm_us, 2)
    return {"model": model, "op": op, "tokens": tokens, "adapters": adapters, "rank": rank, "us": round(us, 2), "vllm_us": theirs,
            "floor_us": round(floor_s * 1e6, 2)}  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = [f"{'model':<20}{'op':<22}{'tokens':>7}{'adapters':>9}{'rank':>5}{'us':>9}{'vLLM':>9}{'times':>7}{'floor':>8}"]
    for one in rows:
        theirs = f"{one['vllm_us']:>9}{one['vllm_us'] / one['us']:>7.2f}" if one["vllm_us"] else f"{'-':>9}{'-':>7}"
        lines.append(
            f"{one['model']:<20}{one['op']:<22}{one['tokens']:>7}{one['adapters']:>9}{one['rank']:>5}{one['us']:>9}{theirs}{one['floor_us']:>8}"
        )
    return "\n".join(lines) + "\n"


def save(file: Path, rows: list[Row], *, bandwidth: float) -> None:
    """Rows of the same model, op, tokens, adapters and rank are replaced, others stay."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    document = json.loads(file.read_text()) if file.exists() else {"rows": []}
    measured = {tuple(one[key] for key in KEY) for one in rows}
    kept = [one for one in document["rows"] if tuple(one[key] for key in KEY) not in measured]
    document |= {
        "gpu": torch.cuda.get_device_name(),
        "commit": commit or document.get("commit", "unknown"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm_version(),
        "copy_bytes_per_s": round(bandwidth),
        "rows": sorted(kept + rows, key=lambda one: [str(one[key]).rjust(20) for key in ("op", "model", "tokens", "adapters", "rank")]),
    }
    lines = ",\n".join("  " + json.dumps(one) for one in document.pop("rows"))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document)[:-1] + ', "rows": [\n' + lines + "\n]}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="lora_kernels.bench", description=__doc__)
    parser.add_argument("--models", default="gptoss-20b,qwen3-30b-a3b,qwen3-32b,qwen3-32b-tp4,llama-3.3-70b,llama-3.3-70b-tp4")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256", help="of expert layers")
    parser.add_argument("--dense-tokens", default="1,8,32")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--to", type=Path, default=ROOT / "kernels" / "benchmarks" / "h200.json")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here")
    if not tests_pass():
        return 1
    names, bandwidth = chosen.models.split(","), copy_bandwidth()
    options = {
        "rank": chosen.rank,
        "slots": chosen.adapters,
        "adapters": chosen.adapters,
        "peer": vllm_version() is not None,
        "bandwidth": bandwidth,
    }
    rows = moe_rows([name for name in names if name in MOE], [int(t) for t in chosen.tokens.split(",")], **options)
    rows += dense_rows(names, [int(t) for t in chosen.dense_tokens.split(",")], **options)
    rows += prefill_rows(names, rank=chosen.rank, with_vllm=options["peer"])
    save(chosen.to, rows, bandwidth=bandwidth)
    sys.stdout.write(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
