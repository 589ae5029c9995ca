"""`python -m services.worker`: one engine behind the bus. Settings: --help."""

import asyncio
import os
import secrets
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.worker.engine import Engine
from services.worker.governor import Governor
from services.worker.settings import EngineKind, WorkerSettings
from services.worker.worker import Worker
from shared.bus import connect_with_patience, settings_from
from shared.errors import StartFailed
from shared.runtime import Stop, freeze_startup_objects, run_service

log = structlog.get_logger()

T = TypeVar("T")


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
    from services.worker.vllm_fit import Parallel
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
            rank_classes=settings.parsed_rank_classes(),
            quantization=settings.quantization,
            parallel=Parallel(tensor=settings.tensor_parallel, pipeline=settings.pipeline_parallel, experts=settings.expert_parallel),
            is_unproven_wanted=settings.unproven,
            gpu_memory_fraction=settings.gpu_memory_fraction,
            host_tier_slots=settings.host_tier_slots,
            shared_prefill_tokens=settings.shared_prefill_tokens,
            kv_cache_gib=settings.kv_cache_gib,
            cpu_threads=settings.cpu_threads,
            hash_cache=cache_dir / "hashes.json",
            engine_args=settings.parsed_engine_args(),
        ),
        governor,
    )


async def main(settings: WorkerSettings, stop: Stop) -> None:
    structlog.contextvars.bind_contextvars(worker_id=settings.worker_id, pool_id=settings.pool_id)
    cache_dir = Path(settings.cache_dir) if settings.cache_dir else Path.home() / ".cache" / "tenantry" / settings.worker_id
    await asyncio.to_thread(cache_dir.mkdir, parents=True, exist_ok=True)
    governor = Governor()
    engine = make_engine(settings, governor, cache_dir)
    try:
        await _unless_stopped(engine.start(), stop)
        freeze_startup_objects()
        bus = await _unless_stopped(connect_with_patience(settings_from(os.environ, "worker"), settings.nats_patience_s), stop)
        if bus is not None:
            try:
                await Worker(settings, engine, governor, bus, cache_dir).run(stop)
            finally:
                await bus.close()
    finally:
        await engine.stop()
    log.info("worker.stopped", reason=stop.reason)


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: Stop) -> T | None:
    """The work's result, or None: it is cancelled when told to stop first."""
    async with asyncio.TaskGroup() as group:
        doing = group.create_task(work)
        stopped = group.create_task(stop.wait())
        await asyncio.wait((doing, stopped), return_when=asyncio.FIRST_COMPLETED)
        doing.cancel()
        stopped.cancel()
    return None if doing.cancelled() else doing.result()


if __name__ == "__main__":
    run_service("worker", WorkerSettings, main)
