"""Whether the route table may be believed now: heartbeats that come, a direct read when they do not, a rebuild when the watch has died.

The request path asks `current(now_s)` and waits in `settle` only in the doubtful cases.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import structlog

from shared.bus import Bucket, Bus, BusUnavailable, Entry
from shared.errors import RoutesStale

log = structlog.get_logger()

_TICK_S = 0.05
_HOLD_MARGIN_S = 0.1  # past watch_silence_s a request waits for the verdict, even if this module's task is late
_READ_TIMEOUT_S = 0.5
_REBUILD_EVERY_S = 0.5


class Doubt(StrEnum):
    NONE = "none"
    REGISTRY_DOWN = "registry_down"  # the heartbeat stands still: nothing can have changed
    WATCH_BROKEN = "watch_broken"  # it moves and we do not see it
    UNREADABLE = "unreadable"  # we cannot know


class Freshness:
    """Fed by `heard` with each heartbeat that the watch shows; `run` looks after it."""

    def __init__(self, bus: Bus, heartbeat_key: str, rebuild: Callable[[], None], silence_s: float, stale_after_s: float) -> None:
        self.doubt = Doubt.NONE
        self.direct_reads = 0
        self._bus = bus
        self._key = heartbeat_key
        self._rebuild = rebuild
        self._silence_s = silence_s
        self._stale_after_s = stale_after_s
        self._revision = 0  # of the newest heartbeat that the watch showed
        self._current_s = -1.0  # loop time at which the table was last known to be current
        self._rebuilt_s = -1.0
        self._verdict = asyncio.Event()

    def heard(self, entry: Entry | None) -> None:
        """The watch showed a heartbeat, and so everything that was written before it."""
        if entry is None or entry.revision <= self._revision:
            return
        self._revision = entry.revision
        self._settle(Doubt.NONE)

    def current(self, now_s: float) -> bool:
        return self._current_s >= 0.0 and now_s - self._current_s < self._silence_s + _HOLD_MARGIN_S

    def age_s(self, now_s: float) -> float:
        return now_s - self._current_s if self._current_s >= 0.0 else float("inf")

    def stale(self, now_s: float) -> bool:
        """In doubt for so long that the router must not serve."""
        return self._current_s < 0.0 or now_s - self._current_s > self._silence_s + self._stale_after_s

    async def settle(self, now_s: float) -> None:
        """Returns once the table is known to be current.

        :raises RoutesStale: it is not, and could not be made so in time.
        """
        loop = asyncio.get_running_loop()
        until_s = min(self._current_s + self._silence_s + self._stale_after_s, now_s + self._stale_after_s)
        while not self.current(now_s):
            if now_s >= until_s:
                raise RoutesStale("routes may be old and cannot be refreshed now; nothing is served from them", retry_after_s=1.0)
            verdict = self._verdict
            try:
                async with asyncio.timeout(until_s - now_s):
                    await verdict.wait()
            except TimeoutError:
                pass
            now_s = loop.time()

    async def run(self, bucket: Bucket, synced: asyncio.Event) -> None:
        """Runs until cancelled; starts once the mirror's first snapshot is complete."""
        loop = asyncio.get_running_loop()
        await synced.wait()
        while True:
            if self.age_s(loop.time()) >= self._silence_s:
                await self._look(bucket)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError  # a wait_for below may have swallowed it (Python 3.11)
            await asyncio.sleep(_TICK_S)

    async def _look(self, bucket: Bucket) -> None:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        if not self._bus.connected:
            self._suspect(Doubt.UNREADABLE)
            return
        self.direct_reads += 1
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                entry = await bucket.get(self._key)
        except (BusUnavailable, TimeoutError):
            self._suspect(Doubt.UNREADABLE)
            return
        if entry is not None and entry.revision < self._revision:
            log.error("routes.bucket_replaced", revision=entry.revision, known_revision=self._revision)
            self._revision = 0  # whatever the new bucket's watch shows counts
        if entry is None or entry.revision <= self._revision:
            if self.doubt is not Doubt.REGISTRY_DOWN:
                self._rebuild()  # once: what was written between the last heartbeat and the registry's end
            self._settle(Doubt.REGISTRY_DOWN, asked_s)
            return
        self._suspect(Doubt.WATCH_BROKEN)
        if asked_s - self._rebuilt_s >= _REBUILD_EVERY_S:
            self._rebuilt_s = asked_s
            self._rebuild()

    def _settle(self, doubt: Doubt, at_s: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        if doubt is not self.doubt:
            (log.warning if doubt is not Doubt.NONE else log.info)("routes.freshness", doubt=doubt.value, was=self.doubt.value)
        self.doubt = doubt
        self._current_s = loop.time() if at_s is None else at_s
        self._verdict.set()
        self._verdict = asyncio.Event()

    def _suspect(self, doubt: Doubt) -> None:
        if doubt is not self.doubt:
            silent_s = round(self.age_s(asyncio.get_running_loop().time()), 3)
            log.warning("routes.freshness", doubt=doubt.value, was=self.doubt.value, silent_s=silent_s)
        self.doubt = doubt
