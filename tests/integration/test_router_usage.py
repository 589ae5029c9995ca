"""What a request leaves in the usage stream, however it ends, and what leaves nothing."""

from collections.abc import AsyncIterator

import pytest

from shared.bus import Bus, read_last
from shared.bus.embedded import EmbeddedNats
from shared.contracts.usage import USAGE_STREAM, RequestOutcome, decode, router_usage_subject
from tests.router_fakes import BASE, SALES_KEY, Attempt, Cluster, cluster, mount, until


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server, body_limit_bytes=2000) as found:
        yield found


async def outcomes(bus: Bus, count: int) -> list[RequestOutcome]:
    """The first `count` outcomes, once they are there."""
    found: list[RequestOutcome] = []

    async def stored() -> bool:
        nonlocal found
        messages = await read_last(bus, USAGE_STREAM, router_usage_subject("r_test"), 100)
        found = [record for message in messages for record in decode(message) if isinstance(record, RequestOutcome)]
        return len(found) >= count

    await until(stored)
    return found


async def test_an_answered_request_leaves_its_tenant_key_handle_and_times(running: Cluster) -> None:
    response = await running.ask("tone", headers={"x-request-id": "mine"})
    (outcome,) = await outcomes(running.registry.bus, 1)
    served = mount("tone", "sales")
    assert outcome.request_id == response.headers["x-request-id"]
    assert (outcome.outcome, outcome.status, outcome.attempts) == ("complete", 200, 1)
    assert (outcome.delivered_bytes, outcome.client_label) == (len(response.content), "mine")
    assert (outcome.tenant_id, outcome.tenant, outcome.key_id) == ("t_sales", "sales", "k1")
    assert (outcome.adapter_id, outcome.alias, outcome.version) == (served.adapter_id, "tone", 1)
    assert (outcome.digest, outcome.base, outcome.pool_id) == (served.digest, BASE, "main")
    assert 0 < outcome.first_byte_ms <= outcome.total_ms


async def test_the_worker_is_told_which_key_asked(running: Cluster) -> None:
    await running.ask("tone")
    assert running.worker.attempt(0).request.key_id == "k1"


async def test_a_refusal_is_counted_for_its_tenant_without_a_handle_and_without_attempts(running: Cluster) -> None:
    await running.ask("nothing")
    await running.client.post("/v1/chat/completions", content=b"x" * 3000, headers={"authorization": f"Bearer {SALES_KEY}"})
    await running.client.post("/v1/chat/completions", content=b"{", headers={"authorization": f"Bearer {SALES_KEY}"})
    found = await outcomes(running.registry.bus, 3)
    assert [(each.outcome, each.status) for each in found] == [
        ("error:adapter_not_found", 404),
        ("error:body_too_large", 413),
        ("error:invalid_request", 400),
    ]
    assert {(each.tenant_id, each.key_id, each.attempts, each.adapter_id, each.alias, each.base) for each in found} == {
        ("t_sales", "k1", 0, "", "", "")
    }
    assert all(each.total_ms > 0 for each in found)


async def test_a_workers_refusal_keeps_the_handle_that_was_resolved(running: Cluster) -> None:
    async def refuse(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.error("queue_full")

    running.worker.behaviour = refuse
    assert (await running.ask("tone")).status_code == 429
    (outcome,) = await outcomes(running.registry.bus, 1)
    assert (outcome.outcome, outcome.attempts, outcome.alias) == ("error:queue_full", 1, "tone")


async def test_who_is_nobodys_and_what_generates_nothing_leave_no_outcome(running: Cluster) -> None:
    assert (await running.ask("tone", key="sk-unknown")).status_code == 401
    assert (await running.ask("tone", headers={"x-tenant": "cs"})).status_code == 403
    assert (await running.client.get("/v1/models", headers={"authorization": f"Bearer {SALES_KEY}"})).status_code == 200
    assert (await running.ask("tone", path="/v1/nonsense")).status_code == 404
    await running.ask("tone")
    (outcome,) = await outcomes(running.registry.bus, 1)
    assert outcome.outcome == "complete"
