"""The interpreter runs code that no compiler takes: every list and prefill kernel is compiled for an H200, GPU or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOPS = ("shrink_kernel", "expand_activate_kernel", "add_down_kernel", "sum_experts_kernel")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    script = Path(__file__).with_name("compile_for_h200.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_both_models(compiled: list[dict[str, object]]) -> None:
    kernels = {(line["kernel"], line["model"]) for line in compiled}
    names = {"sort_chunks_kernel", "scan_kernel", "scatter_kernel", "shrink_kernel", "expand_activate_kernel", "add_down_kernel"}
    names |= {"sum_choices_kernel", "schedule_kernel", "expand_sum_kernel"}
    assert ("sum_experts_kernel", "gptoss-20b") in kernels
    assert {(name, model) for name in names for model in ("gptoss-20b", "qwen3-30b-a3b")} <= kernels


def test_no_kernel_spills_registers(compiled: list[dict[str, object]]) -> None:
    assert [line for line in compiled if line["stack_bytes"]] == []


def test_no_kernel_loads_two_bytes_at_a_time(compiled: list[dict[str, object]]) -> None:
    assert [line for line in compiled if line["two_byte_loads"]] == []


def test_products_run_on_warpgroups_and_their_inputs_are_copied_ahead(compiled: list[dict[str, object]]) -> None:
    products = [line for line in compiled if line["kernel"] in LOOPS]
    assert all(line["warpgroup_products"] and line["async_copies"] for line in products)
