"""The admin plane: its credential, each operation as the registry hears it, uploads whole or not at all."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from shared.bus import Message, Objects, open_objects
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin
from shared.contracts.adapters import STAGING_BUCKET, CanaryBy, CanaryStop, CanaryTerms, OnDeadline
from shared.contracts.audit import ListAudit
from shared.contracts.errors import ErrorInfo
from shared.policy.limits import BOUNDS
from tests.router_fakes import ADMIN_KEY, SALES_KEY, Cluster, cluster, until

AUTH = {"authorization": f"Bearer {ADMIN_KEY}"}


class Office:
    """Answers ADMIN_SUBJECT as a registry would, and remembers."""

    def __init__(self, cluster: Cluster, staging: Objects) -> None:
        self.cluster = cluster
        self.staging = staging
        self.heard: list[admin.AdminRequest] = []
        self.asked_by: list[tuple[str, str]] = []  # (who, address)
        self.staged: list[bytes] = []
        self.reply = admin.Reply(result={"ok": True})

    async def hear(self, message: Message) -> None:
        asked = admin.decode_asked(message.data)
        self.heard.append(asked.request)
        self.asked_by.append((asked.who, asked.address))
        await self.cluster.registry.bus.publish(message.reply, admin.encode(self.reply))


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server, upload_limit_bytes=1_000_000) as found:
        found.client.headers.update(AUTH)
        yield found


@pytest.fixture
async def office(running: Cluster) -> Office:
    bus = running.registry.bus
    found = Office(running, await open_objects(bus, STAGING_BUCKET, create=True))
    await bus.subscribe(admin.ADMIN_SUBJECT, found.hear)
    await bus.flush()
    return found


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path", "body", "heard"),
    [
        ("GET", "/tenants", None, admin.ListTenants()),
        ("POST", "/tenants", {"name": "hr", "vram_quota_bytes": 5}, admin.CreateTenant(name="hr", vram_quota_bytes=5)),
        ("PATCH", "/tenants/hr", {"base_allowed": False}, admin.UpdateTenant(name="hr", base_allowed=False)),
        ("DELETE", "/tenants/hr", None, admin.DeleteTenant(name="hr")),
        ("GET", "/keys?tenant=hr", None, admin.ListKeys(tenant="hr")),
        ("POST", "/keys", {"tenants": ["hr", "cs"], "gateway": True}, admin.CreateKey(tenants=("hr", "cs"), gateway=True)),
        ("DELETE", "/keys/k1", None, admin.RevokeKey(key_id="k1")),
        ("GET", "/adapters?tenant=hr&all_versions=true", None, admin.ListAdapters(tenant="hr", all_versions=True)),
        ("GET", "/adapters/hr/tone?version=2", None, admin.ShowAdapter(tenant="hr", name="tone", version=2)),
        (
            "POST",
            "/adapters/hr/tone/unload",
            {"mode": "draining", "deadline_s": 5},
            admin.UnloadAdapter(tenant="hr", name="tone", deadline_s=5),
        ),
        ("POST", "/adapters/hr/tone/unload", {"mode": "now"}, admin.UnloadAdapter(tenant="hr", name="tone", mode="now")),
        ("POST", "/adapters/hr/tone/unload", None, admin.UnloadAdapter(tenant="hr", name="tone")),
        (
            "POST",
            "/adapters/hr/tone?drain_first=true&wait_s=3",
            None,
            admin.AddAdapter(tenant="hr", name="tone", drain_first=True, wait_s=3),
        ),
        ("GET", "/canaries?tenant=hr", None, admin.ListCanaries(tenant="hr")),
        ("GET", "/canaries/hr", None, admin.ListCanaries(tenant="hr")),
        (
            "POST",
            "/canaries/hr/tone?share_ppm=100000&by=session&min_requests=50&version=2&wait_s=3",
            None,
            admin.AddAdapter(
                tenant="hr",
                name="tone",
                version=2,
                wait_s=3,
                trial=CanaryTerms(share_ppm=100_000, by=CanaryBy.SESSION, stop=CanaryStop(min_requests=50)),
            ),
        ),
        (
            "PATCH",
            "/canaries/hr/tone",
            {"share_ppm": 5, "stop": {"window_s": 30}, "resume": True},
            admin.ChangeCanary(tenant="hr", name="tone", share_ppm=5, stop={"window_s": 30}, resume=True),
        ),
        ("POST", "/canaries/hr/tone/promote", {"version": 2}, admin.PromoteCanary(tenant="hr", name="tone", version=2)),
        (
            "POST",
            "/canaries/hr/tone/rollback",
            {"deadline_s": 5, "on_deadline": "abort"},
            admin.RollBackCanary(tenant="hr", name="tone", deadline_s=5, on_deadline=OnDeadline.ABORT),
        ),
        (
            "GET",
            "/audit?tenant=hr&action=canary.*&since=2026-11-30T00:00:00Z&after=7&limit=5",
            None,
            ListAudit(tenant="hr", action="canary.*", since="2026-11-30T00:00:00Z", after=7, limit=5),
        ),
        ("GET", "/audit/hr", None, ListAudit(tenant="hr", own=True)),
        ("GET", "/events?tenant=hr&limit=3", None, admin.ListEvents(tenant="hr", limit=3)),
        ("GET", "/matrix", None, admin.GetMatrix()),
        ("POST", "/matrix/labels", {"label": "a/b@v1", "base": "x@1"}, admin.SetLabel(label="a/b@v1", base="x@1")),
        ("DELETE", "/matrix/labels?label=a/b@v1", None, admin.RemoveLabel(label="a/b@v1")),
        (
            "POST",
            "/matrix/pairs",
            {"adapter_digest": "sha256:1", "base": "x@1", "allowed": True},
            admin.SetPair(adapter_digest="sha256:1", base="x@1", allowed=True),
        ),
        ("DELETE", "/matrix/pairs?adapter_digest=sha256:1&base=x@1", None, admin.RemovePair(adapter_digest="sha256:1", base="x@1")),
        ("GET", "/pools", None, admin.ListPools()),
        ("DELETE", "/workers/main/w0", None, admin.RemoveWorker(pool_id="main", worker_id="w0")),
        ("PUT", "/routing", {"header": "x-tenant", "default": "reject"}, admin.SetRouting(header="x-tenant", default="reject")),
    ],
)
async def test_each_operation_reaches_the_registry_as_itself(
    running: Cluster, office: Office, method: str, path: str, body: Any, heard: admin.AdminRequest
) -> None:
    response = await running.client.request(method, f"/admin/v1{path}", json=body)
    assert response.status_code in {200, 201}
    assert response.json() == {"ok": True}
    assert office.heard == [heard]
    assert office.asked_by == [("operator", "127.0.0.1")]


async def test_the_admin_plane_has_its_own_credential(running: Cluster, office: Office) -> None:
    for headers, code in (
        ({"authorization": ""}, "missing_api_key"),
        ({"authorization": f"Bearer {SALES_KEY}"}, "invalid_api_key"),
        ({"authorization": "Bearer " + ADMIN_KEY + "x"}, "invalid_api_key"),
    ):
        assert code_of(await running.client.get("/admin/v1/tenants", headers=headers)) == (401, code)
    assert office.heard == []
    assert code_of(await running.client.get("/v1/models")) == (401, "invalid_api_key")


async def test_without_an_admin_key_the_admin_plane_is_closed(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, admin_key_sha256="") as running:
        for path in ("/tenants", "/openapi.json", "/top"):
            response = await running.client.get(f"/admin/v1{path}", headers={"authorization": ""})
            assert code_of(response) == (403, "not_permitted")
            assert "TENANTRY_ROUTER_ADMIN_KEY_SHA256" in response.json()["error"]["message"]


async def test_without_a_registry_the_admin_plane_says_so(running: Cluster) -> None:
    response = await running.client.get("/admin/v1/tenants")
    assert code_of(response) == (503, "registry_unavailable")
    assert response.headers["retry-after"]


async def test_a_refusal_of_the_registry_keeps_its_code_and_figures(running: Cluster, office: Office) -> None:
    fields = {"asked_bytes": 10, "held_bytes": 5, "limit_bytes": 12, "scope": "tenant"}
    office.reply = admin.Reply(error=ErrorInfo(code="quota_exceeded", message="too much", fields=fields))
    response = await running.client.post("/admin/v1/adapters/hr/tone", content=b"archive")
    assert code_of(response) == (409, "quota_exceeded")
    assert response.json()["error"] | fields == response.json()["error"]


@pytest.mark.parametrize("name", ["Sales", "a b", "-x", "ä", "a" * 64, "..", "a%00b"])
async def test_names_with_strange_characters_are_refused(running: Cluster, office: Office, name: str) -> None:
    response = await running.client.post("/admin/v1/adapters", params={"tenant": "hr", "name": name}, content=b"x")
    assert code_of(response) == (400, "invalid_request")
    assert code_of(await running.client.post("/admin/v1/tenants", json={"name": name})) == (400, "invalid_request")
    assert office.heard == []
    assert await office.staging.names() == []


@pytest.mark.parametrize("multipart", [False, True])
async def test_an_upload_is_staged_whole_and_then_named_to_the_registry(
    running: Cluster, office: Office, multipart: bool, tmp_path: Any
) -> None:
    content = bytes(range(256)) * 2000
    if multipart:
        files = {"file": ("tone.tar.gz", content, "application/gzip")}
        data = {"tenant": "hr", "name": "tone", "base": "x@1", "ceiling_bytes": "77"}
        response = await running.client.post("/admin/v1/adapters", files=files, data=data)
    else:
        params = {"base": "x@1", "ceiling_bytes": 77}
        response = await running.client.post("/admin/v1/adapters/hr/tone", params=params, content=content)
    assert response.status_code == 201
    (request,) = office.heard
    assert isinstance(request, admin.AddAdapter)
    assert request == admin.AddAdapter(tenant="hr", name="tone", base="x@1", ceiling_bytes=77, object=request.object)
    await office.staging.get_file(request.object, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == content


async def test_an_upload_that_is_cut_off_leaves_nothing(running: Cluster, office: Office) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    head = f"POST /admin/v1/adapters/hr/tone HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-length: 500000\r\n\r\n"
    writer.write(head.encode() + b"x" * 100_000)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await running.client.get("/admin/v1/tenants")).status_code == 200
    await until(lambda: isinstance(office.heard[-1], admin.ListTenants))
    assert office.heard == [admin.ListTenants()]
    assert await office.staging.names() == []


async def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(running: Cluster, office: Office) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 50_000

    for content in (b"x" * 1_500_000, pieces()):
        response = await running.client.post("/admin/v1/adapters/hr/tone", content=content)
        assert code_of(response) == (413, "body_too_large")
    files = {"file": ("tone.tar", b"x" * 1_500_000)}
    assert code_of(await running.client.post("/admin/v1/adapters/hr/tone", files=files)) == (413, "body_too_large")
    assert office.heard == []
    assert await office.staging.names() == []


async def test_unknown_fields_paths_and_methods_are_refused_in_the_same_shape(running: Cluster, office: Office) -> None:
    assert code_of(await running.client.post("/admin/v1/adapters/hr/tone?quota=1", content=b"x")) == (400, "invalid_request")
    assert code_of(await running.client.post("/admin/v1/adapters/hr/tone?wait_s=soon", content=b"x")) == (400, "invalid_request")
    assert code_of(await running.client.post("/admin/v1/tenants", json={"name": "hr", "quota": 1})) == (400, "invalid_request")
    assert code_of(await running.client.post("/admin/v1/tenants", content=b"{")) == (400, "invalid_request")
    assert code_of(await running.client.get("/admin/v1/nothing")) == (404, "not_found")
    assert (await running.client.put("/admin/v1/tenants")).status_code == 405
    assert office.heard == []


ABSURD = ["-1", "1e400", "1" + "0" * 30, '"many"', "true", "[]", "{}", "NaN", '"' + "x" * 5000 + '"']
NUMBERS = [
    ("PATCH", "/tenants/hr", "vram_quota_bytes"),
    ("PATCH", "/tenants/hr", "upgrade_headroom_bytes"),
    ("PATCH", "/tenants/hr", "adapter_ceilings.tone"),
    *[("PATCH", "/tenants/hr", f"limits.{name}") for name in BOUNDS],
    ("POST", "/tenants", "vram_quota_bytes"),
    ("POST", "/tenants", "limits.max_concurrent"),
    ("POST", "/keys/k1/rotate", "overlap_s"),
    ("POST", "/adapters/hr/tone/unload", "version"),
    ("POST", "/adapters/hr/tone/unload", "deadline_s"),
    ("POST", "/adapters/hr/tone/unload", "wait_s"),
]


@pytest.mark.parametrize(("method", "path", "field"), NUMBERS)
async def test_malformed_negative_and_absurd_numbers_are_refused_by_their_name(
    running: Cluster, office: Office, method: str, path: str, field: str
) -> None:
    for value in ABSURD:
        if value == "true" and field.endswith("_s"):
            continue  # a number to JSON's readers here, and within bounds
        body = value
        for name in reversed(field.split(".")):
            body = f'{{"{name}": {body}}}'
        if path == "/tenants":
            body = '{"name": "hr", ' + body[1:]
        response = await running.client.request(method, f"/admin/v1{path}", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, (value, response.content)
        assert field.split(".")[-1] in response.json()["error"]["param"]
        assert len(response.content) < 2000
    assert office.heard == []


@pytest.mark.parametrize("value", ["Upper", "two words", "", "x" * 5000, 7, True, ["a"]])
async def test_a_cache_group_that_is_no_name_is_refused_by_its_name(running: Cluster, office: Office, value: Any) -> None:
    response = await running.client.patch("/admin/v1/tenants/hr", json={"limits": {"cache_group": value}})
    assert response.status_code == 400
    assert "cache_group" in response.json()["error"]["param"]
    assert office.heard == []


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/adapters/hr/tone?version=-1", "version"),
        ("/adapters/hr/tone?version=1" + "0" * 30, "version"),
        ("/adapters/hr/tone?version=many", "version"),
        ("/events?limit=0", "limit"),
        ("/events?limit=99999999999999999999", "limit"),
        ("/keys?tenant=" + "x" * 3000, "tenant"),
    ],
)
async def test_absurd_queries_are_refused_by_their_name(running: Cluster, office: Office, path: str, field: str) -> None:
    response = await running.client.get(f"/admin/v1{path}")
    assert code_of(response) == (400, "invalid_request")
    assert field in response.json()["error"]["param"]
    assert office.heard == []


@pytest.mark.parametrize(
    "query", ["wait_s=-1", "wait_s=nan", "wait_s=1e9", "ceiling_bytes=-1", "ceiling_bytes=1" + "0" * 30, "ceiling_bytes=x"]
)
async def test_absurd_fields_of_an_upload_are_refused_by_their_name_and_leave_nothing(running: Cluster, office: Office, query: str) -> None:
    response = await running.client.post(f"/admin/v1/adapters/hr/tone?{query}", content=b"x")
    assert code_of(response) == (400, "invalid_request")
    assert response.json()["error"]["param"] == query.partition("=")[0]
    assert office.heard == []
    assert await office.staging.names() == []


@pytest.mark.parametrize("query", ["share_ppm=x", "by=mood", "window_s=x", "version=x", "drain_first=true", "ceiling_bytes=1", "wait_s=-1"])
async def test_absurd_terms_of_a_trial_are_refused_by_their_name_and_leave_nothing(running: Cluster, office: Office, query: str) -> None:
    response = await running.client.post(f"/admin/v1/canaries/hr/tone?{query}", content=b"x")
    assert code_of(response) == (400, "invalid_request")
    assert query.partition("=")[0] in response.json()["error"]["param"]
    assert office.heard == []
    assert await office.staging.names() == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"share_ppm": 1_000_001}, "share_ppm"),
        ({"share_ppm": 0.5}, "share_ppm"),
        ({"by": "mood"}, "by"),
        ({"stop": {"window_s": 1}}, "stop.window_s"),
        ({"stop": {"patience": 1}}, "stop.patience"),
        ({"share": 1}, "share"),
    ],
)
async def test_absurd_changes_of_a_trial_are_refused_by_their_name(running: Cluster, office: Office, body: Any, field: str) -> None:
    response = await running.client.patch("/admin/v1/canaries/hr/tone", json=body)
    assert code_of(response) == (400, "invalid_request")
    assert response.json()["error"]["param"] == f"body.{field}"
    assert office.heard == []


async def test_one_trial_is_shown_by_its_name_or_not_found(running: Cluster, office: Office) -> None:
    office.reply = admin.Reply(result=[{"version": 2}])
    assert (await running.client.get("/admin/v1/canaries/hr/tone")).json() == {"version": 2}
    office.reply = admin.Reply(result=[])
    assert code_of(await running.client.get("/admin/v1/canaries/hr/tone")) == (404, "not_found")
    assert office.heard == [admin.ListCanaries(tenant="hr", name="tone")] * 2


async def test_limits_that_are_not_named_are_not_sent_and_null_is(running: Cluster, office: Office) -> None:
    limits = {"max_concurrent": None, "weight": 3}
    await running.client.patch("/admin/v1/tenants/hr", json={"limits": limits})
    await running.client.get("/admin/v1/tenants/hr")
    assert office.heard == [admin.UpdateTenant(name="hr", limits=limits), admin.ShowTenant(name="hr")]


async def test_top_shows_pools_mounts_and_the_workers_last_reports(running: Cluster) -> None:
    await running.worker.report(in_flight=3)
    await until(lambda: running.router.fleet.peer("w0").report)
    top = (await running.client.get("/admin/v1/top")).json()
    (pool,) = top["pools"]
    assert {mount["name"]: mount["state"] for mount in pool["mounts"]} == {"tone": "ready", "help": "ready"}
    assert all(mount["serving"] for mount in pool["mounts"])
    assert pool["workers"][0]["report"]["in_flight"] == 3
    assert top["tokens_per_s"] == 12.5
    (worker,) = (await running.client.get("/admin/v1/workers")).json()
    assert (worker["worker_id"], worker["pool_id"]) == ("w0", "main")
    assert (await running.client.get("/admin/v1/routing")).json() == {"header": "x-tenant", "default": "reject"}


async def test_the_openapi_document_lists_every_operation(running: Cluster) -> None:
    document = msgspec.json.decode((await running.client.get("/admin/v1/openapi.json")).content)
    operations = sum(len(methods) for methods in document["paths"].values())
    assert operations >= 24
    assert all(path.startswith("/admin/v1/") for path in document["paths"])
