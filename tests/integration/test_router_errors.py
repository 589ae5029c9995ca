"""What a client is told when its request cannot be served: a real status, a stable code, nothing revealed."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from shared.bus.embedded import EmbeddedNats
from shared.contracts import state
from shared.contracts.inference import FrameKind
from shared.policy.lifecycle import AdapterState
from tests.router_fakes import GATEWAY_KEY, SALES_KEY, Attempt, Cluster, cluster, mount, pool_entry, until

AUTH = {"authorization": f"Bearer {SALES_KEY}"}


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    entry = pool_entry(
        mount("tone", "sales"),
        mount("help", "cs"),
        mount("coming", "sales", state=AdapterState.LOADING),
        mount("going", "sales", state=AdapterState.DRAINING),
    )
    async with cluster(nats_server, entry=entry, body_limit_bytes=10_000) as found:
        yield found


def told(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert len(response.headers["x-request-id"]) == 26
    return response.status_code, error["code"]


async def test_a_request_without_a_key_or_with_a_bad_one_is_refused(running: Cluster) -> None:
    assert told(await running.client.post("/v1/chat/completions", json={})) == (401, "missing_api_key")
    assert told(await running.ask(key="sk-wrong")) == (401, "invalid_api_key")
    assert told(await running.client.get("/v1/models", headers={"authorization": "Basic abc"})) == (401, "missing_api_key")


async def test_a_revoked_key_is_refused(running: Cluster) -> None:
    await running.registry.put_key(SALES_KEY, state.ApiKey(key_id="k1", label="", tenants=("sales",), revoked=True))

    async def refused() -> bool:
        return (await running.ask()).status_code == 401

    await until(refused)


async def test_unknown_foreign_draining_and_unloaded_models_are_told_apart_by_nobody(running: Cluster) -> None:
    answers = [await running.ask(model) for model in ("nothing", "help", "going", "tone@9", "help@1")]
    assert {told(answer) for answer in answers} == {(404, "adapter_not_found")}
    texts = {
        answer.json()["error"]["message"].replace(model, "X")
        for answer, model in zip(answers, ("nothing", "help", "going", "tone@9", "help@1"), strict=True)
    }
    assert len(texts) == 1


async def test_a_loading_adapter_says_when_to_come_again(running: Cluster) -> None:
    response = await running.ask("coming")
    assert told(response) == (503, "adapter_not_ready")
    assert response.headers["retry-after"] == "1"


async def test_an_ambiguous_default_names_the_choices(running: Cluster) -> None:
    response = await running.ask(None)
    assert told(response) == (400, "invalid_request")
    assert response.json()["error"]["choices"] == ["coming", "tone", "demo"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": 7}', b'{"model": "tone", "stream": "yes"}', b'{"model": "\xff"}'])
async def test_a_malformed_body_is_refused(running: Cluster, body: bytes) -> None:
    response = await running.client.post("/v1/chat/completions", content=body, headers=AUTH)
    assert told(response) == (400, "invalid_request")
    assert running.worker.attempts == []


async def test_a_body_over_the_limit_is_refused_declared_or_actual(running: Cluster) -> None:
    large = b'{"model":"tone","x":"' + b"y" * 200_000 + b'"}'
    assert told(await running.client.post("/v1/chat/completions", content=large, headers=AUTH)) == (413, "body_too_large")

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 5000):
            yield large[start : start + 5000]

    response = await running.client.post("/v1/chat/completions", content=pieces(), headers=AUTH)
    assert told(response) == (413, "body_too_large")
    assert response.json()["error"]["limit_bytes"] == 10_000
    assert (await running.ask("tone")).status_code == 200


async def test_unknown_paths_and_wrong_methods_are_refused(running: Cluster) -> None:
    assert told(await running.client.get("/v1/nothing", headers=AUTH)) == (404, "not_found")
    assert told(await running.client.get("/nothing")) == (404, "not_found")
    response = await running.client.get("/v1/chat/completions", headers=AUTH)
    assert told(response) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert told(await running.client.post("/v1/models", headers=AUTH, json={})) == (405, "method_not_allowed")


async def test_an_endpoint_that_the_engine_does_not_serve_is_refused(running: Cluster) -> None:
    assert told(await running.ask("tone", path="/v1/embeddings")) == (400, "endpoint_not_supported")


async def test_a_tenant_that_may_not_use_the_base_is_told_so(running: Cluster) -> None:
    await running.registry.put_tenant(state.Tenant(tenant_id="t_sales", name="sales", base_allowed=False))
    await until(lambda: not running.router.table.tenants["sales"].base_allowed)
    assert told(await running.ask("demo")) == (403, "base_not_allowed")
    models = (await running.client.get("/v1/models", headers=AUTH)).json()["data"]
    assert [model["id"] for model in models] == ["tone"]


async def test_a_refusal_of_the_worker_is_a_429_with_retry_after_even_for_a_stream(running: Cluster) -> None:
    async def refuses(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.error("overloaded", "the tenant's queue is full", asked=1, held=8, allowed=8, retry_after_s=2.5)

    running.worker.behaviour = refuses
    response = await running.ask("tone", stream=True)
    assert told(response) == (429, "overloaded")
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["held"] == 8


async def test_an_end_without_a_body_is_never_an_empty_answer(running: Cluster) -> None:
    async def empty(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.end()

    running.worker.behaviour = empty
    for stream in (False, True):
        assert told(await running.ask("tone", stream=stream)) == (502, "empty_answer")


async def test_an_error_after_a_part_of_an_unstreamed_answer_is_a_real_status(running: Cluster) -> None:
    async def breaks(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head(content_type="application/json")
        await attempt.say(FrameKind.BODY, b'{"half":')
        await attempt.error("engine_error", "it broke")

    running.worker.behaviour = breaks
    assert told(await running.ask("tone")) == (500, "engine_error")


async def test_an_error_in_mid_stream_is_an_event_and_the_stream_does_not_look_complete(running: Cluster) -> None:
    told_first = asyncio.Event()

    async def breaks(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.token("one")
        await told_first.wait()
        await attempt.error("handle_mismatch", "wrong adapter")

    running.worker.behaviour = breaks
    got = ""
    with pytest.raises(httpx.RemoteProtocolError):
        async with running.streaming() as response:
            async for text in response.aiter_text():
                got += text
                told_first.set()
    assert '"code":"handle_mismatch"' in got
    assert "[DONE]" not in got


async def test_anthropic_clients_get_their_own_shape_of_error(running: Cluster) -> None:
    response = await running.client.post("/v1/messages", json={"model": "nothing"}, headers={"x-api-key": SALES_KEY})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"], body["error"]["code"]) == (
        404,
        "error",
        "not_found_error",
        "adapter_not_found",
    )


async def test_more_requests_than_the_router_takes_are_refused_with_retry_after(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, max_concurrent=1) as running:
        go_on = asyncio.Event()

        async def waits(attempt: Attempt) -> None:
            await attempt.accept()
            await go_on.wait()
            await attempt.head(content_type="application/json")
            await attempt.say(FrameKind.BODY, b"{}")
            await attempt.end()

        running.worker.behaviour = waits
        async with asyncio.TaskGroup() as group:
            first = group.create_task(running.ask("tone"))
            await until(lambda: running.worker.attempts)
            second = await running.ask("tone")
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            go_on.set()
        assert first.result().status_code == 200


async def test_a_query_that_would_not_fit_into_a_message_is_refused_and_leaves_nothing_open(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server) as running:
        body = b'{"model":"tone","x":"' + b"y" * (running.router.settings.body_limit_bytes - 23) + b'"}'
        for query in ("a" * 65_400, "a" * 10_000):
            response = await running.client.post(f"/v1/completions?q={query}", content=body, headers=AUTH)
            assert told(response) == (400, "invalid_request")
        assert running.router.fleet.peer("w0").open == 0
        assert (await running.client.post("/v1/completions?q=1", content=body, headers=AUTH)).status_code == 200


async def test_two_different_tenant_marks_are_refused(running: Cluster) -> None:
    def marked(*tenants: str) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {GATEWAY_KEY}"), *(("x-tenant", tenant) for tenant in tenants)]

    body = {"model": "help", "messages": []}
    for tenants in (("sales", "cs"), ("cs", "sales"), ("cs", "")):
        response = await running.client.post("/v1/completions", json=body, headers=marked(*tenants))
        assert told(response) == (400, "invalid_request")
    assert (await running.client.post("/v1/completions", json=body, headers=marked("cs", "cs"))).status_code == 200


async def test_a_body_that_does_not_come_is_given_up(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, body_timeout_s=0.3) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SALES_KEY}\r\ncontent-length: 50\r\n\r\n"
        writer.write(head.encode() + b'{"model": "tone"')
        async with asyncio.timeout(10):
            answer = await reader.readuntil(b"\r\n")
        assert b" 408 " in answer
        writer.close()
        assert running.worker.attempts == []


async def test_a_head_without_an_end_is_cut_off(running: Cluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"x-filler: " + b"y" * 600_000)
    async with asyncio.timeout(10):
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b"HTTP/1.1 431 "  # the refusal was overtaken by the reset that unread bytes cause
    assert answer.startswith(b"HTTP/1.1 431 ")
    writer.close()
    assert (await running.ask("tone")).status_code == 200
