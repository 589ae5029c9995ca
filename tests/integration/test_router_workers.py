"""Workers that bounce, vanish, freeze, restart or die: another attempt where nothing was sent, an explicit error where something was."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from shared.bus.embedded import EmbeddedNats
from shared.contracts.inference import FrameKind
from shared.policy.lifecycle import AdapterState
from tests.router_fakes import Attempt, Cluster, answers, cluster, mount, pool_entry, until


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server) as found:
        yield found


async def test_a_bounced_request_is_resolved_again_and_the_client_sees_nothing(running: Cluster) -> None:
    second = mount("tone", "sales", version=2)
    await running.worker.hold(second.adapter_id)

    async def bounces_the_old(attempt: Attempt) -> None:
        if attempt.request.handle.version == 1:
            await running.registry.put_pool(pool_entry(mount("tone", "sales"), second, aliases={"sales": {"tone": second.adapter_id}}))
            await attempt.bounce("draining")
        else:
            await attempt.answer()

    running.worker.behaviour = bounces_the_old
    response = await running.ask("tone")
    assert (response.status_code, response.json()["model"], response.headers["x-tenantry-adapter"]) == (200, "tone@2", "tone@2")
    assert [attempt.request.attempt for attempt in running.worker.attempts][-1] > 1


async def test_a_request_bounced_by_a_drain_is_told_that_the_adapter_is_gone(running: Cluster) -> None:
    async def bounces(attempt: Attempt) -> None:
        await running.registry.put_pool(pool_entry(mount("help", "cs")))
        await attempt.bounce("draining")

    running.worker.behaviour = bounces
    response = await running.ask("tone")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_not_found")


async def test_a_worker_that_no_longer_holds_the_adapter_is_noticed_at_once(running: Cluster) -> None:
    await running.worker.drop(mount("tone", "sales").adapter_id)
    other = await running.second_worker()
    moved = mount("tone", "sales", worker_id="w1")
    await other.hold(moved.adapter_id)

    async with asyncio.TaskGroup() as group:
        asked = group.create_task(running.ask("tone"))
        await until(lambda: running.router.metrics.redispatches)
        await running.registry.put_pool(pool_entry(moved, workers=("w0", "w1")))
    assert (asked.result().status_code, asked.result().headers["x-tenantry-worker"]) == (200, "w1")


async def test_a_worker_that_does_not_accept_in_time_is_passed_over(running: Cluster) -> None:
    other = await running.second_worker()
    await running.registry.put_pool(pool_entry(mount("tone", "sales"), workers=("w0", "w1")))
    await until(lambda: len(running.router.table.pools["main"].entry.workers) == 2)

    async def silent(attempt: Attempt) -> None:
        await attempt.cancelled.wait()
        await attempt.answer()  # wakes up late: nobody believes it

    running.worker.behaviour = silent
    for _ in range(2):
        response = await running.ask("demo")
        assert (response.status_code, response.headers["x-tenantry-worker"]) == (200, "w1")
    assert other.attempts
    assert {attempt.cancel_reason for attempt in running.worker.attempts} == {"attempt_given_up"}


async def test_a_silent_worker_that_is_the_only_one_is_a_503_with_retry_after(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, lone_accept_timeout_s=0.1, last_accept_timeout_s=0.2) as running:

        async def silent(attempt: Attempt) -> None:
            await attempt.cancelled.wait()

        running.worker.behaviour = silent
        response = await running.ask("tone")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_unavailable")
        assert response.headers["retry-after"] == "1"
        assert [attempt.request.attempt for attempt in running.worker.attempts] == [1, 2, 3]


async def test_the_only_worker_is_not_asked_twice_for_a_short_stall(running: Cluster) -> None:
    async def stalls(attempt: Attempt) -> None:
        await asyncio.sleep(2 * running.router.settings.accept_timeout_s)
        await attempt.answer()

    running.worker.behaviour = stalls
    assert (await running.ask("tone")).status_code == 200
    assert len(running.worker.attempts) == 1


async def test_a_request_lost_with_the_bus_is_sent_again_after_the_reconnect(running: Cluster) -> None:
    async def never_heard(attempt: Attempt) -> None:
        running.worker.behaviour = answers
        await running.nats.kill()
        await running.nats.start()

    running.worker.behaviour = never_heard
    response = await running.ask("tone")
    assert (response.status_code, response.json()["attempt"]) == (200, 2)


async def test_a_dead_worker_ends_a_begun_stream_with_an_error_event(running: Cluster) -> None:
    async def begins(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.token("one")

    running.worker.behaviour = begins
    text = ""
    with pytest.raises(httpx.RemoteProtocolError):
        async with running.streaming() as response:
            async for piece in response.aiter_text():
                text += piece
                await running.worker.die()
    assert '"code":"worker_lost"' in text


async def test_a_request_of_a_dead_worker_that_had_sent_nothing_is_served_elsewhere(running: Cluster) -> None:
    other = await running.second_worker()
    await running.registry.put_pool(pool_entry(mount("tone", "sales"), workers=("w0", "w1")))
    await until(lambda: len(running.router.table.pools["main"].entry.workers) == 2)

    async def begins(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head(content_type="application/json")
        await attempt.say(FrameKind.BODY, b'{"half":')
        await running.worker.die()

    running.worker.behaviour = begins
    responses = [await running.ask("demo") for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert running.worker.attempts
    assert len(other.attempts) == 2


async def test_a_restarted_worker_is_told_by_its_new_incarnation(running: Cluster) -> None:
    async def begins(attempt: Attempt) -> None:
        await attempt.accept()
        running.worker.incarnation = "01B"
        running.worker.behaviour = answers
        await running.worker.report()

    running.worker.behaviour = begins
    response = await running.ask("tone")
    assert (response.status_code, response.json()["attempt"]) == (200, 2)


async def test_a_request_whose_worker_restarts_waits_until_the_adapter_is_ready_again(running: Cluster) -> None:
    loading, ready = mount("tone", "sales", state=AdapterState.LOADING), mount("tone", "sales")
    aliases = {"sales": {"tone": ready.adapter_id}}

    async def restarts(attempt: Attempt) -> None:
        await attempt.accept()
        running.worker.behaviour = answers
        running.worker.incarnation = "01B"
        await running.registry.put_pool(pool_entry(loading, aliases=aliases, incarnation="01B"))
        await until(lambda: running.router.table.pools["main"].entry.workers["w0"].incarnation == "01B")
        await running.worker.report()
        await until(lambda: running.router.metrics.redispatches)
        assert (await running.ask("tone")).status_code == 503
        await running.registry.put_pool(pool_entry(ready, aliases=aliases, incarnation="01B"))

    running.worker.behaviour = restarts
    response = await running.ask("tone")
    assert (response.status_code, response.json()["attempt"]) == (200, 2)


async def test_a_worker_that_falls_silent_is_given_up(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, progress_timeout_s=0.5) as running:

        async def falls_silent(attempt: Attempt) -> None:
            if attempt.request.attempt == 1:
                await attempt.accept()
            else:
                await attempt.answer()

        running.worker.behaviour = falls_silent
        response = await running.ask("tone")
        assert (response.status_code, running.worker.attempts[0].cancel_reason) == (200, "attempt_given_up")


async def test_load_reports_decide_which_worker_gets_a_base_request(running: Cluster) -> None:
    other = await running.second_worker()
    await running.registry.put_pool(pool_entry(mount("tone", "sales"), workers=("w0", "w1")))
    await until(lambda: len(running.router.table.pools["main"].entry.workers) == 2)
    await running.worker.report(in_flight=6)
    await other.report(in_flight=1)
    await until(lambda: len([peer for peer in running.router.fleet.peers.values() if peer.report]) == 2)
    for _ in range(4):
        assert (await running.ask("demo")).headers["x-tenantry-worker"] == "w1"
