"""A key revoked through a registry ends on every router within a second of the asking, as routers at work see it."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin
from tests.integration.registry_rig import Admin, running_registry
from tests.integration.test_tenancy_whole import routers
from tests.waiting import until_async

REVOKED_WITHIN_S = 1.0  # what docs/tenancy.md promises


class Standstill:
    """How long this process's loop, in which all the routers run too, let nothing run at a stretch."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.005)
            self.longest_s = max(self.longest_s, loop.time() - before_s - 0.005)


@pytest.mark.parametrize("rotated", [False, True])
async def test_a_key_that_a_registry_revokes_is_refused_by_four_busy_routers_within_a_second(
    nats_server: EmbeddedNats, bus: Bus, rotated: bool
) -> None:
    async with running_registry(bus), routers(nats_server, 4) as clients:
        manager = Admin(bus)
        await manager.tenant("sales")
        key = msgspec.convert(await manager.ask(admin.CreateKey(tenants=("sales",))), admin.KeyView)
        headers = {"authorization": f"Bearer {key.secret}"}
        loop = asyncio.get_running_loop()
        served_until_s = [0.0] * len(clients)  # when the last request that was served had been sent
        refused = [asyncio.Event() for _ in clients]
        standstill = Standstill()

        async def use(number: int, client: httpx.AsyncClient) -> None:
            while not refused[number].is_set():
                sent_s = loop.time()
                status = (await client.get("/v1/models", headers=headers)).status_code
                assert status in (200, 401)
                if status == 200:
                    served_until_s[number] = sent_s
                elif served_until_s[number]:
                    refused[number].set()

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(standstill.watch())
            using = [group.create_task(use(number, client)) for number, client in enumerate(clients)]

            async def all_serve() -> bool:
                return all(served_until_s)

            await until_async(all_serve, what="every router serves it")
            asked_s = loop.time()
            standstill.longest_s = 0.0
            request: Any = admin.RotateKey(key_id=key.key_id, overlap_s=0.0) if rotated else admin.RevokeKey(key_id=key.key_id)
            await manager.ask(request)
            await asyncio.wait(using)
            watching.cancel()
        assert max(served_until_s) > asked_s - REVOKED_WITHIN_S, "they were at work"
        assert max(served_until_s) - asked_s < REVOKED_WITHIN_S + standstill.longest_s
