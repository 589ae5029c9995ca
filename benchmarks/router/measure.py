"""One load against one face, with the CPU that each process took for it."""

import json
import subprocess
import time
from typing import Any

import psutil

from benchmarks.router.systems import OTHER_CORE, TOKENS_PER_S, Face, pinned, python
from tests.e2e.stack import ROOT

STREAMS = 64
TOKENS = 100
_SETTLE_S = 0.5  # usage, acknowledgements and logs that a request leaves behind are part of its cost
_TIMEOUT_S = 180.0


class Figures(dict[str, float]):
    """One repetition's figures of one system."""


def saturate(face: Face, seconds: float) -> Figures:
    said, cpu_s = _load(face, "saturate", "--seconds", str(seconds), "--connections", "64")
    figures = Figures(requests_per_s=said["requests_per_s"])
    if face.gateway:
        figures["router_us_per_request"] = cpu_s["gateway"] / said["requests"] * 1e6
    return figures


def paced(face: Face, seconds: float) -> Figures:
    said, _ = _load(face, "paced", "--seconds", str(seconds), "--rate", "50", "--tokens", "16")
    return Figures(ttft_p50_ms=said["ttft_p50_ms"], p99_ms=said["ttft_p99_ms"], missed=said["missed"])


def stream(face: Face, intrinsic_us: float) -> Figures:
    """Per token: the gateway, and everything between the client and the engine's application, which costs `intrinsic_us` itself."""
    said, cpu_s = _load(face, "stream", "--connections", str(STREAMS), "--tokens", str(TOKENS))
    tokens = said["tokens"]
    assert said["events"] >= tokens, f"{said['events']} events for {tokens} tokens"
    us = {name: seconds / tokens * 1e6 for name, seconds in cpu_s.items()}
    registry_us = us.pop("registry", 0.0)
    engine = "worker" if "worker" in us else "backend"
    us[engine] -= intrinsic_us
    figures = Figures(us_per_token=sum(us.values()), us_per_token_gateway=us["gateway"], stream_s=said["seconds"])
    for name in us.keys() - {"gateway"}:
        figures[f"us_per_token_{name}"] = us[name]
    if registry_us:
        figures["us_per_token_registry"] = registry_us  # consumes usage; beside the path, so not in the sum
    return figures


def intrinsic_us() -> float:
    """Of the scripted engine's application per paced token, alone."""
    argv = ["benchmarks.router.scripted_http", "intrinsic", "--tokens-per-s", str(TOKENS_PER_S)]
    argv += ["--streams", str(STREAMS), "--tokens", str(TOKENS)]
    done = subprocess.run(pinned([*python(), *argv], OTHER_CORE), cwd=ROOT, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return float(done.stdout)


def _load(face: Face, mode: str, *options: str) -> tuple[dict[str, Any], dict[str, float]]:
    argv = [*python(), "benchmarks.router.load", mode, "--port", str(face.port), "--key", face.key, "--model", face.model, *options]
    with subprocess.Popen(pinned(argv, OTHER_CORE), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None
        assert load.stdout is not None
        if load.stdout.readline() != "ready\n":
            raise RuntimeError(f"the load could not be started against port {face.port} ({mode})")
        time.sleep(_SETTLE_S)
        before_s = _cpu_s(face)
        load.stdin.write("go\n")
        load.stdin.flush()
        line = load.stdout.readline()
        time.sleep(_SETTLE_S)
        after_s = _cpu_s(face)
        if load.wait(_TIMEOUT_S) or not line:
            raise RuntimeError(f"the load ended early ({mode}, port {face.port})")
    return json.loads(line), {name: after_s[name] - before_s[name] for name in after_s}


def _cpu_s(face: Face) -> dict[str, float]:
    found = {name: _tree_s(pid) for name, pid in face.beside.items()}
    found["gateway"] = sum(_tree_s(pid) for pid in face.gateway)
    return found


def _tree_s(pid: int) -> float:
    """CPU seconds of a process with all its threads and living children, to the nanosecond (its POSIX clock; psutil has ticks of 10 ms)."""
    root = psutil.Process(pid)
    return sum(time.clock_gettime((~each.pid << 3) | 2) for each in (root, *root.children(recursive=True)))
