"""The result file, whole after every row: {"rows": [...], "kept": [...], ...}; a later run of another model is put beside it."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving import figures

_COLUMNS = ("ttft_ms", "itl_ms", "otps", "otps_all", "prefill_gpu_ms")


class Results:
    def __init__(self, path: Path, context: dict[str, Any]) -> None:
        self._path = path
        self._rows: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._systems: dict[str, dict[str, Any]] = {}
        self._kernels: list[dict[str, Any]] = []
        self._context = context

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def row(self, model: str, system: str, batch: int, found: dict[str, Any]) -> None:
        """Adds to the row; the file is written."""
        key = (model, system, batch)
        self._rows.setdefault(key, {"model": model, "system": system, "batch": batch}).update(found)
        self._write()

    def about(self, system: str, found: dict[str, Any]) -> None:
        self._systems.setdefault(system, {}).update(found)
        self._write()

    def kernels(self, model: str, system: str, batch: int, found: dict[str, Any]) -> None:
        """Kept in a file of their own: they are for whoever looks for what is slow."""
        lists = {key: value for key, value in found.items() if isinstance(value, list)}
        self._kernels.append({"model": model, "system": system, "batch": batch, **lists})
        self._path.with_name(f"{self._path.stem}-kernels.json").write_text(json.dumps(self._kernels) + "\n")

    def show(self, console: Console) -> None:
        table = Table(title=f"{self._context['card']} · {self._context['date']}")
        for column in ("model", "system", "batch", *_COLUMNS, "decode kept", "prefill kept"):
            table.add_column(column, justify="left" if column in ("model", "system") else "right")
        shares = {(share["model"], share["system"], share["batch"]): share for share in figures.kept(self.rows)}
        for key, row in self._rows.items():
            share = shares.get(key, {})
            values = (f"{row[name]:,.2f}" if name in row else "-" for name in _COLUMNS)
            kept = (f"{share[name]:.1%}" if name in share else "" for name in ("decode_kept", "prefill_kept"))
            table.add_row(*map(str, key), *values, *kept)
        console.print(table)

    def _write(self) -> None:
        """Rows of other models stay as they were."""
        known: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        models = {row["model"] for row in self._rows.values()}
        others = [row for row in known.get("rows", []) if row["model"] not in models]
        rows = others + self.rows
        runs = {**known.get("runs", {}), **{model: {"systems": self._systems, **self._context} for model in models}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"rows": rows, "kept": figures.kept(rows), "runs": runs}, indent=1) + "\n")
