"""`python -m lora_kernels.bench.sanitize`: the kernels' tests on a GPU under NVIDIA's compute-sanitizer, several processes at once.

memcheck finds accesses outside an allocation; PyTorch's caching allocator is off, so that each tensor is an allocation of its own.
What cannot run so is left out: CUDA graphs (they capture no allocation), tensors of gigabytes, vLLM beside, tests that launch nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lora_kernels.bench.revision import ROOT

TESTS = ROOT / "tests" / "kernels_gpu"
LEFT_OUT = (
    "graph", "captured", "two_to_the_31", "vllm", "compil", "same_bits_from_run", "long_prefill", "full_batch", "large_batches", "8192",
    "20000", "test_configs", "test_bench", "test_tune", "test_plans", "test_prefill_plan", "malformed", "is_named", "are_named",
)  # fmt: skip
PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", str(TESTS / "pytest.ini"), "--rootdir", str(TESTS), "--confcutdir", str(TESTS),
          "-p", "no:cacheprovider", "-p", "no:benchmark"]  # fmt: skip
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def small_tests(files: list[Path], only: str) -> list[str]:
    """Their node ids, from pytest."""
    ran = subprocess.run([*PYTEST, "--collect-only", "-k", only, *map(str, files)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stdout + ran.stderr)
    names = [text for text in ran.stdout.splitlines() if "::" in text]
    return [str(TESTS / name) for name in names if not any(word in name for word in LEFT_OUT)]


def run_shards(tool: str, tests: list[str], *, processes: int, limit_s: float) -> int:
    """Prints a line for each process and what is wrong in full; 0 where all ended without a finding and green."""
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "20"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    shards = [tests[first::processes] for first in range(processes) if tests[first::processes]]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{index}.log" for index in range(len(shards))]
        running = []
        for shard, log in zip(shards, logs, strict=True):
            with log.open("w") as out:
                command = ["timeout", str(limit_s), "compute-sanitizer", *options, *PYTEST, *shard]
                running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
        for process, shard, log in zip(running, shards, logs, strict=True):
            code, said = process.wait(), log.read_text()
            ended = re.search(r"(\d+) passed", said)
            passed = int(ended[1]) if ended else 0
            found = [int(number) for pair in SUMMARY.findall(said) for number in pair if number]
            clean = code == 0 and passed and found and not any(found)
            bad += not clean
            findings = f"{sum(found)} findings" if found else "no summary"
            sys.stdout.write(f"{tool}: {passed} of {len(shard)} tests passed, {findings}, exit {code}\n")
            if not clean:
                sys.stdout.write(said[-4000:] + "\n")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="lora_kernels.bench.sanitize", description=__doc__)
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "synccheck", "initcheck"))
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--limit-s", type=float, default=600, help="of each process")
    parser.add_argument("files", nargs="*", type=Path, default=sorted(TESTS.glob("test_*.py")))
    chosen = parser.parse_args()
    tests = small_tests([file.resolve() for file in chosen.files], chosen.only)
    bad = run_shards(chosen.tool, tests, processes=chosen.processes, limit_s=chosen.limit_s)
    sys.stdout.write(f"{chosen.tool}: {len(tests)} tests, {'clean' if not bad else f'{bad} processes were not clean'}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
