"""Runs in vLLM's worker process: where the device's memory is, from the allocator and the engine's own structures.

Nothing is taken from settings or by subtraction from what is wanted: each figure has a source of its own, and the driver's figure
for the whole device stands beside them so that a reader can add up.
"""

# pyright: basic, reportMissingImports=false

import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lora_kernels.vllm_plugin.slots import slot_tensors

_INTERVAL_S = 1.0


class MemoryWatch:
    """Measures in a thread: the driver may take milliseconds to answer, and the engine's loop only reads."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.latest = measure(worker)
        threading.Thread(target=self._run, name="tenantry-memory", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            self.latest = measure(self._worker)


def measure(worker: Any) -> dict[str, Any]:
    """Bytes, and the adapters' ids by slot. On a CPU only what the engine's own structures say.

    weights: what loading the model took from the allocator, less the slots. graphs: the allocator's pools of captured graphs.
    workspace: the rest of what the allocator holds (activations and what it keeps for them). context: what the process holds
    beside the allocator (CUDA context, kernels, graphs' own nodes). `foreign`: other processes'. device_used: the driver's figure.
    """
    runner = worker.model_runner
    slots = _storage_bytes(slot_tensors(runner.lora_manager._adapter_manager))
    kv_cache = _storage_bytes(_tensors(getattr(runner, "kv_caches", [])))
    found = {"slots": slots, "kv_cache": kv_cache, "held": list(runner.lora_manager._adapter_manager.lora_index_to_id)}
    if worker.device.type != "cuda":
        return found
    reserved = int(torch.cuda.memory_stats(worker.device).get("reserved_bytes.all.current", 0))
    weights = int(runner.model_memory_usage) - slots
    graphs = _graph_bytes(worker, reserved)
    free, total = (int(value) for value in torch.cuda.mem_get_info(worker.device))
    driver = _driver(worker.device)
    process_used = driver.get("process_used")
    used = total - free
    # Without a figure for the process (some virtual machines hide it) everything beside the allocator counts as the context.
    context = (process_used if process_used else used) - reserved
    return {
        **found,
        "weights": weights,
        "graphs": graphs,
        "workspace": reserved - weights - slots - kv_cache - graphs,
        "context": context,
        "foreign": used - process_used if process_used else 0,
        "free": free,
        "total": total,
        "device_used": driver.get("device_used", used),
        "device_reserved": driver.get("device_reserved", 0),
        "reserved": reserved,
        "allocated": int(torch.cuda.memory_stats(worker.device).get("allocated_bytes.all.current", 0)),
        "has_process_figure": bool(process_used),
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Each storage once, however many tensors look into it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _graph_bytes(worker: Any, reserved: int) -> int:
    """Looked up anew only when the allocator's total has changed: the snapshot lists every block."""
    known: tuple[int, int] | None = getattr(worker, "_tenantry_graph_bytes", None)
    if known is None or known[0] != reserved:
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        private = sum(int(segment["total_size"]) for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0))
        known = worker._tenantry_graph_bytes = (reserved, private)
    return known[1]


def _driver(device: torch.device) -> dict[str, int]:
    try:
        from vllm.third_party import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return {}
    mine = [process.usedGpuMemory for process in processes if process.pid == os.getpid() and process.usedGpuMemory]
    return {"device_used": int(memory.used), "device_reserved": int(memory.reserved), **({"process_used": int(mine[0])} if mine else {})}
