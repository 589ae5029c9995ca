"""Whether what is installed fits together and to what is asked, decided before vLLM starts: its own errors come minutes later, in
another process's words. What has been run on a card is a table here; anything else starts only when the operator says so."""

import importlib
import importlib.metadata
import os
import re
from typing import Any

import msgspec

LEAST_CAPABILITY = (8, 0)  # bfloat16


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    capability: tuple[int, int]
    memory_bytes: int = 0


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """Versions as their packages say them; empty: not there."""

    vllm: str
    torch: str
    vllm_wants_torch: str = ""  # the release that this vLLM is built for
    torch_cuda: str = ""  # the CUDA that torch is built with
    driver: str = ""
    driver_cuda: str = ""  # the newest CUDA that the driver serves
    gpus: tuple[Gpu, ...] = ()


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"tensor {self.tensor}, pipeline {self.pipeline}, experts {'spread' if self.experts else 'whole'}"


PROVEN: dict[Parallel, tuple[str, ...]] = {Parallel(): ("NVIDIA H200",)}
"""Parallel sizes that answered rightly with adapters, and the cards they did it on."""

PROVEN_VLLM = "0.26"  # on a GPU


def refusal(installed: Installed, parallel: Parallel, dtype: str, *, is_unproven_wanted: bool) -> str:
    """Why this must not start on GPUs, and what to do; empty if it may."""
    if not installed.torch_cuda:
        return f"torch {installed.torch} is built without CUDA: install the torch that vLLM {installed.vllm} asks for"
    if installed.vllm_wants_torch and _release(installed.torch) != _release(installed.vllm_wants_torch):
        return (
            f"vLLM {installed.vllm} is built for torch {installed.vllm_wants_torch}, torch {installed.torch} is installed: "
            f"`pip install torch=={installed.vllm_wants_torch}`"
        )
    if not installed.driver:
        return "no NVIDIA driver answers: is this machine's GPU given to the container (--gpus all)?"
    if _numbers(installed.driver_cuda)[:1] < _numbers(installed.torch_cuda)[:1]:
        return (
            f"driver {installed.driver} serves CUDA up to {installed.driver_cuda}, torch {installed.torch} needs {installed.torch_cuda}: "
            "update the driver, or take a vLLM built for the older CUDA"
        )
    if len(installed.gpus) < parallel.gpus:
        return f"{parallel} needs {parallel.gpus} GPUs, {len(installed.gpus)} are visible: lower it, or see CUDA_VISIBLE_DEVICES"
    for gpu in installed.gpus[: parallel.gpus]:
        if gpu.capability < LEAST_CAPABILITY:
            return f"{gpu.name} has compute capability {_dotted(gpu.capability)}, at least {_dotted(LEAST_CAPABILITY)} is needed"
    if is_unproven_wanted:
        return ""
    if parallel not in PROVEN:
        return (
            f"{parallel} was never run on a card; proven: {'; '.join(map(str, PROVEN))}. TENANTRY_WORKER_UNPROVEN=1 starts it all the same"
        )
    if dtype == "float32":
        return "dtype float32 was never run on a card: set TENANTRY_WORKER_DTYPE=bfloat16, or TENANTRY_WORKER_UNPROVEN=1"
    return ""


def doubts(installed: Installed, parallel: Parallel) -> list[str]:
    """What was not run before, but is no reason to refuse."""
    found: list[str] = []
    cards = PROVEN.get(parallel, ())
    new_cards = sorted({gpu.name for gpu in installed.gpus[: parallel.gpus]} - set(cards))
    if new_cards:
        found.append(f"not run on {', '.join(new_cards)} before")
    if _numbers(installed.vllm)[:2] != _numbers(PROVEN_VLLM)[:2]:
        found.append(f"vLLM {installed.vllm} was not run on a GPU before; {PROVEN_VLLM} was")
    return found


def read_installed() -> Installed:
    """Asks the packages and the driver. Makes no CUDA context: that would take half a gigabyte of the card."""
    torch: Any = importlib.import_module("torch")
    return Installed(
        vllm=importlib.metadata.version("vllm"),
        torch=str(torch.__version__),
        vllm_wants_torch=_wanted_torch(importlib.metadata.requires("vllm") or []),
        torch_cuda=torch.version.cuda or "",
        **_from_driver(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def _from_driver(visible: str | None) -> dict[str, Any]:
    try:
        nvml: Any = importlib.import_module("vllm.third_party.pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  no driver, or one that does not answer
        return {}
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        chosen = [part for part in (visible or "").split(",") if part.strip()]
        if visible is not None and all(part.strip().isdigit() for part in chosen):
            handles = [handles[int(part)] for part in chosen if int(part) < len(handles)]
        gpus = tuple(
            Gpu(
                name=str(nvml.nvmlDeviceGetName(handle)),
                capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        )
        return {"driver": str(nvml.nvmlSystemGetDriverVersion()), "driver_cuda": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}
    finally:
        nvml.nvmlShutdown()


def _wanted_torch(requirements: list[str]) -> str:
    """The release in "torch==2.11.0"."""
    pinned = (re.fullmatch(r"torch\s*==\s*([0-9.]+)\s*(;.*)?", requirement) for requirement in requirements)
    return next((match[1] for match in pinned if match), "")


def _release(version: str) -> str:
    return version.split("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
