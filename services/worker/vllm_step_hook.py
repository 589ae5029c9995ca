"""Runs in vLLM's engine process: tells of every step what was computed for whom, and of the loop what it does between steps.

The loop is in one phase at a time, each with a beginning and an end of its own: input (requests in), idle (nothing is scheduled and
nothing comes), schedule, output. While a step is out with the model runner, the runner's own times count (vllm_step_timer.py), and what
lies between its parts is ipc. Steps overlap with asynchronous scheduling; who adds up counts each moment once.
"""

# pyright: basic, reportMissingImports=false

import os
import time
from collections import deque
from typing import Any

from services.worker.step_channel import StepQueues, StepSender
from services.worker.step_records import SOCKET_VARIABLE, Row, StepRecord

_now_ns = time.monotonic_ns
_IN_STEP = ""
_MOUNTING = ("lora", "mount", "release", "layout", "host_tier", "slot")


def metered(scheduler: type) -> type:
    """The scheduler class with the hook, if somebody wants to be told of steps."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return scheduler
    hook = StepHook()
    _watch_loop(hook)
    StepSender(hook.queues, path).start()
    return type("MeteredScheduler", (_Metered, scheduler), {"_tenantry_steps": hook})


class StepHook:
    """Of the engine's loop; only `queues` is shared with the sender's thread."""

    def __init__(self) -> None:
        self.queues = StepQueues()
        self._phase = "start"
        self._since_ns = _now_ns()
        self._number = 0
        self._out: deque[tuple[int, int, list[Row]]] = deque()  # steps with the model runner: number, since when, rows
        self._ending: deque[tuple[int, str]] = deque()  # last step in which it is, engine request

    def switch(self, phase: str) -> int:
        now_ns = _now_ns()
        if self._phase != _IN_STEP and self._phase != phase:
            self.queues.spans.append((self._phase, self._since_ns, now_ns))
        if self._phase != phase:
            self._phase, self._since_ns = phase, now_ns
            since_ns = min(now_ns, self._out[0][1]) if self._out else now_ns
            self.queues.state = (phase == "idle", since_ns)
        return now_ns

    def scheduled(self, output: Any, requests: dict[str, Any]) -> None:
        self._number += 1
        rows: list[Row] = []
        for engine_id, tokens in output.num_scheduled_tokens.items():
            request = requests[engine_id]
            before = request.num_computed_tokens - tokens  # already advanced
            is_prompt = before < request.num_prompt_tokens
            adapter = request.lora_request.lora_int_id if request.lora_request is not None else 0
            rows.append(Row(engine_id, tokens if is_prompt else 0, 0 if is_prompt else tokens, before + tokens, adapter))
        self._out.append((self._number, _now_ns(), rows))
        self.switch(_IN_STEP)

    def received(self, model_output: Any) -> None:
        number, out_ns, rows = self._out.popleft()
        now_ns = _now_ns()
        host, spans, busy = getattr(model_output, "tenantry_times", None) or ([], [], [])
        if rows:
            before_ns = out_ns
            for start_ns, end_ns in [*host, (now_ns, now_ns)] if host else ():
                self.queues.spans.append(("ipc", before_ns, start_ns))
                before_ns = end_ns
            self.queues.spans.extend(spans)
            self.queues.steps.append(StepRecord(number, busy, rows))
        else:  # only to tell the model runner which requests have ended
            self.queues.spans.append(("ipc", out_ns, now_ns))
            self.queues.steps.append(StepRecord(number, [], []))
        while self._ending and self._ending[0][0] <= number:
            self.queues.ended.append(self._ending.popleft()[1])
        self.switch("output")

    def ended(self, engine_id: str) -> None:
        if self._out:
            self._ending.append((self._out[-1][0], engine_id))
        else:
            self.queues.ended.append(engine_id)


class _Metered:
    _tenantry_steps: StepHook
    requests: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._tenantry_steps.switch("schedule")
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._tenantry_steps.scheduled(output, self.requests)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._tenantry_steps.received(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._tenantry_steps.ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


def _watch_loop(hook: StepHook) -> None:
    """The parts of the engine's loop that are not the scheduler's."""
    from vllm.v1.engine.core import EngineCoreProc

    take_input, handle = EngineCoreProc._process_input_queue, EngineCoreProc._handle_client_request

    def process_input_queue(self: Any) -> Any:
        hook.switch("input" if self.has_work() else "idle")
        try:
            return take_input(self)
        finally:
            hook.switch("schedule" if self.scheduler.has_requests() else _IN_STEP)

    def handle_client_request(self: Any, request_type: Any, request: Any) -> Any:
        hook.switch(_phase_of(request))
        try:
            return handle(self, request_type, request)
        finally:
            hook.switch("input" if self.has_work() else "idle")

    EngineCoreProc._process_input_queue = process_input_queue  # type: ignore[method-assign]
    EngineCoreProc._handle_client_request = handle_client_request  # type: ignore[method-assign]


def _phase_of(request: Any) -> str:
    """Calls of the worker's side: (client, call, method, arguments), where what `collective_rpc` calls is its first argument."""
    if not (isinstance(request, tuple | list) and len(request) == 4 and isinstance(request[2], str)):
        return "input"
    called = [request[2], *(argument for argument in request[3] or () if isinstance(argument, str))]
    return "mounting" if any(word in name for name in called for word in _MOUNTING) else "calls"
