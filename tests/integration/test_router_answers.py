"""From a client's request to the worker's answer and back, with nothing going wrong."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.contracts import state
from shared.contracts.inference import FrameKind
from tests.router_fakes import (
    ADMIN_KEY,
    BASE,
    CS_KEY,
    GATEWAY_KEY,
    SALES_KEY,
    Attempt,
    Cluster,
    cluster,
    events,
    mount,
    pool_entry,
    until,
)


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server) as found:
        yield found


async def test_an_answer_comes_from_the_adapter_that_the_request_resolved_to(running: Cluster) -> None:
    response = await running.ask("tone", headers={"x-request-id": "mine-1"})
    assert response.status_code == 200
    assert response.json()["model"] == "tone@1"
    assert response.headers["x-tenantry-adapter"] == "tone@1"
    assert response.headers["x-tenantry-digest"] == mount("tone", "sales").digest
    assert response.headers["x-tenantry-base"] == BASE
    assert response.headers["x-tenantry-worker"] == "w0"
    assert response.headers["x-client-request-id"] == "mine-1"
    assert len(response.headers["x-request-id"]) == 26
    request = running.worker.attempt(0).request
    assert request.request_id == response.headers["x-request-id"]
    assert request.client_label == "mine-1"


async def test_the_body_reaches_the_worker_as_the_client_sent_it(running: Cluster) -> None:
    body = b'{ "model" : "tone",  "messages": [ {"role":"user","content":"\xc3\xa4"} ], "odd": 1.50 }'
    headers = {"authorization": f"Bearer {SALES_KEY}"}
    await running.client.post("/v1/chat/completions?a=b", content=body, headers=headers)
    assert running.worker.attempt(0).request.body == body
    assert running.worker.attempt(0).request.query == "a=b"


async def test_a_stream_is_passed_through_and_ends(running: Cluster) -> None:
    response = await running.ask("tone", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response.text) == ["tone@1", "one", "two", "[DONE]"]


async def test_the_first_piece_arrives_before_the_last_is_made(running: Cluster) -> None:
    more = asyncio.Event()

    async def waits(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.token("first")
        await more.wait()
        await attempt.token("[DONE]")
        await attempt.end()

    running.worker.behaviour = waits
    async with running.streaming() as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "data: first"
        more.set()
        assert [line async for line in lines if line] == ["data: [DONE]"]


async def test_the_default_adapter_serves_a_request_without_a_model(running: Cluster) -> None:
    for model in (None, "", "default"):
        assert (await running.ask(model)).json()["model"] == "tone@1"


async def test_the_base_serves_under_its_label_and_its_identity(running: Cluster) -> None:
    for model in ("demo", BASE):
        response = await running.ask(model)
        assert response.headers["x-tenantry-adapter"] == "demo"
        assert running.worker.attempts[-1].request.handle.adapter_id == ""


async def test_an_anthropic_client_authenticates_with_x_api_key(running: Cluster) -> None:
    headers = {"x-api-key": CS_KEY}
    response = await running.client.post("/v1/messages", json={"model": "help"}, headers=headers)
    assert response.json()["model"] == "help@1"


async def test_a_gateway_key_names_its_tenant_in_the_routing_header(running: Cluster) -> None:
    response = await running.ask("help", key=GATEWAY_KEY, headers={"x-tenant": "cs"})
    assert response.json()["model"] == "help@1"
    refused = await running.ask("help", key=GATEWAY_KEY, headers={"x-tenant": "other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_not_allowed")


async def test_a_gateway_request_without_a_mark_follows_the_routing_default(running: Cluster) -> None:
    refused = await running.ask(None, key=GATEWAY_KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tenant_required")
    await running.registry.put_routing(state.Routing(header="X-Team", default=state.RoutingDefault.BASE_ONLY))
    await until(lambda: running.router.table.routing.header == "X-Team")
    response = await running.ask(None, key=GATEWAY_KEY)
    assert response.headers["x-tenantry-adapter"] == "demo"
    assert running.worker.attempts[-1].request.handle.tenant == "_gateway"
    assert (await running.ask("help", key=GATEWAY_KEY, headers={"x-team": "cs"})).json()["model"] == "help@1"


async def test_models_lists_only_what_the_key_may_use(running: Cluster) -> None:
    headers = {"authorization": f"Bearer {SALES_KEY}"}
    listed = (await running.client.get("/v1/models", headers=headers)).json()
    assert [model["id"] for model in listed["data"]] == ["tone", "demo"]
    assert listed["data"][0]["tenantry"]["digest"] == mount("tone", "sales").digest
    assert (await running.client.get("/v1/models/tone", headers=headers)).json()["tenantry"]["serves"] == "tone@1"
    assert (await running.client.get("/v1/models/help", headers=headers)).status_code == 404


async def test_a_new_version_serves_as_soon_as_the_alias_points_at_it(running: Cluster) -> None:
    second = mount("tone", "sales", version=2)
    await running.worker.hold(second.adapter_id)
    both = pool_entry(mount("tone", "sales"), second, aliases={"sales": {"tone": second.adapter_id}})
    await running.registry.put_pool(both)
    await until(lambda: running.router.table.pools["main"].entry.aliases == both.aliases)
    assert (await running.ask("tone")).json()["model"] == "tone@2"
    assert (await running.ask("tone@1")).json()["model"] == "tone@1"


async def test_an_engine_answer_with_an_error_status_keeps_its_status_even_for_a_stream(running: Cluster) -> None:
    async def refuses(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head(status=400, content_type="application/json")
        await attempt.say(FrameKind.BODY, b'{"error":{"message":"too long","code":"context_length"}}')
        await attempt.end()

    running.worker.behaviour = refuses
    response = await running.ask("tone", stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length")


async def test_frames_are_acknowledged_so_that_the_worker_may_forget_them(running: Cluster) -> None:
    await running.ask("tone", stream=True)
    attempt = running.worker.attempt(0)
    await until(lambda: attempt.acked_seq == attempt.kept[-1].seq)


async def test_metrics_and_health_say_how_it_goes(running: Cluster) -> None:
    await running.ask("tone")
    assert (await running.client.get("/health")).json() == {"status": "ok"}
    text = (await running.client.get("/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})).text
    assert 'tenantry_requests_total{model="tone@1",path="/v1/chat/completions",status="200",tenant="sales"} 1.0' in text


async def test_metrics_name_tenants_and_so_need_the_admin_key(running: Cluster) -> None:
    await running.ask("tone")
    for headers in ({}, {"authorization": f"Bearer {CS_KEY}"}):
        refused = await running.client.get("/metrics", headers=headers)
        assert refused.status_code == 401
        assert "sales" not in refused.text
