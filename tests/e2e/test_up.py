"""What a newcomer does: `tenantry up` with the real engine, then the printed lines; the sales team's answer is the sales adapter's."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.stack import ROOT, free_port, goldens, wait_for


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """All that a fresh `tenantry up` says until it is ready; stopped by Ctrl-C's signal afterwards."""
    folder = tmp_path_factory.mktemp("up")
    out = folder / "out.txt"
    command = [sys.executable, "-m", "services.cli", "up", "--data", str(folder / "data"), "--port", str(free_port())]
    with out.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT)
    try:
        wait_for(lambda: "Ctrl-C drains" in out.read_text() or process.poll() is not None, 180, "a ready Tenantry")
        assert process.poll() is None, out.read_text()
        everything = psutil.Process(process.pid).children(recursive=True)
        yield out.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 0
    assert [child for child in everything if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.timeout(300)
def test_each_printed_curl_line_gets_its_teams_own_answer(printed: str, tmp_path: Path) -> None:
    lines = [line for line in printed.splitlines() if line.startswith("curl ")]
    known = {(name, pair["question"]): pair["answer"] for name, pairs in goldens().items() for pair in pairs}
    served: list[str] = []
    for line in lines:
        head = tmp_path / "head"
        done = subprocess.run(["bash", "-c", f"{line} -D {head}"], capture_output=True, check=True, timeout=60)
        answer = json.loads(done.stdout)
        question = json.loads(line.split("-d '")[1].rsplit("'", 1)[0])["messages"][0]["content"]
        alias = answer["model"].split("@")[0]
        assert answer["choices"][0]["message"]["content"] == known[alias, question]
        assert f"x-tenantry-adapter: {answer['model']}" in head.read_text().lower()
        served.append(alias)
    assert {"lora_sales", "lora_cs", "lora_finance"} <= set(served)


def test_the_table_shows_every_team_ready(printed: str) -> None:
    for tenant, adapter in (("sales", "lora_sales@1"), ("cs", "lora_cs@1"), ("finance", "lora_finance@1")):
        row = next(line for line in printed.splitlines() if adapter in line)
        assert tenant in row.split()
        assert "ready" in row.split()
