"""Runs in vLLM's worker process: when each step was prepared and computed, sent back with the step's own output.

On a GPU a step's computing is what its stream did between two CUDA events, placed on the host's clock: right after the step before it, or
when it was handed over, whichever came later. Events are read where vLLM waits for the output anyway. On a CPU it is the time of the
calls. Both of vLLM's model runners are known by the methods that they share.
"""

# pyright: basic, reportMissingImports=false

import time
from collections.abc import Callable
from typing import Any

import torch

from services.worker.step_records import Interval, Span

_now_ns = time.monotonic_ns
_INNER = {"_zero_block_ids": "kv_zeroing", "_set_active_loras": "lora_activation"}


class _Times:
    def __init__(self) -> None:
        self.host: list[Interval] = []  # in the model runner at all
        self.spans: list[Span] = []
        self.busy: list[Interval] = []
        self.entered_ns = _now_ns()
        self.forward_ns = 0
        self.first: Any = None  # CUDA events
        self.last: Any = None

    @property
    def told(self) -> tuple[list[Interval], list[Span], list[Interval]]:
        return self.host, self.spans, self.busy


class StepTimer:
    """Wraps the methods of one model runner."""

    def __init__(self, runner: Any, device: Any) -> None:
        self._is_gpu = device.type == "cuda"
        self._preparing: _Times | None = None
        self._sampling: _Times | None = None
        self._end: Any = None  # the last step's last event, and when it was
        self._end_ns = 0
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._timed_execute, self._timed_sample
        for name, span in _INNER.items():
            if hasattr(runner, name):
                setattr(runner, name, self._timed_inner(getattr(runner, name), span))
        if hasattr(runner, "_model_forward"):
            runner._model_forward = self._timed_forward(runner._model_forward)
        if hasattr(runner, "pool"):
            self._pool = runner.pool
            runner.pool = self._timed_pool

    def _timed_execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens or kwargs.get("dummy_run"):
            return self._execute(scheduler_output, *args, **kwargs)
        times = self._preparing = _Times()
        try:
            output = self._execute(scheduler_output, *args, **kwargs)
        finally:
            self._preparing = None
        end_ns = _now_ns()
        self._begin_forward(times)
        times.spans.insert(0, ("prepare", times.entered_ns, times.forward_ns))
        times.host.append((times.entered_ns, end_ns))
        if not self._is_gpu:
            times.busy.append((times.forward_ns, end_ns))
        if output is None:
            self._sampling = times
            return None
        return self._finish(output, times)

    def _timed_sample(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed_end(self._sample, *args, **kwargs)

    def _timed_pool(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed_end(self._pool, *args, **kwargs)

    def _timed_end(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        times, self._sampling = self._sampling, None
        if times is None:
            return call(*args, **kwargs)
        start_ns = _now_ns()
        output = call(*args, **kwargs)
        end_ns = _now_ns()
        times.host.append((start_ns, end_ns))
        if not self._is_gpu:
            times.busy.append((start_ns, end_ns))
        return self._finish(output, times) if output is not None else None

    def _timed_inner(self, call: Callable[..., Any], span: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            times = self._preparing
            if times is None:
                return call(*args, **kwargs)
            start_ns = _now_ns()
            result = call(*args, **kwargs)
            times.spans.append((span, start_ns, _now_ns()))
            if span == "lora_activation":
                self._begin_forward(times)  # nothing of note comes between the two where the forward has no method of its own
            return result

        return timed

    def _timed_forward(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._preparing is not None:
                self._preparing.forward_ns = 0
                self._begin_forward(self._preparing)
            return call(*args, **kwargs)

        return timed

    def _begin_forward(self, times: _Times) -> None:
        if times.forward_ns:
            return
        times.forward_ns = _now_ns()
        if self._is_gpu:
            times.first = torch.cuda.Event(enable_timing=True)
            times.first.record()

    def _finish(self, output: Any, times: _Times) -> Any:
        if self._is_gpu:
            times.last = torch.cuda.Event(enable_timing=True)
            times.last.record()
        get_output = getattr(output, "get_output", None)
        if get_output is None:
            return self._tell(output, times)
        output.get_output = lambda: self._tell(get_output(), times)
        return output

    def _tell(self, output: Any, times: _Times) -> Any:
        if self._is_gpu:
            times.busy.append(self._on_gpu(times))
        output.tenantry_times = times.told
        return output

    def _on_gpu(self, times: _Times) -> Interval:
        times.last.synchronize()  # it has passed: the output is here
        took_ns = int(times.first.elapsed_time(times.last) * 1e6)
        start_ns = times.forward_ns
        if self._end is not None and self._end_ns > start_ns:  # it was handed over while the step before it was computed
            start_ns = self._end_ns + max(0, int(self._end.elapsed_time(times.first) * 1e6))
        end_ns = min(start_ns + took_ns, _now_ns())
        self._end, self._end_ns = times.last, end_ns
        return (max(end_ns - took_ns, 0), end_ns)
