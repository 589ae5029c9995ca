"""Whether quotas hold while eight registries write at once: registries, as processes, that reserve in one entry and that move shares."""

import asyncio
import contextlib
import random

import msgspec

from benchmarks.tenancy_control.processes import output_of, running
from benchmarks.tenancy_control.reserving import Tally as Reserved
from benchmarks.tenancy_control.reserving import make_pool, overdrafts
from shared.bus import Bus, NoResponder, RequestTimeout
from shared.bus.embedded import EmbeddedNats
from tests.integration.registry_rig import Admin
from tests.integration.test_shares import working
from tests.share_pool import ShareWorker, Tally, route, watching

REGISTRIES, ROUTERS = 8, 4
KV_BYTES, CONCURRENT = 1000, 10
_PATIENCE_S = 60.0
_decode = msgspec.json.Decoder(Reserved).decode


async def reserving(
    server: EmbeddedNats, bus: Bus, attempts: int, *, careless: bool = False, registries: int = REGISTRIES
) -> dict[str, int]:
    """Slots, VRAM and KV guarantees of one pool, by registries in processes of their own, added up."""
    await make_pool(bus)
    arguments = ("--url", server.url, "--attempts", str(attempts // registries), *(["--careless"] if careless else []))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(output_of("benchmarks.tenancy_control.reserving", *arguments, "--number", str(number)))
            for number in range(registries)
        ]
    tallies = [_decode(task.result()) for task in tasks]
    steps = [step for tally in tallies for step in tally.steps]
    return {
        "attempts": sum(tally.attempts for tally in tallies),
        "reserved": sum(tally.reserved for tally in tallies),
        "refused": sum(tally.refused for tally in tallies),
        "revisions": len(steps),
        "overdrafts": overdrafts(steps),
    }


async def sharing(server: EmbeddedNats, bus: Bus, attempts: int) -> dict[str, int]:
    """Two workers enforce their parts of a tenant's quota against four routers while registry processes move room between them."""
    settings = {"TENANTRY_REGISTRY_SHARES_S": "0.03", "TENANTRY_REGISTRY_RECONCILE_S": "0.5"}
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(REGISTRIES):
            await stack.enter_async_context(running("services.registry", server.url, settings))
        manager = Admin(bus)
        tenant = await _made(manager)
        pool = [ShareWorker(bus, f"w{number}", tenant) for number in (1, 2)]
        tally = Tally(KV_BYTES, CONCURRENT)
        async with working(*pool), watching(bus, tenant, tally), asyncio.TaskGroup() as routers:
            for number in range(ROUTERS):
                routers.create_task(route(pool, tally, attempts // ROUTERS, random.Random(number), favourite_every=300))
        return {
            "attempts": tally.attempts,
            "reserved": sum(tally.admitted.values()),
            "revisions": tally.entries,
            "overdrafts": tally.overdrafts,
        }


async def _made(manager: Admin) -> str:
    """A tenant's id, as soon as a registry hears."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            try:
                limits = {"kv_quota_bytes": KV_BYTES, "max_concurrent": CONCURRENT}
                return (await manager.tenant("sales", limits=limits)).tenant_id
            except (NoResponder, RequestTimeout):
                await asyncio.sleep(0.1)
