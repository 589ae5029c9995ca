"""`tenantry audit`: times, pages, and the table."""

from datetime import datetime
from typing import Any

import httpx
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from services.cli import access
from services.cli.audit import audit
from services.cli.client import Client
from shared.contracts.audit import AuditLine, AuditPage, AuditRecord, Phase
from shared.errors import ConfigInvalid

app = typer.Typer()
app.command()(audit)


def line(number: int, **changes: Any) -> AuditLine:
    fields: dict[str, Any] = {"id": f"a{number}", "action": "create_tenant", "phase": Phase.DONE, "who": "operator", "address": "10.0.0.7"}
    return AuditLine(at=f"2026-11-30T12:00:{number:02}.000Z", record=AuditRecord(**(fields | changes)))


class Plane:
    """Answers with pages of at most two lines."""

    def __init__(self, *lines: AuditLine) -> None:
        self.lines = lines
        self.seen: list[tuple[str, dict[str, str]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        asked = dict(request.url.params)
        self.seen.append((request.url.path.removeprefix("/admin/v1"), asked))
        start, count = int(asked.get("after", 0)), min(2, int(asked["limit"]))
        found = self.lines[start : start + count]
        page = AuditPage(lines=found, next=start + count if start + count < len(self.lines) else 0)
        return httpx.Response(200, content=msgspec.json.encode(page))


def given(monkeypatch: pytest.MonkeyPatch, *lines: AuditLine) -> Plane:
    plane = Plane(*lines)
    monkeypatch.setattr(access, "client", lambda _url, _data: Client("http://here", "k", transport=httpx.MockTransport(plane)))
    return plane


def run(*words: str) -> str:
    result = CliRunner(env={"COLUMNS": "220"}).invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_pages_are_read_until_the_limit_and_what_is_left_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, *(line(number) for number in range(5)))
    assert run().count("create_tenant") == 5
    said = run("--limit", "3")
    assert said.count("create_tenant") == 3
    assert "--since 2026-11-30T12:00:02.000Z" in said
    assert "there is more" not in run("--limit", "5")


def test_the_table_says_who_what_and_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given(
        monkeypatch,
        line(1, action="create_key", tenant="sales", what={"tenants": ["sales"], "label": "ci"}, result={"prefix": "tk_abc"}),
        line(2, action="promote_canary", who="key tk_abc", tenant="sales", what={"name": "tone"}, phase=Phase.REFUSED, error="not_found"),
        line(3, action="canary.stopped", who="registry", phase=Phase.HAPPENED, what={"name": "tone", "version": 2}, note="it failed"),
        line(4, action="delete_tenant", phase=Phase.ASKED, what={"name": "cs"}),
    )
    rows = run().splitlines()[1:]
    assert [word in rows[0] for word in ("2026-11-30 12:00:01", "operator", "10.0.0.7", "label=ci", "prefix=tk_abc", "done")] == [True] * 6
    assert [word in rows[1] for word in ("key tk_abc", "promote_canary", "tone", "refused (not_found)")] == [True] * 4
    assert [word in rows[2] for word in ("registry", "tone@2: it failed")] == [True] * 2
    assert "asked" in rows[3]
    assert "nothing was done" in _empty(monkeypatch)


def _empty(monkeypatch: pytest.MonkeyPatch) -> str:
    given(monkeypatch)
    return run()


@pytest.mark.parametrize("since", ["90m", "24h", "7d", "30s", "2026-11-30T12:00:00Z", "2026-11-30", "2026-11-30T12:00:00+02:00"])
def test_a_time_or_how_long_ago(monkeypatch: pytest.MonkeyPatch, since: str) -> None:
    plane = given(monkeypatch)
    run("--since", since, "--tenant", "sales", "--action", "adapter.*")
    (path, asked) = plane.seen[0]
    assert (path, asked["tenant"], asked["action"]) == ("/audit", "sales", "adapter.*")
    assert datetime.fromisoformat(asked["since"]).tzinfo is not None


@pytest.mark.parametrize("since", ["yesterday", "7w", "-1h", "99999999999999999999d"])
def test_what_is_no_time_is_refused_before_anything_is_asked(monkeypatch: pytest.MonkeyPatch, since: str) -> None:
    plane = given(monkeypatch)
    with pytest.raises(ConfigInvalid, match="--since"):
        run("--since", since)
    assert plane.seen == []


def test_a_team_asks_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = given(monkeypatch)
    run("--own", "--tenant", "sales")
    assert plane.seen[0][0] == "/audit/sales"
    assert "tenant" not in plane.seen[0][1]
    with pytest.raises(ConfigInvalid, match="--own needs --tenant"):
        run("--own")
