"""How a service process runs: uvloop, signals turned into a stop event, one-line start errors, exit codes."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
import structlog
import uvloop

from shared import log as logging
from shared import settings
from shared.errors import TenantryError

logger = structlog.get_logger()

T = TypeVar("T", bound=msgspec.Struct)


class Stop:
    """Set once, by SIGTERM or SIGINT or a fatal condition; everything that runs for ever watches it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


async def end(tasks: Iterable[asyncio.Task[None]], again_s: float = 0.5) -> None:
    """Cancels the tasks until they have ended.

    Once is not enough on Python 3.11: asyncio.wait_for loses a cancellation that comes in the moment in which what it
    waits for is done (python/cpython#86296), and a loop around it then goes on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)


def run_service(name: str, kind: type[T], main: Callable[[T, Stop], Awaitable[None]]) -> None:
    """Runs `main(settings, stop)` until it returns; exits 0 on a clean stop, 2 on bad settings, 1 on a start or run error.

    Settings come from TENANTRY_<NAME>_*; `--help` lists them.
    """
    prefix = f"TENANTRY_{name.upper()}_"
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        sys.stdout.write(f"tenantry {name}: settings from the environment\n{settings.describe(kind, prefix)}\n")
        raise SystemExit(0)
    logging.configure(name, os.environ)
    try:
        values = settings.read(kind, prefix, os.environ)
    except TenantryError as error:
        sys.stderr.write(f"{name}: {error.message}\n")
        raise SystemExit(2) from error

    async def body() -> None:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set, signal.Signals(number).name)
        await main(values, stop)

    try:
        uvloop.run(body())
    except* TenantryError as group:
        for error in _leaves(group):
            logger.error("service.failed", code=error.code, message=error.message, **error.fields)
            sys.stderr.write(f"{name}: {error.message}\n")
        raise SystemExit(1) from None


def freeze_startup_objects() -> None:
    """Takes what lives as long as the process out of the garbage collector's sight. Call once, when everything has started.

    A full collection walks through every library's objects: 30 ms in a router, several 100 ms beside an engine, and no stream moves
    meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _leaves(group: BaseExceptionGroup[TenantryError]) -> list[TenantryError]:
    found: list[TenantryError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
