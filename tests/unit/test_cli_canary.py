"""`tenantry canary`: what goes over the wire, and the table."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from services.cli import access, canary
from services.cli.client import Client, ClientError
from shared.contracts.adapters import CanaryBy, CanaryStop
from shared.contracts.admin import CanaryView, TrialFigures
from shared.errors import ConfigInvalid
from tests.unit.test_cli_plan import adapter

VIEW = CanaryView(
    tenant="sales", name="tone", pool_id="main", stable_version=1, version=2, state="ready", share_ppm=100_000, by=CanaryBy.SESSION,
    stop=CanaryStop(), started_at="2026-11-30T20:00:00.000000Z",
    stable=TrialFigures(requests=180, p50_ms=20.0, p95_ms=40.0), trial=TrialFigures(requests=20, errors=2, p50_ms=19.0, p95_ms=38.0),
)  # fmt: skip


class Plane:
    def __init__(self, *views: CanaryView) -> None:
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.views = views or (VIEW,)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/admin/v1")
        is_json = request.headers.get("content-type") == "application/json"
        body = msgspec.json.decode(request.content) if is_json else request.read()[:5]
        self.seen.append((request.method, path, dict(request.url.params), body))
        if request.method == "GET" and path.count("/") < 3:
            return httpx.Response(200, content=msgspec.json.encode(self.views))
        starts = request.method == "POST" and path.count("/") == 3
        return httpx.Response(200, content=msgspec.json.encode(adapter("tone", version=2, on_trial=True) if starts else self.views[0]))


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Plane:
    return given(monkeypatch, Plane())


def given(monkeypatch: pytest.MonkeyPatch, found: Plane) -> Plane:
    monkeypatch.setattr(access, "client", lambda _url, _data: Client("http://here", "k", transport=httpx.MockTransport(found)))
    return found


def run(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(canary.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_start_sends_the_folder_with_its_terms(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    run("start", "sales", "tone", str(tmp_path), "--share", "10%", "--by", "session", "--error-margin", "2%", "--min-requests", "50")
    method, path, params, body = plane.seen[0]
    assert (method, path) == ("POST", "/canaries/sales/tone")
    assert params["share_ppm"] == "100000"
    assert (params["by"], params["min_requests"], params["error_rate_margin"]) == ("session", "50", "0.02")
    assert body, "the archive"


def test_start_without_a_folder_names_a_stored_version(plane: Plane) -> None:
    run("start", "sales", "tone", "--version", "2", "--share", "0.5")
    method, path, params, body = plane.seen[0]
    assert (method, path, body) == ("POST", "/canaries/sales/tone", b"")
    assert (params["version"], params["share_ppm"], params["by"]) == ("2", "500000", "request")


def test_status_shows_both_versions(plane: Plane) -> None:
    said = run("status")
    stable, trial = (next(line for line in said.splitlines() if mark in line) for mark in ("tone@1", "tone@2"))
    assert [word in stable for word in ("sales", "stable", "90%", "180", "40 ms")] == [True] * 5
    assert [word in trial for word in ("ready", "10% by session", "2 (10.0%)", "38 ms")] == [True] * 4
    assert "refused" not in said
    assert "from 20 requests on" in run("status", "tone")


def test_status_says_why_a_trial_was_stopped_and_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TrialFigures(requests=20, refused=7)
    given(monkeypatch, Plane(msgspec.structs.replace(VIEW, stopped="2 of 20 requests failed", trial=refused)))
    said = run("status")
    assert "refused" in said.splitlines()[0]
    assert " 7 " in said
    assert "stopped" in said
    assert "2 of 20 requests failed" in said
    assert "no version of other is on trial" in run("status", "other")


def test_set_changes_only_what_is_named(plane: Plane) -> None:
    run("set", "tone", "--share", "20%", "--window", "30")
    assert plane.seen[-1][:2] == ("PATCH", "/canaries/sales/tone")
    assert plane.seen[-1][3] == {"share_ppm": 200_000, "by": None, "stop": {"window_s": 30.0}, "resume": False}
    run("set", "tone", "--tenant", "sales", "--resume")
    assert plane.seen[-1][3] == {"share_ppm": None, "by": None, "stop": {}, "resume": True}


def test_promote_and_rollback_say_which_version_serves_and_which_drains(plane: Plane) -> None:
    assert "sales/tone: version 2 serves now; version 1 drains" in run("promote", "tone", "--version", "2", "--deadline", "9")
    assert plane.seen[-1][3] == {"version": 2, "deadline_s": 9.0, "on_deadline": "wait"}
    assert "sales/tone: version 2 drains; version 1 serves on" in run("rollback", "tone")
    assert plane.seen[-1][1] == "/canaries/sales/tone/rollback"


@pytest.mark.parametrize("share", ["110%", "-1", "2", "half", "nan", "%"])
def test_a_share_that_is_none_is_refused_before_anything_is_sent(plane: Plane, share: str) -> None:
    with pytest.raises(ConfigInvalid, match="--share"):
        run("set", "tone", "--share", share)
    assert plane.seen == []


def test_a_name_that_several_tenants_try_needs_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, Plane(VIEW, msgspec.structs.replace(VIEW, tenant="cs")))
    with pytest.raises(ClientError, match="cs, sales"):
        run("promote", "tone")
    with pytest.raises(ClientError, match="no version of other"):
        run("promote", "other")
