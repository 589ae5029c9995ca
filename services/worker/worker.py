"""One incarnation of a worker: its parts put together around a started engine and a connected bus, and how it starts and ends."""

import asyncio
from functools import partial
from pathlib import Path

import structlog
from ulid import ULID

from services.worker import request_policy
from services.worker.artifacts import ArtifactCache
from services.worker.engine import Engine
from services.worker.frames import Outbox
from services.worker.governor import Governor
from services.worker.hello import say_hello
from services.worker.identity import Identity
from services.worker.lifecycle import Lifecycle
from services.worker.mounting import Mounter
from services.worker.report import Reporter
from services.worker.service import Service, ServiceLimits
from services.worker.settings import WorkerSettings
from services.worker.tenant_shares import TenantShares
from services.worker.usage import UsageMeter
from shared.bus import Bucket, Bus, BusUnavailable, Objects, open_bucket, open_objects, publish_durable
from shared.contracts.adapters import ARTIFACTS_BUCKET
from shared.contracts.state import STATE_BUCKET
from shared.contracts.usage import worker_usage_subject
from shared.contracts.workers import WorkerHello
from shared.errors import EngineError
from shared.policy.engine_room import shape_of
from shared.runtime import Stop

log = structlog.get_logger()

_ABORT_WAIT_S = 3.0


class Worker:
    """Made once per process."""

    def __init__(self, settings: WorkerSettings, engine: Engine, governor: Governor, bus: Bus, cache_dir: Path) -> None:
        self.state = "starting"  # starting | ready | stopping | unhealthy
        self._settings = settings
        self._engine = engine
        self._governor = governor
        self._bus = bus
        self._cache_dir = cache_dir
        self._no_more_changes = asyncio.Event()
        limits = engine.limits
        shape = shape_of(limits.max_num_seqs, limits.max_batched_tokens, settings.shared_prefill_tokens)
        governor.admission.use(limits, shape)
        self._me = Identity(worker_id=settings.worker_id, incarnation=str(ULID()), pool_id=settings.pool_id)
        usage = UsageMeter(governor, self._store_usage, me=self._me)
        service_limits = ServiceLimits(
            max_running=settings.max_running, freeze_limit_s=settings.freeze_limit_s, silence_limit_s=settings.silence_limit_s
        )
        self.service = Service(
            bus=bus,
            engine=engine,
            governor=governor,
            outbox=Outbox(bus.publish, self._me),
            usage=usage,
            policy=request_policy,
            me=self._me,
            limits=service_limits,
        )

    async def run(self, stop: Stop) -> None:
        """Serves until told to stop (returns) or the engine dies.

        :raises EngineError: the engine died.
        :raises StartFailed: the registry refuses this worker.
        """
        started = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.service.run(started))
            managing = group.create_task(self._manage(started))
            stopped = group.create_task(stop.wait())
            died = group.create_task(self._engine.wait_dead())
            await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
            self._no_more_changes.set()
            stopped.cancel()
            if died.done():
                self.state = "unhealthy"
                log.error("engine.died", reason=died.result())
                self.service.abort(EngineError("the engine died while it answered this request"))
                await self.service.stop(_ABORT_WAIT_S)
                raise EngineError(f"the engine died: {died.result()}")
            self.state = "stopping"
            log.info("worker.stopping", reason=stop.reason, in_flight=self.service.running)
            died.cancel()
            await self.service.stop(self._settings.grace_s)
            managing.cancel()
            serving.cancel()

    async def _manage(self, started: asyncio.Event) -> None:
        """Mounts and reports, from the registry's acceptance on; no more loads and drains once the worker stops."""
        await started.wait()
        lifecycle, reporter, shares = await self._build()
        async with asyncio.TaskGroup() as group:
            group.create_task(shares.run())
            changing = [group.create_task(lifecycle.run()), group.create_task(self._open(lifecycle))]
            group.create_task(reporter.run())
            await self._no_more_changes.wait()
            for task in changing:
                task.cancel()

    async def _build(self) -> tuple[Lifecycle, Reporter, TenantShares]:
        settings, engine = self._settings, self._engine
        bucket, objects = await self._open_stores()
        shares = TenantShares(self._bus, bucket, self._governor.admission, self._me)
        cache = ArtifactCache(self._cache_dir / "adapters", objects, limit_bytes=settings.cache_limit_bytes)
        await cache.prepare()
        me = self._me
        mounter = Mounter(engine=engine, service=self.service, governor=self._governor, cache=cache, me=me)
        hello = WorkerHello(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            pool_id=me.pool_id,
            base=engine.description,
            limits=engine.limits,
            engine=engine.name,
        )
        lifecycle = Lifecycle(
            bus=self._bus,
            bucket=bucket,
            engine=engine,
            service=self.service,
            mounter=mounter,
            hello=partial(say_hello, self._bus, hello, settings.registry_patience_s),
            me=me,
        )
        reporter = Reporter(
            bus=self._bus,
            engine=engine,
            governor=self._governor,
            mounter=mounter,
            state=lambda: self.state,
            generation=lambda: lifecycle.generation,
            health_file=Path(settings.health_file) if settings.health_file else None,
            me=me,
        )
        return lifecycle, reporter, shares

    async def _open_stores(self) -> tuple[Bucket, Objects]:
        """The registry makes them; it may start after us."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + self._settings.registry_patience_s
        while True:
            try:
                return await open_bucket(self._bus, STATE_BUCKET), await open_objects(self._bus, ARTIFACTS_BUCKET)
            except BusUnavailable:
                if loop.time() >= give_up_at_s:
                    raise
                await asyncio.sleep(0.2)

    async def _open(self, lifecycle: Lifecycle) -> None:
        """Base traffic is taken once this incarnation stands in the pool's entry and its mounts are being seen to."""
        await lifecycle.reconciled.wait()
        await self.service.open(self.service.base_subject)
        self.state = "ready"
        log.info("worker.ready", base=self._engine.description.identity, engine=self._engine.name, incarnation=self._me.incarnation)

    async def _store_usage(self, data: bytes, message_id: str) -> None:
        await publish_durable(self._bus, worker_usage_subject(self._me.worker_id), data, message_id)
