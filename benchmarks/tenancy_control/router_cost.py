"""What looking up, checking scopes and charging budgets cost a request in the router, with the whole configuration in its table."""

import asyncio
import random
from time import perf_counter_ns, thread_time

import msgspec

from benchmarks.tenancy_control.configuration import ADAPTERS, TENANTS, secret
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
from shared.bus import Bus
from shared.contracts import state
from shared.contracts.rates import REQUESTS, TOKENS
from shared.runtime import freeze_startup_objects


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


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
