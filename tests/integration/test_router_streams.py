"""Frames that are late, doubled, out of order or lost; clients and NATS that go away in mid-stream."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from shared.bus.embedded import EmbeddedNats
from shared.contracts.inference import Frame, FrameKind, Head, Totals, encode
from tests.router_fakes import Attempt, Cluster, answers, cluster, events, until

DONE = ["a", "b", "c", "[DONE]"]


@pytest.fixture
async def running(nats_server: EmbeddedNats) -> AsyncIterator[Cluster]:
    async with cluster(nats_server) as found:
        yield found


def whole(attempt: Attempt) -> list[Frame]:
    """Every frame of a stream that says DONE, none of them sent."""
    frames = [attempt.frame(FrameKind.ACCEPTED), attempt.frame(FrameKind.HEAD, encode(Head(status=200, content_type="text/event-stream")))]
    frames += [attempt.frame(FrameKind.BODY, b"data: " + text.encode() + b"\n\n") for text in DONE]
    return [*frames, attempt.frame(FrameKind.END, encode(Totals()))]


async def cut(response_of: object) -> tuple[str, bool]:
    """What a stream said, and whether its connection ended as an incomplete response does."""
    text = ""
    try:
        async with response_of as response:  # type: ignore[attr-defined]
            async for piece in response.aiter_text():
                text += piece
    except httpx.RemoteProtocolError:
        return text, True
    return text, False


async def test_doubled_and_reordered_frames_make_one_right_answer(running: Cluster) -> None:
    async def shuffles(attempt: Attempt) -> None:
        frames = whole(attempt)
        for index in (0, 1, 3, 2, 2, 3, 0, 5, 4, 6, 1, 6):
            await attempt.send(frames[index])

    running.worker.behaviour = shuffles
    response = await running.ask(stream=True)
    assert events(response.text) == DONE
    assert running.worker.attempts[0].cancel_reason == ""


async def test_a_lost_frame_is_asked_for_again(running: Cluster) -> None:
    async def loses(attempt: Attempt) -> None:
        frames = whole(attempt)
        await attempt.send(*frames[:3], *frames[4:])

    running.worker.behaviour = loses
    assert events((await running.ask(stream=True)).text) == DONE
    assert running.worker.resends


async def test_a_lost_tail_shows_in_the_progress_frame(running: Cluster) -> None:
    async def loses(attempt: Attempt) -> None:
        frames = whole(attempt)
        await attempt.send(*frames[:3])
        await attempt.progress()

    running.worker.behaviour = loses
    assert events((await running.ask(stream=True)).text) == DONE


async def test_a_frame_that_cannot_be_had_again_is_an_explicit_error(running: Cluster) -> None:
    first_seen = asyncio.Event()

    async def loses(attempt: Attempt) -> None:
        frames = whole(attempt)
        await attempt.send(*frames[:3])
        await first_seen.wait()
        await attempt.send(*frames[4:])

    running.worker.behaviour = loses
    running.worker.obeys_resends = False
    text = ""
    with pytest.raises(httpx.RemoteProtocolError):
        async with running.streaming() as response:
            async for piece in response.aiter_text():
                text += piece
                first_seen.set()
    assert '"code":"stream_gap"' in text
    assert "[DONE]" not in text
    assert running.worker.attempts[0].cancelled.is_set() or await running.worker.attempts[0].cancelled.wait()


async def test_frames_of_other_attempts_incarnations_and_requests_are_ignored(running: Cluster) -> None:
    async def lies(attempt: Attempt) -> None:
        await attempt.accept()
        request = attempt.request
        wrong = b"data: wrong\n\n"
        await attempt.send(Frame(request.request_id, request.attempt + 1, 1, FrameKind.BODY, wrong))
        await attempt.send(Frame(request.request_id, request.attempt, 1, FrameKind.BODY, wrong), incarnation="00Z")
        await attempt.send(Frame("01JUNKNOWN", request.attempt, 1, FrameKind.BODY, wrong))
        await attempt.head()
        await attempt.token("right")
        await attempt.token("[DONE]")
        await attempt.end()

    running.worker.behaviour = lies
    assert events((await running.ask(stream=True)).text) == ["right", "[DONE]"]


async def test_progress_without_tokens_ends_at_the_inter_token_deadline(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, inter_token_timeout_s=0.5) as running:

        async def stalls(attempt: Attempt) -> None:
            await attempt.accept()
            await attempt.head()
            await attempt.token("one")
            while not attempt.cancelled.is_set():
                await attempt.progress()
                await asyncio.sleep(0.05)

        running.worker.behaviour = stalls
        text, incomplete = await cut(running.streaming())
        assert incomplete
        assert '"code":"deadline_exceeded"' in text


async def test_a_client_that_goes_away_cancels_the_attempt_at_once(running: Cluster) -> None:
    async def endless(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        while not attempt.cancelled.is_set():
            await attempt.token("more")
            await asyncio.sleep(0.01)

    running.worker.behaviour = endless
    async with running.streaming() as response:
        await anext(response.aiter_lines())
    await asyncio.wait_for(running.worker.attempts[0].cancelled.wait(), 2)
    assert running.worker.attempts[0].cancel_reason == "client_gone"


async def test_a_client_that_goes_away_before_the_first_byte_cancels_too(running: Cluster) -> None:
    async def queued(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.cancelled.wait()

    running.worker.behaviour = queued
    with pytest.raises(httpx.ReadTimeout):
        await running.ask("tone", timeout=0.5)
    await until(lambda: running.worker.attempts[0].cancel_reason == "client_gone")


async def test_a_client_that_does_not_read_is_cut_off_within_bounds(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, answer_buffer_bytes=100_000) as running:

        async def floods(attempt: Attempt) -> None:
            await attempt.accept()
            await attempt.head()
            while not attempt.cancelled.is_set():
                await attempt.token("x" * 50_000)
                await asyncio.sleep(0)

        running.worker.behaviour = floods
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1024)
        body = b'{"model":"tone","stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-sales\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: running.worker.attempts)
        await asyncio.wait_for(running.worker.attempts[0].cancelled.wait(), 20)
        await until(lambda: running.router.metrics.requests, 20)  # its connection was cut, though it never read
        writer.close()
        assert b"data: [DONE]" not in await reader.read()


async def test_a_nats_restart_in_mid_stream_cuts_nothing(running: Cluster) -> None:
    restarted = asyncio.Event()

    async def spans(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.head()
        await attempt.token("a")
        await restarted.wait()
        for text in DONE[1:]:
            await attempt.token(text)
        await attempt.end()

    running.worker.behaviour = spans
    text = ""
    async with running.streaming() as response:
        async for piece in response.aiter_text():
            text += piece
            if not restarted.is_set():
                await running.nats.kill()
                await until(lambda: not running.registry.bus.connected)
                refused = await running.ask("tone")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_unavailable")
                assert refused.headers["retry-after"]
                assert (await running.client.get("/ready")).status_code == 503
                await running.nats.start()
                await until(lambda: running.registry.bus.connected)
                restarted.set()
    assert events(text) == DONE

    async def served() -> bool:
        running.worker.behaviour = answers
        return (await running.ask("tone")).status_code == 200

    await until(served)


async def test_frames_lost_in_an_outage_are_asked_for_after_the_reconnect(running: Cluster) -> None:
    restarted = asyncio.Event()

    async def loses(attempt: Attempt) -> None:
        frames = whole(attempt)
        await attempt.send(*frames[:3])
        await restarted.wait()

    running.worker.behaviour = loses
    text = ""
    async with running.streaming() as response:
        async for piece in response.aiter_text():
            text += piece
            if not restarted.is_set():
                await running.nats.kill()
                await running.nats.start()
                restarted.set()
    assert events(text) == DONE


async def test_an_outage_longer_than_a_stream_may_stand_still_ends_it_with_an_explicit_error(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, inter_token_timeout_s=0.5) as running:

        async def begins(attempt: Attempt) -> None:
            await attempt.accept()
            await attempt.head()
            await attempt.token("a")

        running.worker.behaviour = begins
        text = ""
        with pytest.raises(httpx.RemoteProtocolError):
            async with running.streaming() as response:
                async for piece in response.aiter_text():
                    text += piece
                    await running.nats.kill()
        assert events(text)[0] == "a"
        assert '"code":"worker_lost"' in text
        await running.nats.start()


async def test_a_request_whose_budget_is_spent_is_a_504_and_is_cancelled(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, request_budget_s=0.5) as running:

        async def queued(attempt: Attempt) -> None:
            await attempt.accept()
            assert attempt.request.budget_s <= 0.5
            await attempt.cancelled.wait()

        running.worker.behaviour = queued
        response = await running.ask("tone", stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        await asyncio.wait_for(running.worker.attempts[0].cancelled.wait(), 5)
