"""Waiting on conditions with a deadline, never on the clock alone."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    """Returns once `condition()` holds; fails the test otherwise."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while not condition():
        assert loop.time() < give_up_at, f"did not come true in {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.01)


async def until_async(condition: Callable[[], Awaitable[bool]], timeout_s: float = 10.0, what: str = "") -> None:
    """The same for a condition that must be awaited."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while not await condition():
        assert loop.time() < give_up_at, f"did not come true in {timeout_s} s: {what or condition}"
        await asyncio.sleep(0.02)
