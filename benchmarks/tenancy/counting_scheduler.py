"""Runs in vLLM's engine process: a scheduler that notes, for every request, the steps between its arrival and the first that reads it."""

# pyright: basic, reportMissingImports=false

import os
from pathlib import Path
from typing import Any

PATH_VARIABLE = "TENANTRY_BENCH_WAITS"


def fair(*args: Any, **kwargs: Any) -> Any:
    """The worker's own scheduler, counting."""
    from services.worker.vllm_scheduler import tenant_scheduler

    return _counting(tenant_scheduler(*args, **kwargs))


def plain(*args: Any, **kwargs: Any) -> Any:
    """vLLM's own scheduler, counting."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return _counting(AsyncScheduler(*args, **kwargs))


def _counting(scheduler: Any) -> Any:
    arrived: dict[str, int] = {}
    add, schedule = scheduler.add_request, scheduler.schedule
    path = Path(os.environ[PATH_VARIABLE])

    def add_request(request: Any) -> None:
        arrived[request.request_id] = scheduler.current_step
        add(request)

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        lines = [
            f"{new.req_id} {scheduler.current_step - arrived.pop(new.req_id)}\n"
            for new in output.scheduled_new_reqs
            if new.req_id in arrived
        ]
        if lines:
            with path.open("a") as file:
                file.writelines(lines)
        return output

    scheduler.add_request, scheduler.schedule = add_request, counted
    return scheduler


def waits(path: Path) -> dict[str, int]:
    """By the client's request id: an engine's is `cmpl-<it>-<prompt>-<more>`."""
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, steps = line.split()
        found[name.split("-")[1]] = int(steps)
    return found
