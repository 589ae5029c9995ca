"""`python -m lora_kernels.bench`: the ops' tests, then their times beside vLLM's, into benchmarks/h200.json. Red tests: nothing."""

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from lora_kernels.bench import readme, results
from lora_kernels.bench.cases import Step, build
from lora_kernels.bench.measure import copy_bandwidth, graph_us
from lora_kernels.bench.options import add_options, wanted_of
from lora_kernels.bench.revision import ROOT, revision
from lora_kernels.bench.rows import Key, Row, key_of, row_of
from lora_kernels.bench.selection import select
from lora_kernels.bench.vllm_peer import vllm_version
from lora_kernels.bench.warm import Compiling

TESTS = ROOT / "tests" / "kernels_gpu"
TESTS_OF = {
    "moe": ("test_moe_*.py",),
    "dense": ("test_dense*.py",),
    "prefill": ("test_prefill*.py", "test_work_list.py"),
    "work_list": ("test_work_list.py", "test_moe_decode.py"),
}


def start_tests(ops: Sequence[str]) -> subprocess.Popen[str]:
    """The tests of the ops, over most of the cores where pytest-xdist is there: they compile much."""
    patterns = {"test_configs.py", "test_arguments.py", *(pattern for op in ops for pattern in TESTS_OF[op])}
    files = sorted({str(file) for pattern in patterns for file in TESTS.glob(pattern) if "compiles" not in file.name})
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS), "--confcutdir", str(TESTS)]
    workers = max(1, (os.cpu_count() or 2) * 3 // 4)
    command += ["-n", str(workers)] if _has_xdist() else []
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark", *files]  # pytest-benchmark warns of xdist, and warnings are errors
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # their references run on the CPU, in as many processes as there are cores
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def _has_xdist() -> bool:
    return subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True, check=False).returncode == 0


def passed(tests: subprocess.Popen[str]) -> bool:
    said = tests.communicate()[0]
    sys.stderr.write(said if tests.returncode else said.rstrip().rsplit("\n", 1)[-1] + "\n")
    return tests.returncode == 0


def measure(key: Key, *, with_vllm: bool, bandwidth: float) -> Row:
    """vllm_us is None where the peer is missing or fails: a missing figure, no failure. Ours failing is one."""
    case = build(key)
    ours = graph_us(case.ours, steps=case.steps) / case.units
    theirs = _peer_us(key, case.vllm, steps=case.steps) if with_vllm and case.vllm else None
    floor_us = case.floor_bytes / bandwidth * 1e6
    return row_of(key, us=ours, vllm_us=theirs and theirs / case.units, floor_us=floor_us)


def _peer_us(key: Key, make: Callable[[], Step], *, steps: int) -> float | None:
    try:
        return graph_us(make(), steps=steps)
    except Exception as error:  # noqa: BLE001 - the peer's own failures, of any kind
        sys.stderr.write(f"{key}: vLLM not measured: {type(error).__name__}: {str(error)[:300]}\n")
        return None


def about(bandwidth: float) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": vllm_version()}
    return {"gpu": torch.cuda.get_device_name(), "commit": revision(), **versions, "copy_bytes_per_s": round(bandwidth)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="lora_kernels.bench", description=__doc__)
    add_options(parser)
    parser.add_argument("--compile-s", type=float, default=900, help="seconds for compiling ahead; the rest when it is timed")
    parser.add_argument("--to", type=Path, default=ROOT / "kernels" / "benchmarks" / "h200.json")
    chosen = parser.parse_args()
    wanted = wanted_of(chosen)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here")
    keys = select(wanted)
    if not keys:
        parser.error("nothing to measure under these options")
    tests = start_tests(wanted.ops)
    with_vllm = vllm_version() is not None
    compiling, began = Compiling(keys, with_vllm=with_vllm), time.monotonic()
    green = passed(tests)
    left = compiling.finish(chosen.compile_s - (time.monotonic() - began) if green else 0)
    if not green:
        return 1
    sys.stderr.write(f"compiled in {time.monotonic() - began:.0f} s, {left} of {len(keys)} rows left for later\n")
    bandwidth, rows, failed = copy_bandwidth(), [], []
    head = about(bandwidth)
    gc.freeze()  # vLLM's modules are a million objects: each row's collection would walk them all
    for number, key in enumerate(keys, 1):
        try:
            row = measure(key, with_vllm=with_vllm, bandwidth=bandwidth)
            torch.cuda.empty_cache()
        except torch.AcceleratorError as error:  # the process has lost the GPU
            failed.append(f"{key}: {str(error)[:100]}; the {len(keys) - number} rows after it were not measured")
            break
        except Exception as error:  # noqa: BLE001 - the other rows are still wanted
            failed.append(f"{key}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
            continue
        rows.append(row)
        results.save(chosen.to, [row], head)  # a run that is cut leaves what it has
        sys.stderr.write(f"{number} of {len(keys)}, {time.monotonic() - began:.0f} s: {results.line(row)}\n")
    told = f"{readme.set_out_for({key_of(row): row for row in rows})}\n"
    sys.stdout.write(results.table(rows) + results.warnings(rows) + told + "".join(f"FAILED: {text}\n" for text in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
