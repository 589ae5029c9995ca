"""What `tenantry up` asks of the machine before it starts anything: each refusal is one line with figures and what to do."""

from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from services.cli import checks
from shared.errors import StartFailed


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Memory(NamedTuple):
    available: int


def test_too_little_disk_is_told_in_figures_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: Usage(10**9, 9 * 10**8, 10**8))
    with pytest.raises(StartFailed, match=r"100 MB are free .*--data") as refused:
        checks.check_disk(tmp_path)
    assert "\n" not in refused.value.message
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: Usage(10**10, 0, 10**10))
    checks.check_disk(tmp_path)


def test_too_little_memory_for_the_engine_and_the_model_is_told_in_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(3 * 10**9))
    with pytest.raises(StartFailed, match=r"3\.0 GB of memory are available and about 4\.5 GB are needed") as refused:
        checks.check_memory("vllm", tmp_path)
    assert "\n" not in refused.value.message
    checks.check_memory("scripted", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(5 * 10**9))
    checks.check_memory("vllm", tmp_path)
