"""The worker's settings, from TENANTRY_WORKER_*."""

from enum import StrEnum
from typing import Any

import msgspec

from shared.errors import ConfigInvalid


class EngineKind(StrEnum):
    VLLM = "vllm"
    SCRIPTED = "scripted"  # answers by rule, for load, chaos and scheduling tests; never a default


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes 0 mean the engine's own choice. `engine_args` is a JSON object of vLLM's arguments."""

    worker_id: str
    pool_id: str = "main"
    engine: EngineKind = EngineKind.VLLM
    model: str = ""  # folder or hub id; may be empty for the scripted engine
    label: str = ""  # the base's public name; empty: the folder's
    dtype: str = "float32"
    max_loras: int = 8
    max_lora_rank: int = 16
    rank_classes: str = ""  # "8,16,32": what a slot may be charged as; empty: vLLM's ranks up to max_lora_rank
    quantization: str = ""  # empty: what the model's files say
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    unproven: bool = False  # starts parallel sizes that were never run on a card
    gpu_memory_fraction: float = 0.9
    host_tier_slots: int = 8  # packed adapters kept in host memory, ready to be mounted
    max_model_len: int = 0
    max_num_seqs: int = 32
    seed: int = 0
    kv_cache_gib: int = 1
    cpu_threads: int = 0
    engine_args: str = "{}"
    cluster_secret: str = ""  # salts tenants' prefix caches; empty: made at start, which is enough for a cache that lives as long
    cache_dir: str = ""  # adapters' files; empty: a folder of the user's cache
    cache_limit_bytes: int = 20 << 30
    max_running: int = 1024  # requests at once, running or waiting; more are bounced, but for tenants with less than an equal part
    shared_prefill_tokens: int = 0  # one tenant's prompt tokens in a step while another tenant is in the engine; 0: a 40th of the step
    health_file: str = ""  # where the worker's state is written every second, for services.worker.health; empty: nowhere
    grace_s: float = 30.0  # for running requests when told to stop
    freeze_limit_s: float = 2.0
    silence_limit_s: float = 5.0
    nats_patience_s: float = 30.0
    registry_patience_s: float = 120.0
    scripted_tokens_per_s: float = 0.0  # of each stream; 0: as fast as it goes
    scripted_load_ms: float = 0.0

    def parsed_rank_classes(self) -> tuple[int, ...]:
        """:raises ConfigInvalid: not numbers with commas between them."""
        try:
            return tuple(int(part) for part in self.rank_classes.split(",") if part.strip())
        except ValueError as error:
            raise ConfigInvalid(f"TENANTRY_WORKER_RANK_CLASSES is {self.rank_classes!r}, not like 8,16,32", where="rank_classes") from error

    def parsed_engine_args(self) -> dict[str, Any]:
        """:raises ConfigInvalid: not a JSON object."""
        try:
            return msgspec.json.decode(self.engine_args, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigInvalid(f"TENANTRY_WORKER_ENGINE_ARGS is not a JSON object: {error}", where="engine_args") from error
