"""The engines under test, each started in its own process: vLLM alone, and Tenantry's on vLLM."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving import adapter_names, model_files, shapes

GIB = 1 << 30
_KV_BYTES = 10 * GIB
_EXTENSION = {False: "benchmarks.serving.random_weights.Extension", True: "benchmarks.serving.tenantry_extension.Extension"}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, the same for every system of a run."""

    model: str
    folder: str  # of the model's files
    adapters: str  # folder of the adapters, each by its seed
    layers: int = 0  # 0: all
    seed: int = 1
    rank: int = shapes.RANK
    adapter_seeds: tuple[int, ...] = tuple(range(101, 101 + shapes.ADAPTERS))
    max_seqs: int = 32
    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 1600
    output_tokens: int = 600
    compiled: bool = False
    device: str = "cuda"

    @property
    def config(self) -> dict[str, Any]:
        return shapes.config_of(self.model, self.layers)


def engine_args(plan: Plan, *, tenantry: bool) -> dict[str, Any]:
    """vLLM's arguments that all systems share."""
    arguments: dict[str, Any] = {
        "load_format": "tenantry_random",
        "worker_extension_cls": _EXTENSION[tenantry],
        "max_model_len": plan.prompt_tokens + plan.output_tokens + 64,
        "max_num_seqs": plan.max_seqs,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if plan.device == "cpu":
        return arguments | {"block_size": 32, "enforce_eager": True}
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": list(plan.batches)}
    return arguments | {
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": _KV_BYTES,
        "gpu_memory_utilization": 0.2,  # only what must be free at the start: the cache's size is given
        "compilation_config": graphs if plan.compiled else graphs | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }


class Running:
    """A started engine: its client, the LoRARequests that its adapters are asked for by, and what it says of itself."""

    def __init__(self, client: Any, adapters: list[Any], about: dict[str, Any], tenantry: Any = None, governor: Any = None) -> None:
        self.client = client
        self.adapters = adapters
        self.about = about
        self.tenantry = tenantry
        self.governor = governor


async def start_vllm(plan: Plan, *, lora: bool) -> Running:
    """vLLM as it is, by its own AsyncLLM."""
    os.environ.update(VLLM_PLUGINS="", TENANTRY_KERNELS="off")
    if plan.device == "cpu":
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

    if lora and plan.model == "gptoss-20b":
        plan = msgspec.structs.replace(plan, compiled=True)  # not compiled, its Marlin experts give LoRA layers what they refuse
    arguments = engine_args(plan, tenantry=False) | {"model": plan.folder, "dtype": "bfloat16"}
    if lora:
        slots = len(plan.adapter_seeds)
        arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": plan.rank}
        arguments["lora_target_modules"] = [*_ATTENTION, "experts"]
    client = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    requests: list[Any] = []
    about: dict[str, Any] = {"compiled": plan.compiled}
    if lora:
        about["layers_filled"] = await client.collective_rpc("bench_fill_slots", args=(plan.rank, list(plan.adapter_seeds)))
        requests = [LoRARequest(f"adapter-{n}", n, f"/in-slot/{n}") for n in range(1, len(plan.adapter_seeds) + 1)]
    return Running(client, requests, about)


async def start_tenantry(plan: Plan, governor: Any) -> Running:
    """Tenantry's engine with its kernels; every adapter from its files, mounted and proven."""
    os.environ["TENANTRY_KERNELS"] = "on"
    from services.worker.vllm_engine import VllmEngine
    from services.worker.vllm_setup import VllmSettings

    folder = Path(plan.folder)
    settings = VllmSettings(
        model=plan.folder,
        cluster_secret=b"benchmark",
        label=plan.model,
        dtype="bfloat16",
        max_loras=len(plan.adapter_seeds),
        max_lora_rank=plan.rank,
        max_num_seqs=plan.max_seqs,
        gpu_memory_fraction=0.2,
        host_tier_slots=2,
        hash_cache=model_files.hash_cache(folder),
        engine_args=engine_args(plan, tenantry=True),
    )
    engine = VllmEngine(settings, governor)
    await engine.start()
    client = engine._engine
    plugin = (await client.collective_rpc("tenantry_plugin"))[0]
    mounts: list[dict[str, float]] = []
    for seed in plan.adapter_seeds:
        proof = await engine.add_adapter(adapter_id(seed), adapter_folder(plan, seed), plan.rank)
        mounts.append({"stage_ms": round(proof.stage_ms, 1), "mount_ms": round(proof.mount_ms, 1), "load_ms": round(proof.load_ms, 1)})
    requests = [engine._loaded()._requests[adapter_id(seed)] for seed in plan.adapter_seeds]
    return Running(client, requests, {"plugin": plugin, "mounts": mounts, "engine": engine.name}, engine, governor)


def adapter_id(seed: int) -> str:
    return f"ad_{seed}"


def adapter_folder(plan: Plan, seed: int) -> Path:
    """Named as the worker's cache names an artifact's: by a digest, here of what the content follows from."""
    return adapter_names.folder_of(Path(plan.adapters), plan.model, plan.layers, plan.rank, seed)


def plan_from(text: str) -> Plan:
    return msgspec.convert(json.loads(text), Plan)
