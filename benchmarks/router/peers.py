"""The peers' own virtual environment, made when it is missing: their pins contradict ours."""

import subprocess
import sys
from pathlib import Path

from benchmarks.machine import ROOT

_VENV = ROOT / "benchmarks" / ".venv"
_PINS = Path(__file__).with_name("peers.txt")
_DONE = _VENV / "installed.txt"


def binary(name: str) -> str:
    return str(_VENV / "bin" / name)


def install() -> None:
    """Exactly the pins of peers.txt. Nothing is done when they are there."""
    pins = _PINS.read_text()
    if _DONE.exists() and _DONE.read_text() == pins:
        return
    print(f"installing the peers into {_VENV} (once) ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(_VENV)], check=True)
    subprocess.run([binary("python"), "-m", "pip", "install", "-q", "--no-deps", "-r", str(_PINS)], check=True)
    _DONE.write_text(pins)


def versions() -> dict[str, str]:
    wanted = {"litellm", "vllm-router"}
    pairs = (line.split("==") for line in _PINS.read_text().splitlines() if "==" in line)
    return {name: version for name, version in pairs if name in wanted}
