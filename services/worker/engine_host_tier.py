"""The host tier: packed slots in memory that the engine's process has pinned, so that mounting costs one copy to the device.

The memory belongs to no file system (no /dev/shm limit, nothing left behind by a kill): the engine's process opens it through this
process. Images are packed by a process of their own (engine_stager_child.py): Python that runs beside the engine's steps, or beside
this process's streams, would delay their tokens.
"""

import asyncio
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from services.worker.engine_image import Packed, SlotLayout
from services.worker.engine_stager_child import Order, Outcome
from shared.artifacts.bundle import CHAT_TEMPLATE_NAME
from shared.errors import LoadFailed, StartFailed

_START_LIMIT_S = 60.0
_PACK_LIMIT_S = 600.0
_LINE_LIMIT = 64 << 20
_decode = msgspec.json.Decoder(Outcome).decode


class Image:
    """One packed adapter, with all that a mount of it needs."""

    def __init__(self, number: int, packed: Packed, pack_ms: float, chat_template: str | None) -> None:
        self.number = number
        self.packed = packed
        self.pack_ms = pack_ms
        self.chat_template = chat_template
        self.probe_difference: float | None = None  # what a probe found after a mount: the same bytes need no second one


class HostTier:
    """`start` once. Images are known by their files, and the least recently used one gives way."""

    def __init__(self, layout: SlotLayout, images: int) -> None:
        self.layout = layout
        self.images = images
        self._memory = os.memfd_create("tenantry-host-tier", os.MFD_CLOEXEC)
        os.truncate(self._memory, layout.image_bytes * images)
        self._held: OrderedDict[str, Image] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def path(self) -> str:
        """For a process of the same user on this machine, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._memory}"

    @property
    def bytes(self) -> tuple[int, int]:
        """Set aside, and of it filled by images."""
        return self.layout.image_bytes * self.images, self.layout.image_bytes * len(self._held)

    async def start(self) -> None:
        """:raises StartFailed: the process that packs does not start."""
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "services.worker.engine_stager_child",
                    str(self._memory),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    pass_fds=(self._memory,),
                    limit=_LINE_LIMIT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
                await self._ask(Order(layout=self.layout))
        except (OSError, EOFError, TimeoutError) as error:
            raise StartFailed(f"the process that packs adapters did not start ({type(error).__name__})", package="numpy") from error

    async def close(self) -> None:
        await self._end()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def find(self, folder: Path) -> Image | None:
        """The image of these files, if it is held."""
        return self._held.get(_key(folder))

    async def stage(self, folder: Path) -> Image:
        """The image of the adapter in `folder`, packed now unless it is held.

        :raises LoadFailed: it does not fit the engine's slots.
        """
        async with self._one_at_a_time:
            key = _key(folder)
            image = self._held.get(key)
            if image is not None:
                self._held.move_to_end(key)
                return image
            number = self._room()
            started_s = time.monotonic()
            try:
                if self._process is None or self._process.returncode is not None:
                    await self._end()
                    await self.start()
                async with asyncio.timeout(_PACK_LIMIT_S):
                    outcome = await self._ask(Order(folder=str(folder), image=number))
            except (OSError, EOFError, TimeoutError, StartFailed) as error:
                await self._end()
                raise LoadFailed(f"the adapter could not be packed ({type(error).__name__})", reason="not_packed") from error
            except BaseException:
                await self._end()  # it still packs for an order that nobody waits for
                raise
            if outcome.packed is None:
                raise LoadFailed(outcome.message, reason=outcome.reason or "refused_by_engine")
            image = Image(number, outcome.packed, (time.monotonic() - started_s) * 1000.0, chat_template_of(folder))
            self._held[key] = image
            return image

    def drop(self, folder: Path) -> None:
        """Forgets the image of these files: it did not prove itself."""
        self._held.pop(_key(folder), None)

    def _room(self) -> int:
        free = set(range(self.images)) - {image.number for image in self._held.values()}
        return min(free) if free else self._held.popitem(last=False)[1].number

    async def _ask(self, order: Order) -> Outcome:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        return _decode(line)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]  # pyright: ignore  the pipe to a killed child is not closed by wait()


def chat_template_of(folder: Path) -> str | None:
    path = folder / CHAT_TEMPLATE_NAME
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _key(folder: Path) -> str:
    """A folder named by a digest holds what that says, whenever it was made; another one is known by its files' times and sizes."""
    if len(folder.name) == 64 and set(folder.name) <= set("0123456789abcdef"):
        return folder.name
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return f"{folder} {[(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats]}"
