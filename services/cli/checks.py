"""What must hold before anything is started; each failure is one line that says what to do."""

import importlib.util
import shutil
import socket
from pathlib import Path

import psutil

from shared.bus.embedded import server_binary
from shared.errors import StartFailed

_ENGINE_BYTES = 2_500_000_000  # an engine's processes on a CPU before any weights
_DISK_BYTES = 500_000_000


def check_packages(engine: str) -> None:
    """:raises StartFailed: something is not installed."""
    server_binary()
    needed = ("vllm", "lora_kernels") if engine == "vllm" else ()
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise StartFailed(f"{' and '.join(missing)} not installed: run `make venv` and start with .venv/bin/tenantry")


def check_model(model: str) -> None:
    """:raises StartFailed: it is written as a path and there is no such folder; a hub id is the worker's to look for."""
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise StartFailed(f"there is no folder {model}: name a model's folder, or its hub id, with --model", model=model)


def check_port(port: int, option: str) -> None:
    """:raises StartFailed: somebody has it; says who, where that can be seen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartFailed(f"port {port} is taken{_holder(port)}: stop that, or choose another with {option}", port=port) from error


def check_disk(folder: Path) -> None:
    """:raises StartFailed: too little room for artifacts and state."""
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        raise StartFailed(
            f"{free / 1e6:.0f} MB are free under {folder} and at least {_DISK_BYTES / 1e6:.0f} MB are needed: "
            "free some, or name another folder with --data",
            free_bytes=free,
        )


def check_memory(engine: str, model: Path) -> None:
    """:raises StartFailed: the engine and the model's weights would not fit what is available now."""
    if engine != "vllm":
        return
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    needed = _ENGINE_BYTES + weights * 2  # read in, and held
    available = psutil.virtual_memory().available
    if available < needed:
        raise StartFailed(
            f"{available / 1e9:.1f} GB of memory are available and about {needed / 1e9:.1f} GB are needed for this engine and model: "
            "end other programs, or choose a smaller --model",
            available_bytes=available,
            needed_bytes=needed,
        )


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
            try:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
            except psutil.NoSuchProcess:
                return ""
    return ""
