"""The compatibility matrix, pools, workers, routing, and one live view of all of it."""

from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from services.router.admin.answers import Body, answer
from services.router.admin.registry_client import RegistryClient
from services.router.fleet import Fleet
from services.router.routes import PoolRoutes, RouteTable
from shared.bus import Bus
from shared.contracts.adapters import PoolWorker
from shared.contracts.admin import GetMatrix, ListPools, RemoveLabel, RemovePair, RemoveWorker, SetLabel, SetPair, SetRouting

_INTERNAL = frozenset({"artifact", "artifact_sha256", "artifact_bytes"})


class Label(Body):
    label: str
    base: str


class Pair(Body):
    adapter_digest: str
    base: str
    allowed: bool
    note: str = ""


class RoutingChange(Body):
    header: str
    default: str


def make_routes(registry: RegistryClient, table: RouteTable, fleet: Fleet, bus: Bus) -> APIRouter:
    routes = APIRouter(tags=["cluster"])

    @routes.get("/matrix")
    async def get_matrix() -> Response:
        return answer(await registry.ask(GetMatrix()))

    @routes.post("/matrix/labels")
    async def set_label(label: Label) -> Response:
        """Adapters that name this label (or label@revision) as their base are taken as made for `base`, a full identity."""
        return answer(await registry.ask(SetLabel(label=label.label, base=label.base)))

    @routes.delete("/matrix/labels")
    async def remove_label(label: str, base: str = "") -> Response:
        return answer(await registry.ask(RemoveLabel(label=label, base=base)))

    @routes.post("/matrix/pairs")
    async def set_pair(pair: Pair) -> Response:
        return answer(await registry.ask(SetPair(**pair.model_dump())))

    @routes.delete("/matrix/pairs")
    async def remove_pair(adapter_digest: str, base: str) -> Response:
        return answer(await registry.ask(RemovePair(adapter_digest=adapter_digest, base=base)))

    @routes.get("/pools")
    async def list_pools() -> Response:
        return answer(await registry.ask(ListPools()))

    @routes.get("/workers")
    async def list_workers() -> Response:
        """From this router's own view: each worker of each pool with its last report."""
        return answer(
            [
                _worker(pool, worker, fleet, bus)
                for pool in table.pools.values()
                for worker in pool.entry.workers.values()
            ]
        )  # fmt: skip

    @routes.delete("/workers/{pool_id}/{worker_id}")
    async def remove_worker(pool_id: str, worker_id: str) -> Response:
        """A worker that will not come back: its reservations are released."""
        return answer(await registry.ask(RemoveWorker(pool_id=pool_id, worker_id=worker_id)))

    @routes.get("/routing")
    async def get_routing() -> Response:
        return answer(table.routing)

    @routes.put("/routing")
    async def set_routing(routing: RoutingChange) -> Response:
        return answer(await registry.ask(SetRouting(header=routing.header, default=routing.default)))

    @routes.get("/top")
    async def top() -> Response:
        """Pools with their mounts and workers as this router sees them now, without asking the registry."""
        pools = [_pool(pool, fleet, bus) for pool in table.pools.values()]
        return answer({"pools": pools, "tokens_per_s": sum(pool["tokens_per_s"] for pool in pools)})

    return routes


def _pool(pool: PoolRoutes, fleet: Fleet, bus: Bus) -> dict[str, Any]:
    entry = pool.entry
    workers = [_worker(pool, worker, fleet, bus) for worker in entry.workers.values()]
    reports: list[dict[str, Any]] = [worker["report"] for worker in workers if worker["report"] is not None]
    use: dict[str, dict[str, Any]] = {row["adapter_id"]: row for report in reports for row in report["adapters"]}
    mounts: list[dict[str, Any]] = []
    for mount in entry.mounts.values():
        shown = {name: value for name, value in msgspec.to_builtins(mount).items() if name not in _INTERNAL}
        shown["serving"] = entry.aliases.get(mount.tenant, {}).get(mount.name) == mount.adapter_id
        shown["use"] = use.get(mount.adapter_id)
        mounts.append(shown)
    return {
        "pool_id": entry.pool_id,
        "base": entry.base,
        "workers": workers,
        "mounts": mounts,
        "tokens_per_s": sum(report["completion_tokens_per_s"] for report in reports),
    }


def _worker(pool: PoolRoutes, worker: PoolWorker, fleet: Fleet, bus: Bus) -> dict[str, Any]:
    """`report` is None before the first of this incarnation; `report_age_s` is in time with the bus connected."""
    peer = fleet.peers.get(worker.worker_id)
    report = peer.report if peer is not None and peer.report is not None and peer.report.incarnation == worker.incarnation else None
    return {
        "pool_id": pool.entry.pool_id,
        **msgspec.to_builtins(worker),
        "connected": bus.connected,
        "outstanding": peer.open if peer is not None else 0,
        "report": None if report is None else msgspec.to_builtins(report),
    }
