"""`python -m services.worker`: one engine behind the bus. Settings: --help."""

import asyncio
import os
import secrets
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

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
from services.worker.settings import EngineKind, WorkerSettings
from services.worker.usage import UsageMeter
from shared.bus import (
    Bucket,
    Bus,
    BusUnavailable,
    Objects,
    connect_with_patience,
    open_bucket,
    open_objects,
    publish_durable,
    settings_from,
)
from shared.contracts.adapters import ARTIFACTS_BUCKET
from shared.contracts.state import STATE_BUCKET
from shared.contracts.usage import worker_usage_subject
from shared.contracts.workers import WorkerHello
from shared.errors import EngineError, StartFailed
from shared.runtime import Stop, run_service

log = structlog.get_logger()

_ABORT_WAIT_S = 3.0


def make_engine(settings: WorkerSettings, governor: Governor, cache_dir: Path) -> Engine:
    if settings.engine is EngineKind.SCRIPTED:
        from services.worker.scripted_engine import ScriptedEngine, ScriptedSettings

        return ScriptedEngine(
            ScriptedSettings(
                model=Path(settings.model) if settings.model else None,
                label=settings.label or "scripted",
                dtype=settings.dtype,
                tokens_per_s=settings.scripted_tokens_per_s,
                concurrency=settings.max_num_seqs,
                load_ms=settings.scripted_load_ms,
                slots=settings.max_loras,
                max_rank=settings.max_lora_rank,
            ),
            governor,
        )
    if not settings.model:
        raise StartFailed("TENANTRY_WORKER_MODEL is not set: a model's folder, or its hub id")
    from services.worker.vllm_engine import VllmEngine
    from services.worker.vllm_setup import VllmSettings

    return VllmEngine(
        VllmSettings(
            model=settings.model,
            cluster_secret=settings.cluster_secret.encode() or secrets.token_bytes(32),
            label=settings.label,
            dtype=settings.dtype,
            max_loras=settings.max_loras,
            max_lora_rank=settings.max_lora_rank,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            seed=settings.seed,
            kv_cache_gib=settings.kv_cache_gib,
            cpu_threads=settings.cpu_threads,
            hash_cache=cache_dir / "hashes.json",
            engine_args=settings.parsed_engine_args(),
        ),
        governor,
    )


class Worker:
    """Everything of one incarnation, built around a started engine and a connected bus."""

    def __init__(self, settings: WorkerSettings, engine: Engine, governor: Governor, bus: Bus, cache_dir: Path) -> None:
        self.state = "starting"  # starting | ready | stopping | unhealthy
        self._settings = settings
        self._engine = engine
        self._governor = governor
        self._bus = bus
        self._cache_dir = cache_dir
        self._me = Identity(worker_id=settings.worker_id, incarnation=str(ULID()), pool_id=settings.pool_id)
        usage = UsageMeter(governor, self._store_usage, me=self._me)
        limits = ServiceLimits(
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
            limits=limits,
        )

    async def run(self, stop: Stop) -> None:
        """Serves until told to stop (returns) or the engine dies.

        :raises EngineError: the engine died.
        :raises StartFailed: the registry refuses this worker.
        """
        started = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self.service.run(started))
            await started.wait()
            lifecycle, reporter = await self._build()
            managing = group.create_task(lifecycle.run())
            reporting = group.create_task(reporter.run())
            opening = group.create_task(self._open(lifecycle))
            stopped = group.create_task(stop.wait())
            died = group.create_task(self._engine.wait_dead())
            await asyncio.wait((stopped, died), return_when=asyncio.FIRST_COMPLETED)
            for task in (managing, opening, stopped):
                task.cancel()
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
            reporting.cancel()
            serving.cancel()

    async def _build(self) -> tuple[Lifecycle, Reporter]:
        settings, engine = self._settings, self._engine
        bucket, objects = await self._open_stores()
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
            me=me,
        )
        return lifecycle, reporter

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


async def main(settings: WorkerSettings, stop: Stop) -> None:
    structlog.contextvars.bind_contextvars(worker_id=settings.worker_id, pool_id=settings.pool_id)
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else Path.home() / ".cache" / "tenantry" / settings.worker_id
    await asyncio.to_thread(cache_dir.mkdir, parents=True, exist_ok=True)
    governor = Governor()
    engine = make_engine(settings, governor, cache_dir)
    try:
        if not await _unless_stopped(engine.start(), stop):
            return
        bus = await connect_with_patience(settings_from(os.environ, "worker"), settings.nats_patience_s)
        try:
            await Worker(settings, engine, governor, bus, cache_dir).run(stop)
        finally:
            await bus.close()
    finally:
        await engine.stop()
    log.info("worker.stopped", reason=stop.reason)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: Stop) -> bool:
    """Whether the work was done; it is cancelled when told to stop first."""
    async with asyncio.TaskGroup() as group:
        doing = group.create_task(work)
        stopped = group.create_task(stop.wait())
        await asyncio.wait((doing, stopped), return_when=asyncio.FIRST_COMPLETED)
        doing.cancel()
        stopped.cancel()
    return not doing.cancelled()


if __name__ == "__main__":
    run_service("worker", WorkerSettings, main)
