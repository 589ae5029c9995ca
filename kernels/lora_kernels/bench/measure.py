"""Microseconds a step of captured work takes."""

import gc
import statistics
from collections.abc import Callable

import torch


def graph_us(step: Callable[[int], object], *, steps: int, replays: int = 15) -> float:
    """Median over replays of one graph of `steps` steps, per step. Step i must use weights and routing of its own: cold caches."""
    for index in range(steps):  # all of them: peers make tables for each set of weights at its first use
        step(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(steps):
            step(index)
    graph.replay()
    graph.replay()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(replays)]
    for start, end in zip(starts, ends, strict=True):
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1000 / steps for start, end in zip(starts, ends, strict=True)]
    del graph
    gc.collect()
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written both counted."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / statistics.median(times)
