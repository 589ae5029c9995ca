"""vLLM's OpenAI application over an engine of vLLM's alone, behind uvicorn, as `vllm serve` arranges them."""

import asyncio
import contextlib
import importlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from benchmarks.serving import engines
from benchmarks.serving.whole_path import HttpDriver

_PLACES = {  # of vLLM 0.26 and of 0.32
    "build_app": ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.app"),
    "init_app_state": ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.app_state"),
    "make_arg_parser": ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils", "vllm.utils"),
}


@contextlib.asynccontextmanager
async def around(running: engines.Running, plan: engines.Plan) -> AsyncIterator[HttpDriver]:
    """`running`'s adapters are asked for by their names; without any, the base."""
    options = ["--model", plan.folder, "--served-model-name", plan.model]
    args = _found("make_arg_parser")(_found("FlexibleArgumentParser")()).parse_args(options)
    args.disable_log_stats, args.enable_log_requests = True, False
    tasks = tuple(await running.client.get_supported_tasks())
    app = _found("build_app")(args, tasks)
    await _found("init_app_state")(running.client, app.state, args, supported_tasks=tasks)
    names = {request.lora_name: request for request in running.adapters}
    app.state.openai_serving_models.lora_requests = names
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, loop="none", http="httptools")
    http = uvicorn.Server(config)
    driver = HttpDriver(listener.getsockname()[1], "none", list(names) or [plan.model], plan.config["vocab_size"])
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(http.serve(sockets=[listener]))
        try:
            while not http.started:
                await asyncio.sleep(0.05)
            yield driver
        finally:
            await driver.close()
            http.should_exit = True
            await serving


def _found(name: str) -> Any:
    for place in _PLACES[name]:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(place), name)
    raise ImportError(f"this vLLM has no {name} in {' or '.join(_PLACES[name])}")
