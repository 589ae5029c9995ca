"""The GPU worker's image, read: made from what exists and is pinned, run by no root, healthy by what the worker writes."""

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from services.worker import health
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "deploy" / "worker-gpu.Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) with continued lines joined and comments left out."""
    text = "\n".join(line for line in PATH.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def environment() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for name, rest in instructions() if name == "ENV")))


def test_the_base_is_named_by_an_exact_cuda_release_that_can_be_replaced_by_a_digest() -> None:
    assert ("ARG", "CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04") in instructions()
    assert [rest.split()[0] for name, rest in instructions() if name == "FROM"] == ["${CUDA_IMAGE}"] * 2


def test_every_file_that_is_copied_is_there() -> None:
    copied = [rest.split()[0] for name, rest in instructions() if name == "COPY" and not rest.startswith("--from")]
    sources = [source for name, rest in instructions() if name == "COPY" and not rest.startswith("--from") for source in rest.split()[:-1]]
    assert copied
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_vllm_is_the_release_that_the_project_names_for_gpus() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = next(entry for entry in extras["worker-gpu"] if entry.startswith("vllm"))
    pins = [line for line in (ROOT / "constraints" / "gpu.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert wanted in pins
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+", pin)] == []


def test_what_the_services_need_has_the_version_that_the_tests_ran_with() -> None:
    base = set((ROOT / "constraints" / "base.txt").read_text().splitlines())
    named = {line.split("==")[0] for line in base if "==" in line}
    pins = [line for line in (ROOT / "constraints" / "gpu.txt").read_text().splitlines() if line.split("==")[0] in named]
    assert len(pins) > 10
    assert set(pins) <= base


def test_it_runs_as_nobody_in_particular() -> None:
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users
    assert int(users[-1]) > 0
    last_from = max(number for number, (name, _) in enumerate(instructions()) if name == "FROM")
    assert any(name == "USER" for name, _ in instructions()[last_from:])


def test_its_settings_are_ones_that_the_worker_has() -> None:
    fields = {field.name for field in msgspec.structs.fields(WorkerSettings)}
    prefix = "TENANTRY_WORKER_"
    given = {name.removeprefix(prefix).lower() for name in environment() if name.startswith(prefix)}
    assert {"dtype", "cache_dir", "health_file"} <= given <= fields


def test_its_healthcheck_looks_into_the_file_that_the_worker_writes() -> None:
    check = next(rest for name, rest in instructions() if name == "HEALTHCHECK")
    command = msgspec.json.decode(check[check.index("[") :], type=list[str])
    assert command == ["python", "-m", health.__name__, environment()["TENANTRY_WORKER_HEALTH_FILE"]]


@pytest.mark.parametrize(
    ("state", "age_s", "said"),
    [
        ("ready", 0.0, ""),
        ("ready", 9.0, ""),
        ("ready", 11.0, "the worker said `ready` 11 s ago and nothing since"),
        ("starting", 0.0, "the worker is `starting`"),
        ("unhealthy", 0.0, "the worker is `unhealthy`"),
        ("stopping", 0.0, "the worker is `stopping`"),
    ],
)
def test_only_a_worker_that_has_just_said_that_it_is_ready_is_healthy(tmp_path: Path, state: str, age_s: float, said: str) -> None:
    path = tmp_path / "state"
    health.write(path, state)
    os.utime(path, (1000.0, 1000.0))
    assert health.trouble(path, 1000.0 + age_s) == said
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_that_has_said_nothing_yet_is_not_healthy(tmp_path: Path) -> None:
    assert health.trouble(tmp_path / "state", time.monotonic()) == "the worker has not said anything yet"


def test_the_healthchecks_exit_code_says_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    codes: list[int] = []
    for state in ("ready", "unhealthy"):
        health.write(path, state)
        codes.append(subprocess.run([sys.executable, "-m", "services.worker.health", str(path)], cwd=ROOT, check=False).returncode)
    assert codes == [0, 1]
