"""What a figure is worth nothing without: when, on what, of which commit, by which command."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def context() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cores": os.cpu_count(),
            "cpu": _cpu_model(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.platform(terse=True),
            "load_1m": round(os.getloadavg()[0], 2),
        },
        "commit": _git("rev-parse", "HEAD") + ("+changes" if _changed() else ""),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else sys.argv[0]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _changed() -> bool:
    """Whether tracked files differ from the commit, results apart: a program of several parts writes its own as it goes."""
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"))


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
