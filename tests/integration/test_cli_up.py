"""`tenantry up` as real processes, with the scripted engine: what starts, what is refused, what is kept, and that nothing is left."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.cli import output
from services.cli.__main__ import main
from services.cli.archive import pack
from services.cli.up_options import DEMO, ROOT

READY_S = 60.0
READY = "Ready. Ctrl-C drains"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Up:
    """One `tenantry up` in a process of its own, its output in a file."""

    def __init__(self, folder: Path, port: int, *more: str) -> None:
        self.data = folder / "data"
        self.port = port
        self.out = folder / "out.txt"
        command = [sys.executable, "-m", "services.cli", "up", "--engine", "scripted", "--data", str(self.data), "--port", str(port), *more]
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)

    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = READY_S) -> None:
        wait(lambda: text in self.text() or self.process.poll() is not None, timeout_s, text)
        assert text in self.text(), self.text()[-3000:]

    def pids(self) -> list[int]:
        """Of everything that belongs to it."""
        return [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]

    def child(self, module: str) -> psutil.Process:
        return next(child for child in psutil.Process(self.process.pid).children() if module in child.cmdline())

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def wait(condition: Any, timeout_s: float, what: str) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"did not come true in {timeout_s} s: {what}"
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def tenantry(up: Up, *arguments: str, expected: int = 0) -> str:
    """The command in this process (a start of Python each time costs seconds): what it said on stdout, or on stderr if it must fail."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["tenantry", *arguments, "--data", str(up.data)])
        patch.setattr(output.console, "_width", 100)
        for name in [name for name in os.environ if name.startswith("TENANTRY_")]:
            patch.delenv(name)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    assert code == expected, out.getvalue() + err.getvalue()
    return out.getvalue() if expected == 0 else err.getvalue()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """The demo, running; tests that break something make their own."""
    running = Up(tmp_path_factory.mktemp("up"), free_port())
    try:
        running.wait_for(READY)
        yield running
    finally:
        running.stop()


def test_three_teams_adapters_serve_and_each_printed_curl_line_works(up: Up) -> None:
    lines = [line for line in up.text().splitlines() if line.startswith("curl ")]
    assert len(lines) == 4  # one per team, one for a gateway
    for line in lines:
        answer = json.loads(subprocess.run(["bash", "-c", line], capture_output=True, check=True, timeout=30).stdout)
        assert answer["choices"][0]["message"]["content"]


def test_the_printed_python_lines_work_with_the_openai_client(up: Up) -> None:
    lines = up.text().splitlines()
    start = lines.index("from openai import OpenAI")
    program = "\n".join([lines[start], *[line for line in lines[start:] if line.startswith("print(OpenAI(")]])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert len([line for line in done.stdout.splitlines() if line.strip()]) == 3


def test_ask_streams_the_answer_and_says_what_served_it(up: Up) -> None:
    said = tenantry(up, "ask", "sales", "What about refund?")
    assert "lora_sales@1" in said
    assert json.loads(tenantry(up, "ask", "sales", "What about refund?", "--json"))["served_by"]["x-tenantry-adapter"] == "lora_sales@1"


def test_the_installed_command_does_the_same(up: Up) -> None:
    program = Path(sys.executable).parent / "tenantry"
    done = subprocess.run(
        [program, "ask", "cs", "What about refund?", "--data", up.data], capture_output=True, text=True, timeout=60, check=True
    )
    assert "lora_cs@1" in done.stdout


def test_asking_for_another_team_s_adapter_is_one_clear_line(up: Up) -> None:
    said = tenantry(up, "ask", "sales", "?", "--adapter", "lora_cs", expected=1)
    assert said.startswith("tenantry: ")
    assert len(said.strip().splitlines()) == 1


def test_every_listing_has_a_table_and_json(up: Up) -> None:
    assert {view["name"] for view in json.loads(tenantry(up, "adapter", "list", "--json"))} >= {"lora_sales", "lora_cs", "lora_finance"}
    assert "lora_sales@1" in tenantry(up, "adapter", "list")
    assert json.loads(tenantry(up, "adapter", "show", "lora_sales", "--json"))["state"] == "ready"
    assert "sha256:" in tenantry(up, "adapter", "show", "lora_sales")
    assert {view["name"] for view in json.loads(tenantry(up, "tenant", "list", "--json"))} >= {"sales", "cs", "finance"}
    assert "1200 MB" in tenantry(up, "tenant", "list")
    assert json.loads(tenantry(up, "top", "--json"))["pools"]
    assert "lora_finance@1" in tenantry(up, "top", "--once")
    assert json.loads(tenantry(up, "matrix", "show", "--json"))["matrix"]["labels"]
    assert "tenantry/qwen3-moe-demo@v1" in tenantry(up, "matrix", "show")
    assert json.loads(tenantry(up, "adapter", "events", "--json"))
    assert "ready" in tenantry(up, "adapter", "events")
    assert json.loads(tenantry(up, "tenant", "key", "sales", "--list", "--json"))


def test_applying_the_same_file_again_changes_nothing(up: Up) -> None:
    said = tenantry(up, "apply", "-f", str(DEMO / "tenantry.yaml"))
    assert "nothing to change" in said
    outcome = json.loads(tenantry(up, "apply", "-f", str(DEMO / "tenantry.yaml"), "--json"))
    assert {change["kind"] for change in outcome["changes"]} == {"unchanged"}


def test_applying_a_file_with_one_artifact_missing_loads_the_others_and_says_what_was_tried(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "teams.yaml"
    file.write_text(
        "adapters:\n"
        "  - {name: nowhere, tenant: partly, vram_quota_mb: 10}\n"
        f"  - {{name: here, tenant: partly, vram_quota_mb: 10, path: {DEMO / 'adapters' / 'lora_cs'}}}\n"
    )
    said = tenantry(up, "apply", "-f", str(file), "--json", expected=1)
    assert "partly/nowhere" in said
    views = json.loads(tenantry(up, "adapter", "list", "--tenant", "partly", "--json"))
    assert [(view["name"], view["state"]) for view in views] == [("here", "ready")]
    with pytest.raises(AssertionError, match=r"(?s)adapters/nowhere.*earlier upload"):
        tenantry(up, "apply", "-f", str(file))
    tenantry(up, "adapter", "drain", "here")
    file.write_text("adapters:\n  - {name: here, tenant: partly, vram_quota_mb: 10}\n")
    assert "+ partly/here" in tenantry(up, "apply", "-f", str(file))  # without a folder: what was uploaded before
    tenantry(up, "adapter", "drain", "here")


def test_an_upgrade_without_room_is_refused_with_figures_and_drain_first_makes_room(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    entry = "adapters:\n  - {{name: tight, tenant: narrow, vram_quota_mb: 1, path: {}}}\n"
    file.write_text(entry.format(DEMO / "adapters" / "lora_cs"))
    tenantry(up, "apply", "-f", str(file))
    file.write_text(entry.format(DEMO / "adapters" / "lora_sales"))
    with pytest.raises(AssertionError, match=r"(?s)asks for.*holds.*allowed.*--drain-first") as refused:
        tenantry(up, "apply", "-f", str(file))
    assert "tight" in str(refused.value)
    assert json.loads(tenantry(up, "adapter", "show", "tight", "--json"))["version"] == 1
    assert "version 2" in tenantry(up, "apply", "-f", str(file), "--drain-first")
    tenantry(up, "adapter", "drain", "tight")


def test_an_adapter_for_another_revision_of_the_base_is_refused_with_the_reason(up: Up) -> None:
    said = tenantry(up, "adapter", "add", "sales", "lora_old", str(DEMO / "other" / "lora_sales_v0"), expected=1)
    assert "v0" in said
    assert len(said.strip().splitlines()) == 1


def test_a_tenant_is_added_gets_a_key_an_adapter_and_drains_it(up: Up) -> None:
    assert "legal" in tenantry(up, "tenant", "add", "legal", "--quota-mb", "100")
    assert json.loads(tenantry(up, "tenant", "key", "legal", "--save", "--json"))["secret"]
    view = json.loads(tenantry(up, "adapter", "add", "legal", "contracts", str(DEMO / "adapters" / "lora_cs"), "--json"))
    assert view["state"] == "ready"
    assert tenantry(up, "ask", "legal", "hello")
    assert "released" in tenantry(up, "adapter", "drain", "contracts")
    assert "contracts" not in tenantry(up, "adapter", "list")
    assert "contracts" in tenantry(up, "ask", "legal", "hello", "--adapter", "contracts", expected=1)
    assert tenantry(up, "tenant", "remove", "legal")


def test_a_tenants_limits_and_keys_from_the_command_line(up: Up) -> None:
    tenantry(up, "tenant", "add", "ltd", "--quota-mb", "100", "--requests-per-minute", "2", "--max-concurrent", "4")
    made = json.loads(tenantry(up, "tenant", "key", "ltd", "--save", "--scope", "infer", "--scope", "adapters", "--json"))
    assert made["scopes"] == ["infer", "adapters"]
    said = tenantry(up, "tenant", "key", "list", "ltd")
    assert made["secret"][:10] in said
    assert made["secret"] not in said
    headers = {"authorization": f"Bearer {made['secret']}"}
    url = f"http://127.0.0.1:{up.port}"
    while datetime.now(UTC).second > 45:
        time.sleep(0.5)  # the budget is of one minute
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "model": "qwen3-moe-demo"}
    answers = [httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "request_rate_exceeded"

    def figures() -> dict[str, tuple[int, int | None]]:
        view = json.loads(tenantry(up, "tenant", "show", "ltd", "--json"))
        return {figure["resource"]: (figure["held"], figure.get("allowed")) for figure in view["figures"]}

    # what a router asked for beyond the limit goes back a moment later
    wait(lambda: figures()["requests_per_minute"] == (2, 2), 5.0, "two of two requests are held")
    assert figures()["concurrent"][1] == 4
    assert "requests_per_minute" in tenantry(up, "tenant", "show", "ltd")
    assert "ltd" in tenantry(up, "tenant", "update", "ltd", "--requests-per-minute", "none")
    new = json.loads(tenantry(up, "tenant", "key", "rotate", made["key_id"], "--overlap", "0", "--json"))
    assert new["replaces"] == made["key_id"]

    def status(secret: str) -> int:
        return httpx.get(f"{url}/admin/v1/adapters/ltd", headers={"authorization": f"Bearer {secret}"}, trust_env=False).status_code

    wait(lambda: (status(new["secret"]), status(made["secret"])) == (200, 401), 5.0, "the old key is over and the new one works")
    assert tenantry(up, "tenant", "remove", "ltd")


def test_modes_other_than_draining_are_refused(up: Up) -> None:
    said = tenantry(up, "adapter", "unload", "lora_sales", "--mode", "force", expected=1)
    assert "draining" in said


def test_a_tenant_onboards_by_event_with_the_ten_line_example(up: Up, tmp_path: Path) -> None:
    tenant = json.loads(tenantry(up, "tenant", "add", "events", "--quota-mb", "100", "--nats-user", "--json"))
    nats_url = json.loads((up.data / "running.json").read_text())["nats_url"]
    environment = {
        "TENANTRY_NATS_URL": nats_url,
        "TENANTRY_NATS_USER": tenant["nats_user"],
        "TENANTRY_NATS_PASSWORD": tenant["nats_password"],
    }
    wait(lambda: may_log_in(nats_url, tenant["nats_user"], tenant["nats_password"]), 15, "the new user may log in")

    def onboard(folder: Path) -> subprocess.CompletedProcess[str]:
        pack(folder, tmp_path / "adapter.tar")
        command = [sys.executable, "examples/onboard.py", "by_event", str(tmp_path / "adapter.tar")]
        return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)

    served = onboard(DEMO / "adapters" / "lora_cs")
    assert served.returncode == 0, served.stderr
    assert "ready" in served.stdout
    refused = onboard(DEMO / "other" / "lora_sales_v0")
    assert refused.returncode == 1
    assert "rejected" in refused.stdout
    assert "v0" in refused.stdout
    tenantry(up, "adapter", "drain", "by_event")


def may_log_in(url: str, user: str, password: str) -> bool:
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 5) as connection, connection.makefile("rwb") as file:
        file.readline()
        connect = json.dumps({"user": user, "pass": password, "verbose": False, "lang": "test", "version": "1"})
        file.write(b"CONNECT " + connect.encode() + b"\r\nPING\r\n")
        file.flush()
        return file.readline().startswith(b"PONG")


def test_a_second_up_on_the_same_folder_is_refused(up: Up) -> None:
    second = Up(up.data.parent, free_port())
    assert second.process.wait(30) == 2
    assert f"is running on {up.data} already" in up.text()


def test_a_taken_port_is_one_line_that_says_who_has_it_and_what_to_do(up: Up, tmp_path: Path) -> None:
    other = Up(tmp_path, up.port)
    assert other.process.wait(30) == 2
    lines = other.text().strip().splitlines()
    assert len(lines) == 1
    assert f"port {up.port} is taken" in lines[0]
    assert "--port" in lines[0]


def test_no_secret_stands_on_a_command_line_or_in_a_file_that_others_can_read(up: Up) -> None:
    secrets = json.loads((up.data / "secrets.json").read_text())
    hidden = [secrets["admin_key"], secrets["cluster"], *secrets["nats"].values()]
    for pid in up.pids():
        words = " ".join(psutil.Process(pid).cmdline())
        assert not any(secret in words for secret in hidden)
    for file in (path for path in up.data.rglob("*") if path.is_file()):
        if any(secret in file.read_text(errors="replace") for secret in hidden):
            assert file.stat().st_mode & 0o077 == 0, file


def test_a_service_that_is_killed_is_started_again_and_it_is_said(tmp_path: Path) -> None:
    up = Up(tmp_path, free_port())
    try:
        up.wait_for(READY)
        for name in ("registry", "router", "worker"):
            child = up.child(f"services.{name}")
            child.kill()
            up.wait_for(f"{name} ended (killed by SIGKILL)", 30)
        wait(lambda: serves(up), 60, "all serve again")
        next(child for child in psutil.Process(up.process.pid).children() if "nats-server" in child.name()).kill()
        up.wait_for("nats ended", 30)
        wait(lambda: serves(up), 60, "all serve again")
    finally:
        assert up.stop() == 0


def serves(up: Up) -> bool:
    keys = json.loads((up.data / "keys.json").read_text())
    with contextlib.suppress(httpx.HTTPError):
        for tenant in ("sales", "cs", "finance"):
            answer = httpx.post(
                f"http://127.0.0.1:{up.port}/v1/chat/completions",
                headers={"authorization": f"Bearer {keys[tenant]['secret']}"},
                json={"messages": [{"role": "user", "content": "hello"}]},
                trust_env=False,
            )
            if answer.status_code != 200:
                return False
        return True
    return False


def test_ctrl_c_ends_everything_and_the_state_survives_to_the_next_start(tmp_path: Path) -> None:
    up = Up(tmp_path, free_port())
    up.wait_for(READY)
    pids = up.pids()
    assert len(pids) >= 5
    before = json.loads(tenantry(up, "adapter", "list", "--json"))
    keys = (up.data / "keys.json").read_text()
    assert up.stop(signal.SIGINT) == 0
    assert alive(pids) == []
    again = Up(tmp_path, up.port)
    try:
        wait(lambda: again.text().count(READY) == 2 or again.process.poll() is not None, READY_S, "ready again")
        after = json.loads(tenantry(again, "adapter", "list", "--json"))
        assert [(view["name"], view["version"], view["digest"]) for view in after] == [
            (view["name"], view["version"], view["digest"]) for view in before
        ]
        assert (up.data / "keys.json").read_text() == keys
        assert serves(again)
    finally:
        again.stop()


def test_a_kill_9_of_up_itself_leaves_nothing_running(tmp_path: Path) -> None:
    up = Up(tmp_path, free_port())
    up.wait_for(READY)
    pids = up.pids()
    assert len(pids) >= 5
    up.process.kill()
    up.process.wait(10)
    wait(lambda: alive(pids) == [], 10, "all gone")


def test_a_model_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    up = Up(tmp_path, free_port(), "--model", str(tmp_path / "nothing-here"))
    assert up.process.wait(30) == 2
    assert "nothing-here" in up.text()
    assert len(up.text().strip().splitlines()) == 1


def test_a_worker_that_cannot_start_ends_it_all_with_its_own_last_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    up = Up(tmp_path, free_port(), "--model", str(tmp_path / "empty"))
    assert up.process.wait(60) == 2
    last = up.text().strip().splitlines()[-1]
    assert "config.json" in last
    assert "worker.log" in last
    assert "Traceback" not in up.text()


def test_a_port_in_use_by_a_listener_of_ours_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        up = Up(tmp_path, holder.getsockname()[1])
        assert up.process.wait(30) == 2
    assert f"process {os.getpid()}" in up.text()
