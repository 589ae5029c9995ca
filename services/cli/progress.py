"""Progress of uploads and loads: bars where a person watches, nothing else."""

import contextlib
from collections.abc import Generator

from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from services.cli.apply import Change, Listener
from services.cli.client import Progress as OnProgress
from services.cli.manifest import AdapterEntry
from services.cli.output import console


def _bars() -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[phase]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextlib.contextmanager
def upload_progress(title: str, *, shown: bool) -> Generator[OnProgress | None]:
    """A bar for the bytes that are sent; then it says that the adapter is being checked and loaded."""
    if not shown or not console.is_terminal:
        yield None
        return
    with _bars() as bars:
        task = bars.add_task(title, total=None, phase="sending")

        def progress(sent_bytes: int, size_bytes: int) -> None:
            bars.update(task, completed=sent_bytes, total=size_bytes, phase=_phase(sent_bytes, size_bytes))

        yield progress


class ApplyProgress(Listener):
    """One bar per adapter of the file. Use as a context."""

    def __init__(self) -> None:
        self._bars = _bars()
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> "ApplyProgress":
        if console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._bars.stop()

    def started(self, entry: AdapterEntry, size_bytes: int) -> None:
        self._bars.update(self._task(entry), total=size_bytes or None, phase="loading")

    def sent(self, entry: AdapterEntry, sent_bytes: int, size_bytes: int) -> None:
        self._bars.update(self._task(entry), completed=sent_bytes, total=size_bytes, phase=_phase(sent_bytes, size_bytes))

    def ended(self, entry: AdapterEntry, change: Change) -> None:
        task = self._tasks.get((entry.tenant, entry.name))
        if task is None:  # nothing had to be done
            return
        total = self._bars.tasks[task].total or 1
        self._bars.update(task, completed=total, total=total, phase=change.kind)
        self._bars.stop_task(task)

    def _task(self, entry: AdapterEntry) -> TaskID:
        key = (entry.tenant, entry.name)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"{entry.tenant}/{entry.name}", total=None, phase="")
        return self._tasks[key]


def _phase(sent_bytes: int, size_bytes: int) -> str:
    return "sending" if sent_bytes < size_bytes else "checking and loading"
