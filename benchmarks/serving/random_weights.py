"""Runs in vLLM's engine process: random weights made on the device from a seed, slots filled likewise, and GPU time by kernel.

Named as `worker_extension_cls`, so that importing it registers the load format. TENANTRY_BENCH_GATE names a file whose appearance
says that the card is free: until then an engine starts up to the point where it would touch it.
"""

# pyright: basic, reportMissingImports=false

import cProfile
import os
import pstats
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from benchmarks.serving.gpu_time import Event, busy_ms, by_kernel

LOAD_FORMAT = "tenantry_random"
GATE, SEED = "TENANTRY_BENCH_GATE", "TENANTRY_BENCH_SEED"
DEVIATION = 0.02
MXFP4_SCALE = 119  # 2**(119 - 127)
_GATE_LIMIT_S = 900.0
_GATE_LOOK_S = 0.05
_STACKS = ("lora_a_stacked", "lora_b_stacked", "w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")


@register_model_loader(LOAD_FORMAT)
class RandomLoader(BaseModelLoader):
    """Normal weights, norms 1: hidden states and logits stay finite over any depth."""

    def download_model(self, model_config: Any) -> None:
        del model_config

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        wait_for_gate()
        return super().load_model(*args, **kwargs)

    def load_weights(self, model: Any, model_config: Any) -> None:
        del model_config
        fill(model, int(os.environ.get(SEED, "0")))


def wait_for_gate() -> None:
    gate = os.environ.get(GATE)
    give_up_s = time.monotonic() + _GATE_LIMIT_S
    while gate and not Path(gate).exists():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the card was not given free in {_GATE_LIMIT_S:.0f} s")
        time.sleep(_GATE_LOOK_S)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Each parameter from its own name and the seed, so that no other parameter's size changes it."""
    for prefix, layer in model.named_modules():
        is_norm = "norm" in type(layer).__name__.lower()
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                continue
            generator = torch.Generator(parameter.device).manual_seed(seed ^ zlib.crc32(f"{prefix}.{name}".encode()))
            if is_norm:
                parameter.fill_(1.0)
            elif torch.is_floating_point(parameter):
                parameter.normal_(0.0, DEVIATION, generator=generator)
            elif "scale" in name:
                parameter.fill_(MXFP4_SCALE)
            else:
                parameter.random_(0, 256, generator=generator)


class Measured:
    """Methods for `collective_rpc`; mixed into vLLM's worker class."""

    model_runner: Any
    _bench_profile: Any = None
    _bench_host: Any = None

    def bench_fill_slots(self, rank: int, seeds: list[int]) -> int:
        """Adapters 1, 2, ... in their slots with random contents, without files; how many layers took them."""
        from vllm.lora.lora_model import LoRAModel

        manager = self.model_runner.lora_manager._adapter_manager
        for number in range(1, len(seeds) + 1):
            manager._registered_adapters[number] = LoRAModel(number, rank, {})
            manager.activate_adapter(number)
        for name, module in sorted(manager.modules.items()):
            if hasattr(module, "adapter_enabled"):
                module.adapter_enabled[: len(seeds)] = 1
            for stacks in (vars(module).get(name) for name in _STACKS):
                for stack in stacks or ():
                    for index, seed in enumerate(seeds):
                        generator = torch.Generator(stack.device).manual_seed(seed ^ zlib.crc32(name.encode()))
                        stack[index].normal_(0.0, 0.01, generator=generator)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return len(manager.modules)

    def bench_profile(self, *, start: bool) -> dict[str, Any]:
        """GPU time between start and end: milliseconds in which any kernel ran, and kernels by their time."""
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        if start:
            self._bench_profile = profile(activities=[ProfilerActivity.CUDA])
            self._bench_profile.__enter__()
            return {}
        running, self._bench_profile = self._bench_profile, None
        running.__exit__(None, None, None)
        on_gpu: list[Event] = []
        on_host: list[Event] = []  # calls of CUDA's runtime
        for event in running.profiler.kineto_results.events():
            kind = on_gpu if event.device_type() == torch.autograd.DeviceType.CUDA else on_host
            kind.append((event.name(), event.start_ns(), event.duration_ns()))
        return {"busy_ms": busy_ms(on_gpu), "kernels": by_kernel(on_gpu), "calls": by_kernel(on_host, 12)}

    def bench_host_profile(self, *, start: bool) -> list[tuple[str, int, float, float]]:
        """What the engine's loop did on the host between start and end: function, calls, own and whole milliseconds."""
        if start:
            self._bench_host = cProfile.Profile()
            self._bench_host.enable()
            return []
        self._bench_host.disable()
        found = pstats.Stats(self._bench_host).stats.items()  # type: ignore[attr-defined]
        rows = [
            (f"{Path(file).parent.name}/{Path(file).name}:{line} {name}"[:110], calls, own_s * 1e3, whole_s * 1e3)
            for (file, line, name), (_, calls, own_s, whole_s, _) in found
        ]
        return sorted(rows, key=lambda row: -row[2])[:60]

    def bench_memory(self) -> dict[str, float]:
        free, total = torch.cuda.mem_get_info()
        return {"used_gib": (total - free) / 2**30, "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30}


class Extension(Measured):
    """For vLLM alone."""
