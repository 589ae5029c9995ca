"""The router's parts put together, started in order and stopped in order: unready, intake closed, streams ended, bus drained."""

import asyncio
import socket

import structlog

from services.router import memory_metrics
from services.router.admin.gate import Gate, make_admin_plane
from services.router.api import DataPlane
from services.router.app import App
from services.router.dispatch import Dispatcher
from services.router.fleet import Fleet
from services.router.freshness import Doubt, Freshness
from services.router.metrics import Metrics
from services.router.rates import Rates
from services.router.routes import RouteTable
from services.router.server import ConnectionLimits, Server, listen, make_server
from services.router.settings import RouterSettings
from services.router.tend import Tender
from services.router.trials import Trials
from services.router.usage import Usage
from shared.bus import Bucket, Bus, BusUnavailable, Entry, Mirror, open_bucket
from shared.contracts.state import HEARTBEAT_KEY, POOL_PREFIX, STATE_BUCKET
from shared.errors import WorkerUnavailable
from shared.runtime import Stop, end, freeze_startup_objects

log = structlog.get_logger()

_BUCKET_RETRY_S = 0.2
_AFTER_GRACE_S = 5.0


class Router:
    """One router process. `listen` first: a taken port is said before anything else is touched."""

    def __init__(self, settings: RouterSettings, router_id: str) -> None:
        self.settings = settings
        self.router_id = router_id
        self.table = RouteTable()
        self.fleet = Fleet()
        self.metrics = Metrics()
        self.mirror: Mirror | None = None
        self.freshness: Freshness | None = None
        self.rates: Rates | None = None
        self.trials: Trials | None = None
        self._listener: socket.socket | None = None

    def listen(self) -> int:
        """The port. :raises StartFailed: it is taken."""
        self._listener = listen(self.settings.host, self.settings.port)
        return self._listener.getsockname()[1]

    async def run(self, bus: Bus, stop: Stop) -> None:
        """Serves until `stop`, then ends in order."""
        assert self._listener is not None
        dispatcher = Dispatcher(bus, self.router_id, self.table, self.fleet, self.settings, self.metrics)
        tender = Tender(dispatcher)
        usage = Usage(dispatcher, self.metrics)
        settings = self.settings
        freshness = self.freshness = Freshness(bus, HEARTBEAT_KEY, self._rebuild, settings.watch_silence_s, settings.stale_after_s)
        rates = self.rates = Rates(dispatcher, self.table.clock, self.metrics)
        trials = self.trials = Trials(bus, self.table, self.router_id)
        plane = DataPlane(dispatcher, self.table, freshness, usage, rates, trials, self.metrics, self.settings)
        admin = make_admin_plane(bus, self.table, freshness, self.fleet, self.settings)
        app = App(plane, admin, freshness, bus, Gate(self.metrics.answer, self.settings.admin_key_sha256))
        limits = ConnectionLimits(
            head_timeout_s=settings.head_timeout_s, keep_alive_s=settings.keep_alive_s, max_connections=settings.max_connections
        )
        server = make_server(app, settings.grace_s, limits)
        self._gauges(plane, usage, rates, freshness, bus)
        await dispatcher.start()
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(task) for task in (tender.run(), usage.run(), rates.run(), trials.run())]
            background.append(tasks.create_task(self._follow(bus, freshness, tasks, background)))
            serving = tasks.create_task(server.serve(sockets=[self._listener]))
            log.info("router.started", router_id=self.router_id, host=self.settings.host, port=self._listener.getsockname()[1])
            freeze_startup_objects()
            await stop.wait()
            log.info("router.stopping", reason=stop.reason, active=plane.active)
            app.stopping = True
            await self._drain(server, serving, plane, dispatcher)
            await rates.stop()
            await usage.flush(2.0)
            await end(background)
        await bus.close()
        log.info("router.stopped", router_id=self.router_id)

    async def _drain(self, server: Server, serving: "asyncio.Task[None]", plane: DataPlane, dispatcher: Dispatcher) -> None:
        server.should_exit = True
        try:
            async with asyncio.timeout(self.settings.grace_s):
                await asyncio.shield(serving)
            return
        except TimeoutError:
            log.warning("router.grace_over", active=plane.active)
        dispatcher.stop(WorkerUnavailable("the router is stopping", retry_after_s=1.0))
        try:
            async with asyncio.timeout(_AFTER_GRACE_S):
                await asyncio.shield(serving)
        except TimeoutError:
            server.hang_up()
            server.force_exit = True
            await serving

    async def _follow(self, bus: Bus, freshness: Freshness, tasks: asyncio.TaskGroup, background: "list[asyncio.Task[None]]") -> None:
        """Keeps the table current once there is a bucket to follow."""
        bucket = await _opened(bus)
        await self.table.clock.ask(bus)
        self.mirror = Mirror(bus, bucket, self._changed)
        background.append(tasks.create_task(self.mirror.run()))
        background.append(tasks.create_task(freshness.run(bucket, self.mirror.synced)))

    def _changed(self, key: str, entry: Entry | None) -> None:
        if key == HEARTBEAT_KEY:
            assert self.freshness is not None
            self.freshness.heard(entry)
        self.table.apply(key, entry)
        if key.startswith(POOL_PREFIX):
            assert self.trials is not None
            self.trials.follow()
            self.fleet.registered = {
                worker.worker_id: worker.incarnation for pool in self.table.pools.values() for worker in pool.entry.workers.values()
            }

    def _rebuild(self) -> None:
        if self.mirror is not None:
            self.mirror.rebuild()

    def _gauges(self, plane: DataPlane, usage: Usage, rates: Rates, freshness: Freshness, bus: Bus) -> None:
        loop = asyncio.get_running_loop()
        gauge = self.metrics.gauge
        self.metrics.workers = lambda: memory_metrics.families(self.fleet.reports(), memory_metrics.names_of(self.table))
        gauge("tenantry_requests_active", "Requests inside.", lambda: plane.active)
        gauge("tenantry_usage_waiting", "Outcomes that the usage stream has not confirmed.", lambda: usage.waiting)
        gauge("tenantry_rate_leases", "Budgets of tenants that this router holds a part of.", lambda: rates.leased)
        gauge("tenantry_rate_blocks_lost", "Blocks of budgets asked for without an answer.", lambda: rates.lost_blocks)
        gauge("tenantry_routes_age_seconds", "Since the routes were last known to be current.", lambda: freshness.age_s(loop.time()))
        gauge("tenantry_registry_down", "1 while the heartbeat stands still.", lambda: float(freshness.doubt is Doubt.REGISTRY_DOWN))
        gauge("tenantry_watch_rebuilds", "Watches made anew.", lambda: self.mirror.rebuilds if self.mirror else 0)
        gauge("tenantry_bus_connected", "1 while connected.", lambda: float(bus.connected))
        gauge("tenantry_bus_disconnects", "Connections lost.", lambda: bus.disconnects)
        gauge("tenantry_bus_dropped_messages", "Messages dropped because this router was too slow.", lambda: bus.dropped_messages)


async def _opened(bus: Bus) -> Bucket:
    """The state bucket, once a registry has made it; until then the router is unready."""
    said = False
    while True:
        try:
            return await open_bucket(bus, STATE_BUCKET)
        except BusUnavailable as error:
            if not said:
                log.warning("routes.waiting_for_registry", error=error.message)
                said = True
            await asyncio.sleep(_BUCKET_RETRY_S)
