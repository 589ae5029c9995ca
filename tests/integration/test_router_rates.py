"""Requests and tokens per minute over several routers on real counters: never more than the limit, refused with figures."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.router.rates import Rates
from services.router.settings import RouterSettings
from services.router.stack import Router
from shared.bus import Bus, BusSettings, connect, counted, ensure_counters
from shared.bus.embedded import EmbeddedNats
from shared.contracts import state
from shared.contracts.inference import FrameKind, Totals
from shared.contracts.inference import encode as encode_frames
from shared.contracts.rates import RATES_STREAM, RATES_SUBJECTS, REQUESTS, TOKENS, rate_subject
from shared.contracts.tenancy import TenantLimits
from shared.runtime import Stop
from tests.router_fakes import SALES_KEY, Attempt, Cluster, cluster, until, until_ready

AUTH = {"authorization": f"Bearer {SALES_KEY}"}
SALES = "t_sales"


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server) as found:
        await ensure_counters(found.registry.bus, RATES_STREAM, RATES_SUBJECTS, 300.0)
        yield found


async def limit(running: Cluster, *routers: Router, **limits: Any) -> None:
    tenant = state.Tenant(tenant_id=SALES, name="sales", limits=TenantLimits(**limits))
    await running.registry.put_tenant(tenant)
    for router in (running.router, *routers):
        await until(lambda router=router: router.table.tenants["sales"] == tenant)


async def early_in_a_minute(running: Cluster) -> int:
    """What a test does in one minute must not meet its end; returns which minute it is."""
    clock = running.router.table.clock
    await until(lambda: clock.unix_s() % 60.0 < 40.0, timeout_s=30.0)
    return int(clock.unix_s() // 60)


class More:
    """More routers of the same cluster, each with a client."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.routers: list[Router] = []
        self.clients: list[httpx.AsyncClient] = []
        self._tasks: list[tuple[Stop, asyncio.Task[None]]] = []

    async def start(self) -> httpx.AsyncClient:
        assert self.running.group is not None
        router = Router(RouterSettings(port=0, grace_s=1.0), f"r_more{len(self.routers)}")
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.listen()}", trust_env=False, timeout=30)
        bus = await connect(BusSettings(url=self.running.nats.url, name="router"))
        stop = Stop()
        self._tasks.append((stop, self.running.group.create_task(router.run(bus, stop))))
        self.routers.append(router)
        self.clients.append(client)
        await until_ready(client)
        return client

    async def stop(self, number: int) -> None:
        stop, task = self._tasks[number]
        stop.set("test over")
        await asyncio.wait([task], timeout=10)

    async def close(self) -> None:
        for number, client in enumerate(self.clients):
            await client.aclose()
            await self.stop(number)


@pytest.fixture
async def more(running: Cluster) -> AsyncIterator[More]:
    found = More(running)
    yield found
    await found.close()


async def ask(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"model": "tone", "messages": [], **body}, headers=AUTH)


async def at_once(clients: list[httpx.AsyncClient], count: int, **body: Any) -> list[httpx.Response]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(clients[number % len(clients)], **body)) for number in range(count)]
    return [task.result() for task in tasks]


async def leased(bus: Bus, kind: str, minute: int) -> int:
    return await counted(bus, RATES_STREAM, rate_subject(SALES, kind, minute))


async def test_without_limits_nothing_is_counted(running: Cluster) -> None:
    assert (await ask(running.client)).status_code == 200
    assert await leased(running.registry.bus, REQUESTS, await early_in_a_minute(running)) == 0


async def test_requests_beyond_the_minutes_budget_are_refused_with_the_figures_and_when_to_come_again(running: Cluster) -> None:
    await limit(running, requests_per_minute=3)
    await early_in_a_minute(running)
    answers = [await ask(running.client, stream=stream) for stream in (False, True, False, True)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    error = answers[-1].json()["error"]
    assert error["code"] == "request_rate_exceeded"
    assert (error["asked"], error["held"], error["limit"]) == (1, 3, 3)
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert len(running.worker.attempts) == 3, "nothing of a refused request reaches a worker"


async def test_four_routers_together_let_through_the_budget_and_no_more(running: Cluster, more: More) -> None:
    clients = [running.client] + [await more.start() for _ in range(3)]
    await limit(running, *more.routers, requests_per_minute=40)
    minute = await early_in_a_minute(running)
    clock = running.router.table.clock
    statuses: list[int] = []
    while statuses.count(200) < 40 and len(statuses) < 2000 and clock.unix_s() % 60.0 < 55.0:
        statuses += [answer.status_code for answer in await at_once(clients, 40)]
    statuses += [answer.status_code for answer in await at_once(clients, 40)]
    assert int(clock.unix_s() // 60) == minute, "the machine stood still: the test says nothing"
    assert set(statuses) == {200, 429}
    lost = [router for router in (running.router, *more.routers) if router.rates is not None and router.rates.lost_blocks]
    assert statuses.count(200) == 40 or (lost and statuses.count(200) < 40)
    assert len(running.worker.attempts) == statuses.count(200)

    async def returned() -> bool:
        return await leased(running.registry.bus, REQUESTS, minute) <= 40

    await until(returned)  # what was asked for beyond the limit


async def test_a_router_that_stops_gives_back_what_it_did_not_use(running: Cluster, more: More) -> None:
    client = await more.start()
    await limit(running, *more.routers, requests_per_minute=1000)
    minute = await early_in_a_minute(running)
    assert (await ask(client)).status_code == 200
    bus = running.registry.bus
    assert await leased(bus, REQUESTS, minute) > 1
    await more.stop(0)

    async def one() -> bool:
        return await leased(bus, REQUESTS, minute) == 1

    await until(one)


async def test_an_idle_routers_block_serves_the_others(running: Cluster, more: More) -> None:
    client = await more.start()
    await limit(running, *more.routers, requests_per_minute=1000)
    minute = await early_in_a_minute(running)
    assert (await ask(client)).status_code == 200
    assert await leased(running.registry.bus, REQUESTS, minute) > 2

    async def little() -> bool:
        return await leased(running.registry.bus, REQUESTS, minute) == 2

    await until(little)  # the one that was used, and one kept for the next


async def test_the_first_requests_of_a_minute_find_their_lease_there_on_every_router(
    running: Cluster, more: More, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await more.start()
    await limit(running, *more.routers, requests_per_minute=1000, tokens_per_minute=1_000_000)
    minute = await early_in_a_minute(running)
    for one in (running.client, client):
        assert (await ask(one, max_tokens=300)).status_code == 200
    running.registry.beating = False  # its next heartbeats would set the clock back
    routers = (running.router, *more.routers)
    for router in routers:
        router.table.clock.heard((minute + 1) * 60.0 - 0.9)

    def ahead(router: Router, kind: str) -> int:
        assert router.rates is not None
        account = router.rates.account(kind, SALES)
        return account.lease.left_in(minute + 1) if account is not None else 0

    await until(lambda: all(ahead(router, kind) for router in routers for kind in (REQUESTS, TOKENS)))
    for router in routers:
        router.table.clock.heard((minute + 1) * 60.0 + 5.0)

    async def waits(*_: Any) -> None:
        raise AssertionError("a request waited for the bus")

    monkeypatch.setattr(Rates, "_wait", waits)
    for one in (running.client, client):
        assert (await ask(one, max_tokens=300)).status_code == 200
    assert await leased(running.registry.bus, REQUESTS, minute + 1) > 0


def answering(prompt_tokens: int, completion_tokens: int) -> Any:
    async def answer(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head(content_type="application/json")
        await attempt.say(FrameKind.BODY, b"{}")
        await attempt.say(FrameKind.END, encode_frames(Totals(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)))

    return answer


async def test_tokens_are_charged_by_an_estimate_and_settled_by_what_was_used(running: Cluster) -> None:
    running.worker.behaviour = answering(10, 30)
    await limit(running, tokens_per_minute=1000)
    await early_in_a_minute(running)
    for _ in range(10):  # more than 500 each by estimate, 40 in the end
        assert (await ask(running.client, max_tokens=500)).status_code == 200
    refused = await ask(running.client, max_tokens=700)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert error["code"] == "token_rate_exceeded"
    assert error["asked"] > 700
    assert error["limit"] == 1000
    assert (await ask(running.client, max_tokens=100)).status_code == 200


async def test_a_request_for_more_than_a_whole_minute_is_refused_at_once(running: Cluster) -> None:
    await limit(running, tokens_per_minute=1000)
    refused = await ask(running.client, max_tokens=300, n=4)
    assert refused.status_code == 429
    assert "ask for fewer" in refused.json()["error"]["message"]
    assert running.worker.attempts == []


@pytest.mark.parametrize(
    ("body", "least"),
    [
        ({"prompt": ["one", "two", "three"], "max_tokens": 400}, 1200),
        ({"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 400}, 1600),
        ({"prompt": [7] * 1500, "max_tokens": 1}, 1500),
    ],
)
async def test_lists_of_prompts_and_of_token_ids_are_charged_for_what_they_hold(running: Cluster, body: dict[str, Any], least: int) -> None:
    await limit(running, tokens_per_minute=1000)
    refused = await running.client.post("/v1/completions", json={"model": "tone", **body}, headers=AUTH)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_rate_exceeded")
    assert refused.json()["error"]["asked"] > least
    assert running.worker.attempts == []


async def test_a_request_that_was_refused_elsewhere_costs_no_tokens(running: Cluster) -> None:
    async def full(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.error("kv_quota_exceeded", asked_bytes=1, held_bytes=1, limit_bytes=1)

    running.worker.behaviour = full
    await limit(running, tokens_per_minute=1000)
    await early_in_a_minute(running)
    for _ in range(5):
        assert (await ask(running.client, max_tokens=900)).json()["error"]["code"] == "kv_quota_exceeded"


async def test_what_was_used_beyond_the_estimate_is_a_debt(running: Cluster) -> None:
    running.worker.behaviour = answering(700, 600)
    await limit(running, tokens_per_minute=1000)
    await early_in_a_minute(running)
    assert (await ask(running.client, max_tokens=1)).status_code == 200
    refused = await ask(running.client, max_tokens=1)
    assert refused.json()["error"]["code"] == "token_rate_exceeded"


async def test_without_max_tokens_a_request_is_charged_what_its_tenants_default_says(running: Cluster) -> None:
    await limit(running, tokens_per_minute=1000, default_max_tokens=2000)
    assert (await ask(running.client)).json()["error"]["asked"] > 2000
    await limit(running, tokens_per_minute=1000, default_max_tokens=100)
    assert (await ask(running.client)).status_code == 200


async def test_a_router_that_cannot_reach_the_counters_serves_from_its_lease_and_then_refuses(running: Cluster) -> None:
    await limit(running, requests_per_minute=1000)
    await early_in_a_minute(running)
    assert (await ask(running.client)).status_code == 200
    lease = running.router.rates.account("requests", SALES).lease  # type: ignore[union-attr]
    await until(lambda: lease.left > 0)
    await running.registry.bus.js.delete_stream(RATES_STREAM)
    held = lease.left
    statuses = [(await ask(running.client)).status_code for _ in range(held + 3)]
    assert statuses == [200] * held + [429] * 3


async def test_the_next_minute_is_another_budget_and_debts_are_paid_from_it(running: Cluster) -> None:
    clock = running.router.table.clock
    running.worker.behaviour = answering(700, 600)
    await limit(running, requests_per_minute=2, tokens_per_minute=1000)
    await early_in_a_minute(running)
    assert (await ask(running.client, max_tokens=1)).status_code == 200
    assert (await ask(running.client, max_tokens=1)).json()["error"]["code"] == "token_rate_exceeded"
    running.worker.behaviour = answering(5, 5)
    running.registry.beating = False  # its next heartbeats would set the clock back
    minute = int(clock.unix_s() // 60)
    clock.heard(clock.unix_s() + 60.0)
    assert running.router.rates is not None
    account = running.router.rates.account(TOKENS, SALES)
    assert account is not None
    await until(lambda: account.lease.minute == minute + 1)
    answers = [await ask(running.client, max_tokens=tokens) for tokens in (800, 300, 300)]
    assert [answer.status_code for answer in answers] == [429, 200, 200], "300 of the 1000 were owed"
    assert (await ask(running.client, max_tokens=1)).json()["error"]["code"] == "request_rate_exceeded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 10**30),
        ("max_tokens", True),
        ("max_completion_tokens", -5),
        ("max_output_tokens", 2**40),
        ("n", -1),
        ("n", [1]),
        ("n", 1e300),
        ("stream", "yes"),
        ("model", 7),
    ],
)
async def test_absurd_numbers_in_a_body_are_refused_by_name(running: Cluster, field: str, value: Any) -> None:
    content = json.dumps({"model": "tone"} | {field: value})
    response = await running.client.post("/v1/chat/completions", content=content, headers=AUTH)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert running.worker.attempts == []
