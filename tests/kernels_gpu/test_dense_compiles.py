"""The interpreter runs code that no compiler takes: the dense layers' kernels are compiled for an H200, GPU or not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPILLED_BYTES = 32
"""Of a thread, which cost nothing that can be measured."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    script = Path(__file__).with_name("compile_dense_for_h200.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_default_tiles_neither_spill_registers_nor_exceed_shared_memory_at_any_rank(compiled: list[dict]) -> None:
    assert {line["rank"] for line in compiled} == {8, 32, 128, 256}
    assert [line for line in compiled if line["stack_bytes"] > SPILLED_BYTES or line["shared_bytes"] > 227 * 1024] == []


def test_nothing_is_read_or_written_two_bytes_at_a_time(compiled: list[dict]) -> None:
    assert [line for line in compiled if line["two_byte_accesses"]] == []


def test_long_batches_run_on_warpgroups_with_their_inputs_copied_ahead(compiled: list[dict]) -> None:
    long = [line for line in compiled if line["tokens"] == 4096]
    assert long
    assert all(line["warpgroup_products"] and line["async_copies"] for line in long)
