"""kill -9 of every part in mid-traffic: no wrong answer, no short answer that looks whole, state as before.

These tests break the session's stack and mend it; they run last of the directory by name order only so that a fault here shows
where it belongs.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psutil
import pytest

from tests.e2e.ask import TENANT_OF, Answer, Asker, ask, model_of
from tests.e2e.stack import Process, Stack, wait_for

ALLOWED_CODES = {"worker_lost", "worker_unavailable", "stream_gap", "bus_unavailable", "routes_stale", "adapter_not_ready", "engine_error"}


class Traffic:
    """Clients of every tenant asking without pause; remembers each answer with what it should have been."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.answers: list[tuple[str, Answer]] = []
        self.stopping = asyncio.Event()

    async def run(self, lanes: int = 12) -> None:
        async with self.asker.clients() as clients, asyncio.TaskGroup() as group:
            for lane in range(lanes):
                group.create_task(self._lane(clients, lane))

    async def _lane(self, clients: dict[str, Any], lane: int) -> None:
        number = lane
        while not self.stopping.is_set():
            name, pair = self.asker.mixed[number % len(self.asker.mixed)]
            answer = await ask(clients[TENANT_OF[name]], model_of(name), pair["question"], stream=lane % 2 == 0)
            self.answers.append((pair["answer"], answer))
            number += 7
            if answer.error is not None:
                await asyncio.sleep(0.1)

    def good(self) -> int:
        return sum(answer.error is None for _, answer in self.answers)

    def assert_nothing_wrong(self, may_break_connections: bool = False) -> None:
        """Whole answers are golden; everything else says so with a code."""
        for golden, answer in self.answers:
            if answer.error is None:
                assert answer.text == golden
                assert answer.finished == "stop"
                continue
            code = getattr(answer.error, "code", None) or (getattr(answer.error, "body", None) or {}).get("code")
            if not (may_break_connections and code is None):
                assert code in ALLOWED_CODES, repr(answer.error)
            assert not answer.finished
            assert golden.startswith(answer.text)


async def broken_in_traffic(stack: Stack, asker: Asker, break_it: Callable[[], None], mend: Callable[[], None], **judge: bool) -> Traffic:
    """Traffic before, while and after; returns once new answers are good again."""
    traffic = Traffic(asker)
    before = await asyncio.to_thread(state, stack)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(traffic.run())
        await good_answers(traffic, 20)
        await asyncio.to_thread(break_it)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(mend)
        mark = traffic.good()
        await good_answers(traffic, mark + 30, timeout_s=120)
        traffic.stopping.set()
        await running
    traffic.assert_nothing_wrong(**judge)
    await asyncio.to_thread(wait_for, lambda: state(stack) == before, 30, "the state as it was before")
    return traffic


async def good_answers(traffic: Traffic, count: int, timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while traffic.good() < count:
        assert time.monotonic() < give_up_at, [repr(answer.error) for _, answer in traffic.answers[-5:]]
        await asyncio.sleep(0.05)


def state(stack: Stack) -> Any:
    tenants = [(tenant.name, tenant.vram_held_bytes) for tenant in stack.admin.tenants()]
    adapters = sorted((view.tenant, view.name, view.version, view.digest, view.state) for view in stack.admin.adapters())
    return tenants, adapters


async def test_a_killed_registry_is_noticed_by_nobody(stack: Stack, asker: Asker) -> None:
    traffic = await broken_in_traffic(stack, asker, stack.registry.kill, stack.registry.start)
    assert [answer.error for _, answer in traffic.answers if answer.error is not None] == []


async def test_a_killed_bus_comes_back_and_no_stream_is_cut(stack: Stack, asker: Asker) -> None:
    traffic = await broken_in_traffic(stack, asker, stack.nats.kill, stack.start_nats)
    begun_and_cut = [answer for _, answer in traffic.answers if answer.error is not None and answer.text]
    assert begun_and_cut == []


async def test_a_killed_worker_ends_what_had_begun_explicitly_and_mounts_everything_again(stack: Stack, asker: Asker) -> None:
    children = psutil.Process(stack.worker.pid).children(recursive=True)
    assert children, "the engine runs in processes of its own"
    gone_after_s: list[float] = []

    def kill() -> None:
        stack.worker.kill()
        killed = time.monotonic()
        wait_for(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 20, "dead children")
        gone_after_s.append(time.monotonic() - killed)

    await broken_in_traffic(stack, asker, kill, stack.worker.start)
    assert gone_after_s[0] < 5.0


async def test_a_killed_router_ends_its_connections_openly_and_frees_the_engine(stack: Stack, asker: Asker) -> None:
    question, _ = asker.long_question("lora_sales")
    streams = [await asyncio.to_thread(raw_stream, stack, question) for _ in range(8)]
    await asyncio.to_thread(wait_for, lambda: sum(report["in_flight"] for report in stack.reports()) == 8, 10, "8 running requests")
    killed_at = datetime.now().astimezone()
    stack.router.kill()
    try:
        ends = [await asyncio.to_thread(read_to_end, stream) for stream in streams]
        ended = await asyncio.to_thread(wait_for, lambda: all_ended(stack.worker, killed_at, len(streams)), 10, "aborts")
    finally:
        stack.router.start()
        await asyncio.to_thread(stack.wait_ready)
    for end in ends:
        assert b"data: " in end
        assert not end.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in end
    assert max((at - killed_at).total_seconds() for at in ended) < 2.0  # promised: 1 s; this machine also runs the tests
    assert sum(report["in_flight"] for report in stack.reports()) == 0
    pair = asker.goldens["lora_sales"][0]
    async with asker.clients() as clients:
        answer = await ask(clients["sales"], "lora_sales", pair["question"], stream=True)
    assert answer.text == pair["answer"]


def raw_stream(stack: Stack, question: str) -> socket.socket:
    """A streaming request whose first piece has come."""
    body = json.dumps(
        {
            "model": "lora_sales", "messages": [{"role": "user", "content": question}],
            "max_tokens": 900, "stream": True, "temperature": 0, "ignore_eos": True,
        }
    )  # fmt: skip
    raw = socket.create_connection(("127.0.0.1", stack.port), 10)
    raw.settimeout(30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.keys['sales']}\r\n"
    raw.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    first = raw.recv(1 << 16)
    assert b" 200 " in first.split(b"\r\n", 1)[0], first
    while b"data: " not in first:
        first += raw.recv(1 << 16)
    return raw


def read_to_end(raw: socket.socket) -> bytes:
    got = b"data: "
    with raw:
        while True:
            try:
                piece = raw.recv(1 << 16)
            except ConnectionResetError:
                return got
            if not piece:
                return got
            got += piece


def all_ended(worker: Process, since: datetime, count: int) -> list[datetime] | None:
    """When `count` attempts ended because of their router, from the worker's own log; None until all have."""
    lines = [json.loads(line) for line in worker.log.read_text().splitlines() if '"attempt.ended"' in line]
    times = [datetime.fromisoformat(line["timestamp"]) for line in lines if "router" in line["outcome"]]
    after = [at for at in times if at >= since]
    return after if len(after) >= count else None


@pytest.mark.timeout(240)
async def test_what_a_worker_says_after_20_frozen_seconds_is_not_believed(stack: Stack, asker: Asker) -> None:
    traffic = Traffic(asker)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(traffic.run())
        await good_answers(traffic, 20)
        stack.worker.freeze()
        frozen = time.monotonic()
        await asyncio.sleep(20)
        during = len(traffic.answers)
        stack.worker.thaw()
        assert time.monotonic() - frozen >= 20
        await good_answers(traffic, traffic.good() + 30, timeout_s=60)
        traffic.stopping.set()
        await running
    traffic.assert_nothing_wrong()
    assert during > 0
