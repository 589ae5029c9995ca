"""`tenantry tenant`: limits as options, and keys by subcommand."""

from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from services.cli import access, keys, tenants
from services.cli.client import Client
from shared.contracts.admin import KeyView, QuotaFigure, TenantView
from shared.contracts.tenancy import TenantLimits
from shared.errors import ConfigInvalid

VIEW = TenantView(
    tenant_id="tn_a",
    name="sales",
    vram_quota_bytes=0,
    vram_held_bytes=0,
    upgrade_headroom_bytes=0,
    adapters=0,
    base_allowed=True,
    limits=TenantLimits(max_concurrent=4),
    figures=(
        QuotaFigure(resource="concurrent", pool_id="main", asked=3, held=5, allowed=4),
        QuotaFigure(resource="kv_bytes", pool_id="main", held=1 << 20),
    ),
    over_quota=("concurrent",),
    notes=("a thing could not be checked",),
)
KEY = KeyView(
    key_id="key_a", label="ci", tenants=("sales",), gateway=False, revoked=False, created_at="", secret="tk_new", prefix="tk_new",
    scopes=("infer", "adapters"), expires_at="2026-11-30T20:00:00.000000Z",
)  # fmt: skip


class Plane:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/admin/v1")
        self.seen.append((request.method, path, msgspec.json.decode(request.content) if request.content else None))
        if "keys" not in path:
            return httpx.Response(200, content=msgspec.json.encode(VIEW))
        return httpx.Response(200, content=msgspec.json.encode([KEY] if request.method == "GET" else KEY))


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Plane:
    found = Plane()
    monkeypatch.setattr(access, "client", lambda _url, _data: Client("http://here", "k", transport=httpx.MockTransport(found)))
    return found


def run(*words: str) -> str:
    result = CliRunner().invoke(tenants.app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", ["update", "set"])
def test_limits_are_options_in_mb_or_none(plane: Plane, command: str) -> None:
    words = ("--kv-quota-mb", "3", "--max-concurrent", "none", "--burst", "--queue-deadline-s", "1.5")
    said = run(command, "sales", *words)
    limits = {"kv_quota_bytes": 3 << 20, "max_concurrent": None, "burst": True, "queue_deadline_s": 1.5}
    assert plane.seen == [("PATCH", "/tenants/sales", {"limits": limits})]
    assert "over quota: concurrent" in said
    assert "a thing could not be checked" in said


def test_a_tenant_is_added_with_limits(plane: Plane) -> None:
    run("add", "sales", "--weight", "3", "--no-burst")
    assert plane.seen[0][2]["limits"] == {"weight": 3, "burst": False}


@pytest.mark.parametrize("value", ["-1", "many", "1e9", "9" * 40, ""])
def test_a_wrong_limit_is_refused_by_its_name_before_anything_is_asked(plane: Plane, value: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"max.concurrent"):
        run("update", "sales", f"--max-concurrent={value}")
    assert plane.seen == []


def test_show_says_what_is_asked_held_and_allowed(plane: Plane) -> None:
    said = run("show", "sales")
    row = next(line for line in said.splitlines() if line.startswith("concurrent"))
    assert row.split() == ["concurrent", "main", "3", "5", "4", "OVER"]
    assert "not limited" in said
    assert plane.seen == [("GET", "/tenants/sales", None)]


def test_a_tenants_name_after_key_makes_one_as_before(plane: Plane) -> None:
    run("key", "sales", "--label", "ci", "--scope", "adapters")
    run("key", "add", "sales")
    run("key", "sales", "--list")
    run("key", "sales", "--revoke", "key_a")
    made = {"tenants": ["sales"], "gateway": False, "label": "", "scopes": ["infer"]}
    assert plane.seen == [
        ("POST", "/keys", made | {"label": "ci", "scopes": ["adapters"]}),
        ("POST", "/keys", made),
        ("GET", "/keys", None),
        ("DELETE", "/keys/key_a", None),
    ]


def test_keys_are_listed_by_what_they_begin_with_and_until_when_they_work(plane: Plane) -> None:
    said = run("key", "list", "sales")
    assert "tk_new" in said
    assert "until 2026" in said


@pytest.mark.parametrize(("overlap", "overlap_s"), [("1h", 3600.0), ("90s", 90.0), ("15m", 900.0), ("7d", 604_800.0), ("0", 0.0)])
def test_a_key_is_rotated_with_an_overlap(plane: Plane, overlap: str, overlap_s: float) -> None:
    assert "tk_new" in run("key", "rotate", "key_a", "--overlap", overlap)
    assert plane.seen == [("POST", "/keys/key_a/rotate", {"overlap_s": overlap_s})]


def test_a_team_with_a_key_of_its_own_asks_below_its_tenant(plane: Plane) -> None:
    run("key", "list", "sales", "--own")
    run("key", "rotate", "key_a", "--tenant", "sales")
    run("key", "revoke", "key_a", "--tenant", "sales")
    assert [(method, path) for method, path, _ in plane.seen] == [
        ("GET", "/tenants/sales/keys"),
        ("POST", "/tenants/sales/keys/key_a/rotate"),
        ("DELETE", "/tenants/sales/keys/key_a"),
    ]


@pytest.mark.parametrize("overlap", ["soon", "-1h", "1y", "h", ""])
def test_what_is_no_span_of_time_is_refused(overlap: str) -> None:
    with pytest.raises(ConfigInvalid):
        keys.seconds(overlap)
