"""Programs of their own beside the benchmark, which end with it."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping

from benchmarks import machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.asynccontextmanager
async def running(module: str, nats_url: str, settings: Mapping[str, str]) -> AsyncIterator[None]:
    """A service, which is told to stop at the end."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TENANTRY_")}
    env |= {"TENANTRY_NATS_URL": nats_url, "TENANTRY_LOG_LEVEL": "error", **settings}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, cwd=machine.ROOT, env=env)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def output_of(module: str, *arguments: str) -> bytes:
    """What a program wrote, once it has ended well.

    :raises RuntimeError: it has not.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=machine.ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        written, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")
    return written
