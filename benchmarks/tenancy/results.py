"""benchmarks/results/tenancy.json: figures of several programs in one file, each with how it was measured."""

import json
from pathlib import Path
from typing import Any

from benchmarks import machine

PATH = machine.RESULTS / "tenancy.json"


def merge(figures: dict[str, Any], how: dict[str, str], path: Path = PATH) -> dict[str, Any]:
    """Puts the figures (top-level keys) and how each was measured into the file, beside what others have put there; the whole."""
    whole: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    context = machine.context()
    measured = whole.get("measured", {})
    for name, text in how.items():
        measured[name] = {"how": text, **context}
    whole |= figures
    whole["measured"] = measured
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole
