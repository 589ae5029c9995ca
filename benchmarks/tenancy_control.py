"""`python -m benchmarks.tenancy_control`: what tenancy costs in the router, and whether quotas hold while many write at once.

1,000 tenants with 10 adapters each stand in the routers' tables. Figures go to benchmarks/results/tenancy.json.
"""

import argparse
import asyncio
import hashlib
import logging
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter, perf_counter_ns, thread_time
from typing import Any

import msgspec
import structlog
from rich.console import Console

from benchmarks.tenancy.results import merge
from services.registry.guarantees import GuaranteeService
from services.registry.mounting import Mounting
from services.registry.store import Store, open_store
from services.router.clock import ClusterClock
from services.router.crowd import Crowd
from services.router.dispatch import Dispatcher
from services.router.fleet import Fleet
from services.router.metrics import Metrics
from services.router.peek import peek, tokens_asked
from services.router.rates import Rates
from services.router.resolve import authenticate, resolve, speaks_for
from services.router.routes import RouteTable
from services.router.settings import RouterSettings
from shared.bus import Bus, BusSettings, Entry, Mirror, connect, open_bucket
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, state
from shared.contracts.adapters import Mount, PoolEntry, PoolWorker
from shared.contracts.base import EngineLimits
from shared.contracts.rates import REQUESTS, TOKENS
from shared.contracts.state import Tenant
from shared.contracts.tenancy import TenantLimits
from shared.errors import QuotaExceeded, TenantryError
from shared.policy.admission import Ask, decide, held_bytes
from shared.policy.lifecycle import AdapterState
from shared.policy.mounts import Change
from shared.policy.placement import slots_held
from shared.runtime import end, freeze_startup_objects
from tests.integration.registry_rig import Admin
from tests.integration.test_shares import registries, working
from tests.share_pool import ShareWorker, Tally, route, watching

TENANTS, ADAPTERS, ROUTERS, REGISTRIES = 1000, 10, 4, 8
KV_BYTES, CONCURRENT = 1000, 10


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def secret(number: int) -> str:
    return f"tk_{number:05}"


def configuration(pools: int) -> dict[str, bytes]:
    """STATE keys and values: every tenant with a key and limits, its adapters all in one of the pools."""
    found: dict[str, bytes] = {}
    mounts: list[dict[str, Mount]] = [{} for _ in range(pools)]
    aliases: list[dict[str, dict[str, str]]] = [{} for _ in range(pools)]
    limits = TenantLimits(requests_per_minute=10**6, tokens_per_minute=10**9, max_concurrent=8)
    for number in range(TENANTS):
        name, tenant_id = f"team{number}", f"tn_{number:05}"
        found[state.TENANT_PREFIX + name] = state.encode(Tenant(tenant_id=tenant_id, name=name, limits=limits))
        hashed = hashlib.sha256(secret(number).encode()).hexdigest()
        found[state.KEY_PREFIX + hashed] = state.encode(state.ApiKey(key_id=f"key_{number}", label="", tenants=(name,)))
        for each in range(ADAPTERS):
            mount = Mount(
                adapter_id=f"ad_{number:05}_{each:02}aaaaaaaaaaaaaaaa",
                tenant_id=tenant_id,
                tenant=name,
                name=f"adapter{each}",
                version=1,
                digest=f"sha256:{hashed}",
                worker_id=f"w{each % 8}",
                state=AdapterState.READY,
                rank=16,
                rank_class=16,
                slot_bytes=1 << 20,
                true_bytes=1 << 20,
            )
            mounts[number % pools][mount.adapter_id] = mount
            aliases[number % pools].setdefault(name, {})[mount.name] = mount.adapter_id
    for number in range(pools):
        workers = {
            f"w{each}": PoolWorker(worker_id=f"w{each}", incarnation="i", limits=EngineLimits(slots=4000, max_rank=64, bytes_per_rank=1))
            for each in range(8)
        }
        entry = PoolEntry(
            pool_id=f"pool{number}", base=f"base{number}@{'ab' * 32}", workers=workers, mounts=mounts[number], aliases=aliases[number]
        )
        found[state.POOL_PREFIX + entry.pool_id] = adapters.encode(entry)
    return found


def table_of(values: dict[str, bytes]) -> RouteTable:
    table = RouteTable()
    for revision, (key, value) in enumerate(values.items(), 1):
        table.apply(key, Entry(value, revision))
    return table


def resolving(table: RouteTable, count: int) -> dict[str, float]:
    chance = random.Random(1)
    asks = [(secret(chance.randrange(TENANTS)), f"adapter{chance.randrange(ADAPTERS)}") for _ in range(count)]
    freeze_startup_objects()
    taken: list[float] = []
    for key, model in asks:
        started = perf_counter_ns()
        resolve(table, key, "", model)
        taken.append((perf_counter_ns() - started) / 1000)
    return {"resolve_p50_us": round(percentile(taken, 0.5), 2), "resolve_p99_us": round(percentile(taken, 0.99), 2)}


async def checks(table: RouteTable, bus: Bus, count: int) -> dict[str, float]:
    """CPU time that scope and rate checks add to a request: charged and settled, with a lease that lasts; and what the peek costs more."""
    dispatcher = Dispatcher(bus, "r_bench", table, Fleet(), RouterSettings(), Metrics())
    clock = ClusterClock()
    clock.heard(1_000_000_000.0)
    rates = Rates(dispatcher, clock, Metrics())
    tenant = table.tenants["team1"]
    charge = None
    body = msgspec.json.encode({"model": "adapter1", "messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 64})
    found = peek(body)
    chosen = resolve(table, secret(1), "", "adapter1")
    now_s = asyncio.get_running_loop().time()
    for kind, limit in ((REQUESTS, 10**9), (TOKENS, 10**12)):
        lease = rates._account(kind, tenant.tenant_id, limit, now_s).lease
        lease.granted(lease.minute, limit // 2, limit // 2, now_s)
    limits = msgspec.structs.replace(tenant.limits, requests_per_minute=10**9, tokens_per_minute=10**12)
    crowd = Crowd("requests", 100)
    best = dict.fromkeys(("rates", "scope", "crowd", "peek"), float("inf"))
    for _ in range(7):
        started = thread_time()
        for _ in range(count):
            if limits.requests_per_minute is None and limits.tokens_per_minute is None:
                continue
            tokens = tokens_asked(found, "/v1/chat/completions", len(body), limits, chosen)
            charge = await rates.admit(tenant.tenant_id, limits, tokens, now_s)
            assert charge is not None
            rates.settle(charge, 100, now_s)
        best["rates"] = min(best["rates"], (thread_time() - started) / count * 1e6)
        key = authenticate(table, secret(1))
        started = thread_time()
        for _ in range(count):
            assert state.Scope.INFER in key.scopes
            assert not key.expires_at
        best["scope"] = min(best["scope"], (thread_time() - started) / count * 1e6)
        started = thread_time()
        for _ in range(count):
            name = speaks_for(table, key, "").name
            crowd.enter(name)
            crowd.leave(name)
        best["crowd"] = min(best["crowd"], (thread_time() - started) / count * 1e6)
        best["peek"] = min(best["peek"], _peek_more_us(body, count))
    return {
        "rate_check_us": round(best["rates"], 2),
        "scope_check_us": round(best["scope"], 2),
        "crowd_check_us": round(best["crowd"], 2),
        "peek_more_us": round(best["peek"], 2),
    }


class _Before(msgspec.Struct, gc=False):
    """What was read of a body before there were budgets."""

    model: str | None = None
    stream: bool | None = None


def _peek_more_us(body: bytes, count: int) -> float:
    before = msgspec.json.Decoder(_Before).decode
    started = thread_time()
    for _ in range(count):
        peek(body)
    with_numbers = thread_time() - started
    started = thread_time()
    for _ in range(count):
        before(body)
    return (with_numbers - (thread_time() - started)) / count * 1e6


async def visible(bus: Bus, server: EmbeddedNats, values: dict[str, bytes], rounds: int) -> dict[str, float]:
    """From a write until the last of four routers' tables shows it. The routers share this process, one after the other."""
    bucket = await open_bucket(bus, state.STATE_BUCKET, create=True)
    for key, value in values.items():
        await bucket.put(key, value)
    found: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        tables: list[RouteTable] = []
        for number in range(ROUTERS):
            own = await connect(BusSettings(url=server.url, name=f"router{number}"))
            stack.push_async_callback(own.close)
            table = RouteTable()
            mirror = Mirror(own, await open_bucket(own, state.STATE_BUCKET), table.apply)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            task = tasks.create_task(mirror.run())
            stack.push_async_callback(end, [task])
            await mirror.synced.wait()
            tables.append(table)
        freeze_startup_objects()
        pool_key = next(key for key in values if key.startswith(state.POOL_PREFIX))
        tenant_key = next(key for key in values if key.startswith(state.TENANT_PREFIX))
        key_key = next(key for key in values if key.startswith(state.KEY_PREFIX))
        for name, key in (("key", key_key), ("tenant", tenant_key), ("pool", pool_key)):
            taken: list[float] = []
            for _ in range(rounds):
                versions = [table.version for table in tables]
                started = perf_counter()
                await bucket.put(key, values[key])
                while any(table.version == version for table, version in zip(tables, versions, strict=True)):
                    await asyncio.sleep(0)
                taken.append((perf_counter() - started) * 1000)
                await asyncio.sleep(0.02)
            found[f"visible_{name}_p50_ms"] = round(percentile(taken, 0.5), 1)
            found[f"visible_{name}_max_ms"] = round(max(taken), 1)
    return found


class Ledger:
    """Looks at every revision of a pool's entry, as it is written."""

    def __init__(self, limits: dict[str, int], kv_bytes: int) -> None:
        self.limits = limits
        self.kv_bytes = kv_bytes
        self.revisions = 0
        self.overdrafts = 0

    def over(self, store: Store) -> None:
        """Whatever this store writes from now on is looked at."""
        write = store.live.update

        async def update(key: str, value: bytes, revision: int) -> int:
            written = await write(key, value, revision)
            self._look(adapters.decode_pool(value))
            return written

        store.live.update = update

    def _look(self, pool: PoolEntry) -> None:
        self.revisions += 1
        self.overdrafts += sum(pool.guaranteed.values()) > self.kv_bytes
        self.overdrafts += any(held_bytes(pool, tenant_id) > limit for tenant_id, limit in self.limits.items())
        self.overdrafts += any(slots_held(pool, name) > worker.limits.slots for name, worker in pool.workers.items())


@asynccontextmanager
async def stores(server: EmbeddedNats, count: int) -> AsyncIterator[list[Store]]:
    """Of registries, each on a connection of its own."""
    async with AsyncExitStack() as stack:
        found: list[Store] = []
        for number in range(count):
            bus = await connect(BusSettings(url=server.url, name=f"registry{number}"))
            stack.push_async_callback(bus.close)
            found.append(await open_store(bus))
        yield found


async def reserving(server: EmbeddedNats, attempts: int) -> dict[str, int]:
    """Registries reserve slots, VRAM and KV guarantees in one pool's entry, all at once."""
    tenants = [Tenant(tenant_id=f"tn_{number}", name=f"team{number}", vram_quota_bytes=24) for number in range(6)]
    limits = EngineLimits(slots=8, max_rank=8, bytes_per_rank=1, kv_blocks=100, kv_block_bytes=10)
    ledger = Ledger({tenant.tenant_id: tenant.vram_quota_bytes for tenant in tenants}, 2 * 1000)
    tally = {"attempts": 0, "reserved": 0, "refused": 0}
    async with stores(server, REGISTRIES) as found:
        live = found[0].live
        workers = {name: PoolWorker(worker_id=name, incarnation="i", limits=limits) for name in ("w1", "w2")}
        await live.put(state.POOL_PREFIX + "bench", adapters.encode(PoolEntry(pool_id="bench", base="b@1", workers=workers)))
        async with asyncio.TaskGroup() as group:
            for number, store in enumerate(found):
                ledger.over(store)
                for lane in range(2):
                    group.create_task(_reserve(store, tenants, tally, attempts // REGISTRIES // 2, random.Random(number * 10 + lane)))
    return tally | {"revisions": ledger.revisions, "overdrafts": ledger.overdrafts}


async def _reserve(store: Store, tenants: list[Tenant], tally: dict[str, int], attempts: int, chance: random.Random) -> None:
    mounting = Mounting(store)
    guarantees = GuaranteeService(store, mounting, 1.0)
    for number in range(attempts):
        tenant = chance.choice(tenants)
        tally["attempts"] += 1
        doing: Callable[[], Awaitable[Any]]
        if chance.random() < 0.3:
            size = chance.choice([0, 200, 700, 1500])
            doing = lambda t=tenant, s=size: guarantees.raise_to(t.tenant_id, s)  # noqa: E731
            if chance.random() < 0.5:
                doing = lambda t=tenant, s=size: guarantees.lower_to(t.tenant_id, s)  # noqa: E731
        else:
            doing = lambda t=tenant, n=number: _mount_or_leave(mounting, t, f"ad_{chance.getrandbits(40):x}", n, chance)  # noqa: E731
        try:
            await doing()
            tally["reserved"] += 1
        except (QuotaExceeded, TenantryError):
            tally["refused"] += 1


async def _mount_or_leave(mounting: Mounting, tenant: Tenant, adapter_id: str, number: int, chance: random.Random) -> None:
    name = f"a{number}_{adapter_id}"
    ask = Ask(adapter_id=adapter_id, name=name, digest="d", rank=8, true_bytes=8, artifact="", artifact_sha256="", artifact_bytes=0)

    async def change(pool: PoolEntry, revision: int) -> Change | TenantryError:
        if len(pool.mounts) > chance.randint(4, 16):
            left = dict(pool.mounts)
            del left[chance.choice(list(left))]
            return Change(pool=msgspec.structs.replace(pool, mounts=left))
        decided = decide(pool, tenant, ask, revision)
        return decided if isinstance(decided, TenantryError) else Change(pool=decided.pool)

    await mounting.change("bench", change)


async def sharing(server: EmbeddedNats, bus: Bus, attempts: int) -> dict[str, int]:
    """Two workers enforce their parts of a tenant's quota against four routers while eight registries move room between them."""
    async with registries(server, REGISTRIES) as manager:
        tenant = await manager.tenant("sales", limits={"kv_quota_bytes": KV_BYTES, "max_concurrent": CONCURRENT})
        assert isinstance(manager, Admin)
        pool = [ShareWorker(bus, f"w{number}", tenant.tenant_id) for number in (1, 2)]
        tally = Tally(KV_BYTES, CONCURRENT)
        async with working(*pool), watching(bus, tenant.tenant_id, tally), asyncio.TaskGroup() as routers:
            for number in range(ROUTERS):
                routers.create_task(route(pool, tally, attempts // ROUTERS, random.Random(number), favourite_every=300))
        return {
            "attempts": tally.attempts,
            "reserved": sum(tally.admitted.values()),
            "revisions": tally.entries,
            "overdrafts": tally.overdrafts,
        }


@asynccontextmanager
async def on_a_server() -> AsyncIterator[tuple[EmbeddedNats, Bus]]:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder) / "nats")
        await server.start()
        bus = await connect(BusSettings(url=server.url, name="bench"))
        try:
            yield server, bus
        finally:
            await bus.close()
            await server.stop()


async def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    figures: dict[str, Any] = {}
    values = configuration(args.pools)
    table = table_of(values)
    figures |= resolving(table, args.resolves)
    async with on_a_server() as (server, bus):
        figures |= await checks(table, bus, args.resolves // 10)
        figures |= await visible(bus, server, values, args.rounds)
    async with on_a_server() as (server, bus):
        ledger = await reserving(server, args.attempts)
    async with on_a_server() as (server, bus):
        shares = await sharing(server, bus, args.attempts)
    figures |= {"overdrafts": ledger["overdrafts"] + shares["overdrafts"], "overdrafts_ledger": ledger, "overdrafts_shares": shares}
    stands = f"{TENANTS} tenants x {ADAPTERS} adapters in {args.pools} pools"
    how = {
        "resolve_p99_us": f"{args.resolves} calls of resolve in process, {stands}, each timed by itself",
        "rate_check_us": "CPU time to charge and settle requests and tokens of a leased budget, best of 7 loops; the other checks likewise",
        "visible_pool_max_ms": f"a write until the last of {ROUTERS} routers' tables shows it, {stands}, all routers in one process",
        "overdrafts": f"{REGISTRIES} registries: {ledger['attempts']} concurrent reservations of slots, VRAM and KV guarantees in one "
        f"pool's entry, every revision looked at; {shares['attempts']} reservations by 2 workers from their parts, {ROUTERS} routers",
    }
    return figures, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--resolves", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--attempts", type=int, default=10_000)
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures, how = asyncio.run(measure(args))
    if not args.dry:
        merge(figures, how)
    Console().print_json(data=figures)


if __name__ == "__main__":
    main()
