"""What is measured, on any engine: a flood beside a quiet tenant, long prompts beside a running stream, backlogs of three weights."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from benchmarks.tenancy.desk import Asked, Desk

Prompt = str | list[int]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt(tokens)` makes a prompt of so many that no cache has seen."""

    prompt: Callable[[int], Any]
    flood: int = 200  # requests that A has outstanding at all times
    long_prompt: int = 1600
    long_output: int = 600
    quiet_prompt: int = 32
    quiet_output: int = 16
    quiet_every_s: float = 1.0
    warm_up_s: float = 30.0
    measure_s: float = 240.0


class Beside(msgspec.Struct, frozen=True):
    """A quiet tenant's requests beside something, and all tokens that were served meanwhile."""

    quiet: list[Asked]
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@asynccontextmanager
async def background(*work: Any) -> AsyncIterator[None]:
    """Cancels the work at the end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


async def quiet_beside(desk: Desk, load: Load, outstanding: int) -> Beside:
    """B sends one short request a second while A keeps `outstanding` long ones open (0: B is alone)."""
    loop = asyncio.get_running_loop()
    flood = desk.keep_asking("a", outstanding, lambda: load.prompt(load.long_prompt), load.long_output, load.long_output // 2)
    quiet: list[Asked] = []
    async with background(flood):
        await asyncio.sleep(load.warm_up_s if outstanding else 0.0)
        began_s, before = loop.time(), sum(desk.tokens.values())
        async with asyncio.TaskGroup() as group:
            number = 0
            while loop.time() < began_s + load.measure_s:
                number += 1
                group.create_task(desk.ask("b", load.prompt(load.quiet_prompt), load.quiet_output, keep=quiet))
                # a little off the second, so that it meets all phases of a step
                await asyncio.sleep(began_s + number * load.quiet_every_s * 1.0037 - loop.time())
            tokens, seconds = sum(desk.tokens.values()) - before, loop.time() - began_s
    return Beside(quiet, tokens, seconds)


async def stream_beside(
    desk: Desk, load: Load, *, decoding: int, prompts: int, prompt_tokens: int, stream_tokens: int, samples: int = 1
) -> list[float]:
    """Inter-token times of B's stream, in ms, while A decodes `decoding` streams and keeps `prompts` long prompts coming."""
    decodes = desk.keep_asking("a", decoding, lambda: load.prompt(16), 4 * stream_tokens)
    floods = desk.keep_asking("a", prompts, lambda: load.prompt(prompt_tokens), 4, samples=samples)
    async with background(decodes):
        await asyncio.sleep(load.warm_up_s / 10)
        kept: list[Asked] = []
        async with asyncio.TaskGroup() as group:
            streaming = group.create_task(desk.ask("b", load.prompt(load.quiet_prompt), stream_tokens, keep=kept))
            while not kept or len(kept[0].token_s) < stream_tokens // 20:  # it runs before the prompts come
                await asyncio.sleep(0.01)
            from_token = len(kept[0].token_s)
            async with background(floods):
                await asyncio.wait([streaming])
    return kept[0].gaps_ms[from_token:]


async def backlogs(desk: Desk, load: Load, tenants: dict[str, int], outstanding: int, prompt_tokens: int, output: int) -> dict[str, int]:
    """Tokens that each tenant got while all of them had work waiting."""
    work = [desk.keep_asking(tenant, outstanding, lambda: load.prompt(prompt_tokens), output, output // 2) for tenant in tenants]
    async with background(*work):
        await asyncio.sleep(load.warm_up_s)
        before = dict(desk.tokens)
        await asyncio.sleep(load.measure_s)
        return {tenant: desk.tokens[tenant] - before[tenant] for tenant in tenants}


def percentile(values: list[float], percent: int) -> float:
    """The value that so many percent are not above."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
