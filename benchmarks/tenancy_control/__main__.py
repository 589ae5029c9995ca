"""`python -m benchmarks.tenancy_control`: what tenancy costs in the router, and whether quotas hold while many write at once.

1,000 tenants with 10 adapters each stand in the routers' tables. Figures go to benchmarks/results/tenancy.json.
"""

import argparse
import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from benchmarks.tenancy.results import merge
from benchmarks.tenancy_control.configuration import ADAPTERS, TENANTS, configuration, table_of
from benchmarks.tenancy_control.quotas import REGISTRIES, reserving, sharing
from benchmarks.tenancy_control.router_cost import checks, resolving
from benchmarks.tenancy_control.visibility import ROUTERS, visible
from shared.bus import Bus, BusSettings, connect
from shared.bus.embedded import EmbeddedNats


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
    async with on_a_server() as (server, bus):
        figures |= await visible(bus, server, values, args.rounds)
    async with on_a_server() as (server, bus):
        ledger = await reserving(server, bus, args.attempts)
    async with on_a_server() as (server, bus):
        careless = await reserving(server, bus, args.attempts // 10, careless=True)
    async with on_a_server() as (server, bus):
        shares = await sharing(server, bus, args.attempts)
    figures |= {
        "overdrafts": ledger["overdrafts"] + shares["overdrafts"],
        "overdrafts_ledger": ledger,
        "overdrafts_ledger_careless": careless,
        "overdrafts_shares": shares,
    }
    stands = f"{TENANTS} tenants x {ADAPTERS} adapters in {args.pools} pools"
    seen = f"a write of {{}} until the last of {ROUTERS} router processes has answered by it over HTTP, {stands}, {args.rounds} writes"
    how = {
        "resolve_p99_us": f"{args.resolves} calls of resolve in process, {stands}, each timed by itself",
        "rate_check_us": "CPU time to charge and settle requests and tokens of a leased budget, best of 7 loops",
        "scope_check_us": "CPU time to look at a key's scopes and end, best of 7 loops",
        "crowd_check_us": "CPU time to count a tenant's requests of one router, best of 7 loops",
        "peek_more_us": "CPU time to read the numbers and the prompt's place in a body beside model and stream, best of 7 loops",
        "visible_key_max_ms": seen.format("a key"),
        "visible_tenant_max_ms": seen.format("a tenant"),
        "visible_pool_max_ms": seen.format("a pool's entry"),
        "overdrafts": f"{REGISTRIES} registry processes: {ledger['attempts']} concurrent reservations of slots, VRAM and KV guarantees in"
        f" one pool's entry, what was given out replayed write by write; {shares['attempts']} reservations by 2 workers from their parts,"
        f" {ROUTERS} routers",
        "overdrafts_ledger_careless": "the same reservations written without compare-and-set: what the replay finds then",
    }
    return figures, how


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenancy_control", description=__doc__)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--resolves", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=40)
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
