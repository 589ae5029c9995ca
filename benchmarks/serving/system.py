"""`python -m benchmarks.serving.system SYSTEM PLAN`: one system in a process of its own, doing what the lines of its input ask.

Answers are JSON lines on what was standard output; what vLLM prints goes to standard error.
"""

import asyncio
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.serving import engines, figures
from benchmarks.serving.driver import Driver

_DECODE_STEPS = 16  # in a profile


class System:
    def __init__(self, plan: engines.Plan, running: engines.Running, driver: Driver) -> None:
        self._plan = plan
        self._running = running
        self._driver = driver
        self._turn = 0

    async def measure(self, *, batch: int, repeats: int, output_tokens: int) -> dict[str, Any]:
        return await self._measured(self._driver, batch, repeats, output_tokens)

    async def measure_path(
        self, *, batches: list[int], repeats: int, output_tokens: int, rates: list[float], seconds: float
    ) -> dict[str, Any]:
        """The same through client, router, NATS and worker, around the engine that runs here; and at rates of arrival."""
        from benchmarks.serving.whole_path import around

        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="tenantry-path-") as folder:
            async with around(self._running, self._plan, Path(folder)) as driver:
                for batch in batches:
                    found[str(batch)] = await self._measured(driver, batch, repeats, output_tokens)
                for rate in rates:
                    streams = await driver.arrivals(rate, seconds, self._plan.prompt_tokens, output_tokens, self._seed())
                    found.setdefault("arrivals", []).append(figures.of_arrivals(streams, rate))
        return found

    async def measure_http(self, *, batches: list[int], repeats: int, output_tokens: int) -> dict[str, Any]:
        """vLLM's own OpenAI server over its own engine, asked over HTTP as the whole path is."""
        from benchmarks.serving.vllm_server import around

        found: dict[str, Any] = {}
        async with around(self._running, self._plan) as driver:
            for batch in batches:
                found[str(batch)] = await self._measured(driver, batch, repeats, output_tokens)
        return found

    async def _measured(self, driver: Any, batch: int, repeats: int, output_tokens: int) -> dict[str, Any]:
        """Medians of the repeats, after one that warms up."""
        prompt_tokens = self._plan.prompt_tokens
        await driver.batch(batch, prompt_tokens, 8, self._seed())
        taken = [figures.of_batch(await driver.batch(batch, prompt_tokens, output_tokens, self._seed())) for _ in range(repeats)]
        return figures.medians(taken) | {"repeats": repeats, "output_tokens": output_tokens}

    async def profile(self, *, batch: int, decode: bool) -> dict[str, Any]:
        """GPU time of a batch's prompts; and of decode steps, kernel by kernel."""
        prompt_tokens = self._plan.prompt_tokens
        await self._driver.batch(batch, prompt_tokens, 1, self._seed())
        prefill = await self._profiled(self._driver.batch(batch, prompt_tokens, 1, self._seed()))
        found: dict[str, Any] = {"prefill_gpu_ms": round(prefill["busy_ms"], 3), "prefill_kernels": prefill["kernels"]}
        found["prefill_calls"] = prefill["calls"]
        if decode:
            # Short prompts, so that what is not decoding is little; it is taken off.
            first = await self._profiled(self._driver.batch(batch, 32, 1, self._seed()))
            steps = await self._profiled(self._driver.batch(batch, 32, 1 + _DECODE_STEPS, self._seed()))
            found["decode_gpu_ms"] = round((steps["busy_ms"] - first["busy_ms"]) / _DECODE_STEPS, 4)
            found["decode_kernels"] = steps["kernels"]
            found["decode_calls"] = steps["calls"]
            found["prefill_host"] = await self._on_host(self._driver.batch(batch, prompt_tokens, 1, self._seed()))
            found["decode_host"] = await self._on_host(self._driver.batch(batch, 32, 1 + _DECODE_STEPS, self._seed()))
        return found

    async def switching(self, *, rounds: int, per_block: int, mounts: int) -> dict[str, Any]:
        """Of Tenantry's engine: first tokens after a switch, and mounting beside streams."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from benchmarks.serving.switching import Switching

        plan, running = self._plan, self._running
        folders = {engines.adapter_id(seed): engines.adapter_folder(plan, seed) for seed in plan.adapter_seeds}
        vocabulary = plan.config["vocab_size"]
        measured = Switching(running.tenantry, running.client, folders, plan.rank, vocabulary, SamplingParams, RequestOutputKind.DELTA)
        beside = await measured.beside_streams(8, mounts)
        return {"beside_8_streams": beside, "first_token": await measured.first_tokens(rounds, per_block)}

    async def memory(self) -> dict[str, Any]:
        return (await self._running.client.collective_rpc("bench_memory"))[0]

    async def _on_host(self, work: Any) -> Any:
        await self._running.client.collective_rpc("bench_host_profile", kwargs={"start": True})
        await work
        return (await self._running.client.collective_rpc("bench_host_profile", kwargs={"start": False}))[0]

    async def _profiled(self, work: Any) -> dict[str, Any]:
        await self._running.client.collective_rpc("bench_profile", kwargs={"start": True})
        await work
        return (await self._running.client.collective_rpc("bench_profile", kwargs={"start": False}))[0]

    def _seed(self) -> str:
        self._turn += 1
        return f"{self._plan.seed}-{self._turn}"


async def serve(name: str, plan: engines.Plan, say: Any) -> None:
    started_s = time.monotonic()
    if name == "c":
        from services.worker.governor import Governor

        running = await engines.start_tenantry(plan, Governor())
    else:
        running = await engines.start_vllm(plan, lora=name == "b")
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    driver = Driver(running.client, SamplingParams, RequestOutputKind.DELTA, plan.config["vocab_size"], running.adapters)
    await driver.check_finite()
    system = System(plan, running, driver)
    say({"ready_s": round(time.monotonic() - started_s, 1), "about": running.about})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        order: dict[str, Any] = msgspec.json.decode(line)
        try:
            say(await getattr(system, order.pop("do"))(**order))
        except Exception as error:  # the one who asked decides
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


def main(name: str, plan: str) -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(msgspec.json.encode(value) + b"\n")

    try:
        asyncio.run(serve(name, engines.plan_from(plan), say))
    except BaseException as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
    finally:
        sys.stderr.flush()
        os._exit(0)  # an orderly end of vLLM takes seconds that the next system waits for; whoever started this ends what is left


if __name__ == "__main__":
    main(*sys.argv[1:])
