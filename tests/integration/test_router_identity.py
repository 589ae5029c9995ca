"""Keys at the router: scopes, expiry by the cluster's clock, and what of the admin plane a tenant's own key opens."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from services.router.settings import RouterSettings
from services.router.stack import Router
from shared.bus import BusSettings, Message, connect, open_objects
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, state
from shared.contracts.adapters import STAGING_BUCKET
from shared.contracts.errors import ErrorInfo
from shared.runtime import Stop
from tests.integration.test_router_admin import Office, code_of, office
from tests.router_fakes import CS_KEY, SALES_KEY, Attempt, Cluster, cluster, mount, pool_entry, sha256, until, until_ready

assert office
OWN = "sk-sales-own"
GATEWAY = "sk-own-gateway"
INFER, ADAPTERS, ADMIN = state.Scope.INFER, state.Scope.ADAPTERS, state.Scope.ADMIN


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server, upload_limit_bytes=1_000_000) as found:
        await give(found, OWN, scopes=(ADAPTERS, ADMIN))
        yield found


async def give(running: Cluster, secret: str, **fields: Any) -> None:
    """A key that the router knows."""
    key = state.ApiKey(**{"key_id": f"id-{secret}", "label": "", "tenants": ("sales",), **fields})
    await running.registry.put_key(secret, key)
    await until(lambda: running.router.table.keys.get(sha256(secret)) == key)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def test_a_key_without_the_scope_infer_is_told_what_it_needs_and_has(running: Cluster) -> None:
    for path in ("/v1/chat/completions", "/v1/models"):
        method = "GET" if path == "/v1/models" else "POST"
        response = await running.client.request(method, path, json={"model": "tone"}, headers=bearer(OWN))
        assert code_of(response) == (403, "scope_missing")
        error = response.json()["error"]
        assert (error["needed"], error["held"]) == ("infer", ["adapters", "admin"])
    assert running.worker.attempts == []


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("GET", "/adapters/sales", "adapters"),
        ("GET", "/adapters/sales/tone", "adapters"),
        ("POST", "/adapters/sales/tone", "adapters"),
        ("POST", "/adapters/sales/tone/unload", "adapters"),
        ("DELETE", "/adapters/sales/tone", "adapters"),
        ("GET", "/canaries/sales", "adapters"),
        ("POST", "/canaries/sales/tone", "adapters"),
        ("PATCH", "/canaries/sales/tone", "adapters"),
        ("POST", "/canaries/sales/tone/promote", "adapters"),
        ("POST", "/canaries/sales/tone/rollback", "adapters"),
        ("GET", "/audit/sales", "admin"),
        ("GET", "/tenants/sales", "admin"),
        ("GET", "/tenants/sales/keys", "admin"),
        ("POST", "/tenants/sales/keys", "admin"),
        ("DELETE", "/tenants/sales/keys/k1", "admin"),
        ("POST", "/tenants/sales/keys/k1/rotate", "admin"),
    ],
)
async def test_what_a_tenants_own_key_may_do_of_the_admin_plane(
    running: Cluster, office: Office, method: str, path: str, needed: str
) -> None:
    lacking = "sk-lacking"
    await give(running, lacking, scopes=tuple({INFER, ADAPTERS, ADMIN} - {state.Scope(needed)}))
    body = {} if (path.endswith("/keys") and method == "POST") or method == "PATCH" else None
    refused = await running.client.request(method, f"/admin/v1{path}", json=body, headers=bearer(lacking))
    assert code_of(refused) == (403, "scope_missing")
    assert refused.json()["error"]["needed"] == needed
    assert office.heard == []
    done = await running.client.request(method, f"/admin/v1{path}", json=body, headers=bearer(OWN))
    assert done.status_code in {200, 201}
    assert len(office.heard) == 1
    assert office.asked_by[0][0].startswith("key "), "not as the operator"
    assert office.asked_by[0][1] == "127.0.0.1"
    tenants = [getattr(office.heard[0], name, None) for name in ("tenant", "name", "tenants")]
    assert "sales" in tenants or ("sales",) in tenants


@pytest.mark.parametrize("tenant", ["cs", "nobody"])
async def test_anothers_and_nobodys_are_the_same_404_and_reach_no_registry(running: Cluster, office: Office, tenant: str) -> None:
    """Byte for byte, whether it exists or not."""
    answers: set[tuple[int, bytes, tuple[tuple[str, str], ...]]] = set()
    for method, path in (
        ("GET", f"/adapters/{tenant}"),
        ("GET", f"/adapters/{tenant}/help"),
        ("POST", f"/adapters/{tenant}/help"),
        ("POST", f"/adapters/{tenant}/help/unload"),
        ("DELETE", f"/adapters/{tenant}/help"),
        ("GET", f"/tenants/{tenant}"),
        ("GET", f"/tenants/{tenant}/keys"),
        ("POST", f"/tenants/{tenant}/keys"),
        ("DELETE", f"/tenants/{tenant}/keys/k1"),
        ("POST", f"/tenants/{tenant}/keys/k1/rotate"),
    ):
        response = await running.client.request(method, f"/admin/v1{path}", headers=bearer(OWN))
        answers.add((response.status_code, response.content, tuple(response.headers.items())))
    assert office.heard == []
    ((status, body, _),) = answers
    assert status == 404
    assert tenant.encode() not in body


async def test_models_of_others_and_of_nobody_are_the_same_404(running: Cluster) -> None:
    """`help` is another tenant's, `nope` nobody's."""
    bodies: list[bytes] = []
    for model in ("help", "nope"):
        response = await running.ask(model)
        assert response.status_code == 404
        bodies.append(response.content.replace(model.encode(), b"MODEL"))
        listed = await running.client.get(f"/v1/models/{model}", headers=bearer(SALES_KEY))
        assert listed.status_code == 404
        bodies.append(listed.content.replace(model.encode(), b"MODEL"))
    assert len(set(bodies)) == 1


async def test_two_tenants_may_use_the_same_name_and_each_gets_its_own(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, entry=pool_entry(mount("tone", "sales"), mount("tone", "cs"))) as running:
        for key, tenant in ((SALES_KEY, "sales"), (CS_KEY, "cs")):
            assert (await running.ask("tone", key=key)).status_code == 200
            assert running.worker.attempts[-1].request.handle.adapter_id == f"ad_{tenant}_tone_1"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tenants"),
        ("POST", "/tenants"),
        ("PATCH", "/tenants/sales"),
        ("DELETE", "/tenants/sales"),
        ("GET", "/adapters"),
        ("POST", "/adapters"),
        ("GET", "/keys"),
        ("POST", "/keys"),
        ("GET", "/pools"),
        ("GET", "/top"),
        ("GET", "/events"),
        ("PUT", "/routing"),
        ("GET", "/nothing"),
    ],
)
async def test_everything_else_stays_with_the_admin_credential(running: Cluster, office: Office, method: str, path: str) -> None:
    answers = [await running.client.request(method, f"/admin/v1{path}", json={}, headers=bearer(secret)) for secret in (OWN, "sk-unknown")]
    assert [code_of(answer) for answer in answers] == [(401, "invalid_api_key")] * 2
    assert answers[0].content == answers[1].content
    assert office.heard == []


async def test_a_tenant_makes_keys_for_itself_only_and_sets_no_ceilings(running: Cluster, office: Office) -> None:
    made = await running.client.post("/admin/v1/tenants/sales/keys", json={"scopes": ["infer"], "label": "ci"}, headers=bearer(OWN))
    assert made.status_code == 201
    assert office.heard == [admin.CreateKey(tenants=("sales",), label="ci", scopes=("infer",))]
    for body in ({"tenants": ["cs"]}, {"gateway": True}, {"scopes": []}, {"scopes": ["root"]}, {"label": "x" * 2000}):
        refused = await running.client.post("/admin/v1/tenants/sales/keys", json=body, headers=bearer(OWN))
        assert code_of(refused) == (400, "invalid_request")
        assert next(iter(body)) in refused.json()["error"]["param"]
    refused = await running.client.post("/admin/v1/adapters/sales/tone?ceiling_bytes=1", content=b"x", headers=bearer(OWN))
    assert code_of(refused) == (403, "not_permitted")
    assert len(office.heard) == 1


async def test_a_tenants_request_body_is_bounded(running: Cluster, office: Office) -> None:
    headers = bearer(OWN) | {"content-type": "application/json"}
    content = b'{"label":"' + b"x" * 200_000 + b'"}'
    refused = await running.client.post("/admin/v1/tenants/sales/keys", content=content, headers=headers)
    assert 400 <= refused.status_code < 500
    assert office.heard == []


async def test_how_many_slots_others_hold_is_not_told_to_a_tenant(running: Cluster, office: Office) -> None:
    full = ErrorInfo(code="no_free_slot", message="all 4 slots are held (4)", fields={"held_slots": 4, "limit_slots": 4})
    office.reply = admin.Reply(error=full)
    response = await running.client.post("/admin/v1/adapters/sales/tone", headers=bearer(OWN))
    assert code_of(response) == (409, "no_free_slot")
    assert b"4" not in response.content


async def test_a_gateways_key_acts_for_the_tenants_it_may_speak_for(running: Cluster, office: Office) -> None:
    await give(running, GATEWAY, tenants=("sales", "cs"), gateway=True, scopes=(ADAPTERS,))
    for tenant, status in (("sales", 200), ("cs", 200), ("nobody", 404)):
        assert (await running.client.get(f"/admin/v1/adapters/{tenant}", headers=bearer(GATEWAY))).status_code == status


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds").replace("+00:00", "Z")


@pytest.mark.parametrize(("expires_at", "status"), [(at(3600), 200), (at(-1), 401), ("soon", 401), ("", 200)])
async def test_a_key_works_until_its_time(running: Cluster, expires_at: str, status: int) -> None:
    await give(running, "sk-old", expires_at=expires_at)
    assert (await running.ask("tone", key="sk-old")).status_code == status


async def test_a_keys_time_runs_out_in_the_routers_memory_without_anybody_saying_so(running: Cluster) -> None:
    await give(running, "sk-old", expires_at=at(1.0))

    async def over() -> bool:
        return (await running.ask("tone", key="sk-old")).status_code == 401

    await until(over)
    old = (await running.client.get("/admin/v1/adapters/sales", headers=bearer("sk-old"))).content
    assert old == (await running.client.get("/admin/v1/adapters/sales", headers=bearer("sk-unknown"))).content


async def test_a_clients_own_clock_means_nothing(running: Cluster) -> None:
    await give(running, "sk-old", expires_at=at(-1))
    response = await running.ask("tone", key="sk-old", headers={"date": "Thu, 01 Jan 1970 00:00:00 GMT"})
    assert response.status_code == 401


async def test_a_revoked_key_ends_on_every_router(running: Cluster) -> None:
    await give(running, "sk-new")
    assert running.group is not None
    others: list[tuple[Stop, asyncio.Task[None], httpx.AsyncClient]] = []
    for number in range(3):
        router = Router(RouterSettings(port=0, grace_s=1.0), f"r_other{number}")
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.listen()}", trust_env=False)
        bus = await connect(BusSettings(url=running.nats.url, name="router"))
        stop = Stop()
        others.append((stop, running.group.create_task(router.run(bus, stop)), client))
        await until_ready(client)
    clients = [running.client, *(client for _, _, client in others)]

    async def statuses() -> list[int]:
        return [(await client.get("/v1/models", headers=bearer("sk-new"))).status_code for client in clients]

    assert await statuses() == [200] * 4
    await running.registry.put_key("sk-new", state.ApiKey(key_id="k", label="", tenants=("sales",), revoked=True))

    async def ended() -> bool:
        return await statuses() == [401] * 4

    await until(ended, timeout_s=5.0)
    for stop, task, client in others:
        await client.aclose()
        stop.set("test over")
        await asyncio.wait([task], timeout=10)


async def test_the_routing_headers_name_is_configurable_and_only_a_key_that_may_speak_for_a_tenant_is_believed(running: Cluster) -> None:
    await running.registry.put_routing(state.Routing(header="x-team"))
    await until(lambda: running.router.table.routing.header == "x-team")
    assert (await running.ask("help", key="sk-gateway", headers={"x-team": "cs"})).status_code == 200
    assert code_of(await running.ask("help", key="sk-gateway", headers={"x-tenant": "cs"})) == (400, "tenant_required")
    assert code_of(await running.ask("help", key=SALES_KEY, headers={"x-team": "cs"})) == (403, "tenant_not_allowed")


async def test_one_tenants_requests_do_not_fill_a_router(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, tenant_max_concurrent=2) as running:
        held = asyncio.Event()

        async def hold(attempt: Attempt) -> None:
            if attempt.request.handle.tenant == "sales":
                await held.wait()
            await attempt.answer()

        running.worker.behaviour = hold
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(running.ask("tone")) for _ in range(2)]
            await until(lambda: len(running.worker.attempts) == 2)
            refused = await running.ask("tone")
            assert code_of(refused) == (429, "overloaded")
            error = refused.json()["error"]
            assert (error["asked"], error["held"], error["allowed"]) == (1, 2, 2)
            assert (await running.ask("help", key=CS_KEY)).status_code == 200
            held.set()
        assert [task.result().status_code for task in waiting] == [200, 200]
        assert (await running.ask("tone")).status_code == 200


async def test_a_tenants_requests_to_the_admin_plane_and_its_uploads_are_bounded(running: Cluster, office: Office) -> None:
    gate = asyncio.Event()
    answer = office.hear

    async def slow(message: Message) -> None:
        await gate.wait()
        await answer(message)

    await running.registry.bus.subscribe(admin.ADMIN_SUBJECT, slow, queue="slow")
    statuses: list[int] = []

    async def ask(method: str, path: str) -> None:
        response = await running.client.request(method, path, headers=bearer(OWN))
        statuses.append(response.status_code)

    async with asyncio.TaskGroup() as group:
        for _ in range(60):
            group.create_task(ask("GET", "/admin/v1/adapters/sales"))
        for _ in range(60):
            group.create_task(ask("POST", "/admin/v1/adapters/sales/tone"))
        await until(lambda: 429 in statuses)
        gate.set()
    assert set(statuses) <= {200, 201, 429}


async def test_a_tenants_changes_a_minute_are_bounded_and_its_looking_is_not(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, tenant_changes_per_minute=3) as running:
        heard = Office(running, await open_objects(running.registry.bus, STAGING_BUCKET, create=True))
        await running.registry.bus.subscribe(admin.ADMIN_SUBJECT, heard.hear)
        await give(running, OWN, scopes=(ADAPTERS,))
        statuses = [(await running.client.post("/admin/v1/adapters/sales/tone/unload", headers=bearer(OWN))).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        looked = [(await running.client.get("/admin/v1/adapters/sales", headers=bearer(OWN))).status_code for _ in range(5)]
        assert looked == [200] * 5
        assert len(heard.heard) == 8
