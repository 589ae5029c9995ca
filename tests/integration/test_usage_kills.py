"""Registries killed with kill -9 at random moments while usage comes in: every request once, the same from each, adapters' time too."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus, Mirror, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, state
from shared.contracts.usage_query import UsageReply
from shared.errors import TenantryError
from shared.runtime import end
from tests.integration.registry_rig import Admin, FakeWorker, obeying
from tests.integration.test_registry_adapters import adapter
from tests.integration.test_registry_kills import RegistryProcess, answers
from tests.integration.test_usage_keeper import Ledger
from tests.integration.test_usage_projection import EVERYTHING, publish
from tests.usage_records import attempt, outcome
from tests.waiting import until, until_async

REQUESTS = 400


class UsageRegistry(RegistryProcess):
    """Keeps its projection over kills."""

    def __init__(self, server: EmbeddedNats, folder: Path, name: str) -> None:
        super().__init__(server, folder / name)
        self._env |= {
            "TENANTRY_REGISTRY_REGISTRY_ID": name,
            "TENANTRY_REGISTRY_USAGE_DB": str(folder / name / "usage.sqlite"),
            "TENANTRY_REGISTRY_USAGE_ROUND_S": "0.05",
            "TENANTRY_REGISTRY_USAGE_RESIDENCY_S": "0.2",
        }


async def sums(manager: Admin) -> tuple[int, int, int, int]:
    """Requests, attempts, output tokens, adapters' byte-milliseconds."""
    reply = msgspec.convert(await manager.ask(EVERYTHING, timeout_s=10.0), UsageReply)
    parts = [row.amounts for row in reply.rows]
    return (
        sum(part.requests for part in parts),
        sum(part.attempts for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.adapter_byte_ms for part in parts),
    )


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_registries_killed_again_and_again_count_every_request_and_byte_second_once(
    bus: Bus, nats_server: EmbeddedNats, tmp_path: Path, seed: int
) -> None:
    moments = random.Random(seed)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    registries = [UsageRegistry(nats_server, tmp_path, name) for name in ("one", "two")]
    for registry in registries:
        await registry.start()
    manager = Admin(bus)
    await until_async(lambda: answers(manager), timeout_s=20, what="a registry answers")
    ledger, done = Ledger(), asyncio.Event()

    async def serve() -> None:
        for number in range(REQUESTS):
            await publish(bus, attempt(f"r{number}", checkpoint=1, final=False), attempt(f"r{number}", checkpoint=2))
            await publish(bus, outcome(f"r{number}"))
            if number % 10 == 0:
                await asyncio.sleep(0.05)
        done.set()

    async def kill() -> None:
        while not done.is_set():
            await asyncio.sleep(moments.uniform(0.3, 1.2))
            victim = moments.choice(registries)
            await victim.end()
            await victim.start()

    async def mount() -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                await manager.add("sales", "tone", adapter(tmp_path, seed=number), tmp_path, wait_s=5.0)
                await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=5.0), timeout_s=8.0)
            except TenantryError:
                await asyncio.sleep(0.1)

    async with obeying(FakeWorker(bus)), asyncio.TaskGroup() as group:
        watching = group.create_task(Mirror(bus, await open_bucket(bus, state.STATE_BUCKET), ledger.note, f"{state.POOL_PREFIX}*").run())
        await manager.tenant("sales")
        async with asyncio.TaskGroup() as working:
            for work in (serve(), kill(), mount()):
                working.create_task(work)

        async def empty() -> bool:
            pool = await manager.pool()
            if pool.mounts:
                await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone"), timeout_s=8.0)
            return not pool.mounts and not pool.left

        await until_async(empty, timeout_s=30, what="nothing is mounted, and everything is told")
        counted = {await sums(manager) for _ in range(12)}
        revision = await manager.pool()
        await until(lambda: ledger.revisions[-1][1] == revision, what="the watch has seen the last revision")
        assert counted == {(REQUESTS, REQUESTS, 8 * REQUESTS, ledger.charged())}
        await end([watching])
    for registry in registries:
        await registry.end()
