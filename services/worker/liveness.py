"""Who is still there: routers with running attempts, and this process itself (it may have been frozen)."""

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from shared.bus import Bus, BusUnavailable, NoResponder, RequestTimeout
from shared.contracts.inference import router_ping_subject

log = structlog.get_logger()

_TICK_S = 0.1
_SETTLE_S = 0.05


class RouterWatch:
    """Pings every router with running attempts; one that has no responder `misses` times in a row is gone, a slow one never is.

    Answers within `grace_s` after a reconnect of our own do not count: the router may still be reconnecting itself.
    """

    def __init__(
        self,
        bus: Bus,
        routers: Callable[[], Iterable[str]],
        on_gone: Callable[[str], None],
        *,
        interval_s: float = 0.2,
        misses: int = 3,
        grace_s: float = 2.0,
    ) -> None:
        self._bus = bus
        self._routers = routers
        self._on_gone = on_gone
        self._interval_s = interval_s
        self._misses = misses
        self._grace_s = grace_s
        self._missed: dict[str, int] = {}
        self._pinging: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._trusted_from_s = 0.0
        bus.on_reconnect(self._reconnected)

    def _reconnected(self) -> None:
        self._trusted_from_s = self._loop.time() + self._grace_s
        self._missed.clear()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._interval_s)
                routers = set(self._routers())
                self._missed = {router: n for router, n in self._missed.items() if router in routers}
                for router_id in routers - self._pinging:
                    self._pinging.add(router_id)
                    group.create_task(self._ping(router_id))

    async def _ping(self, router_id: str) -> None:
        asked_s = self._loop.time()
        try:
            await self._bus.request(router_ping_subject(router_id), b"", timeout_s=1.0)
        except NoResponder:
            if self._bus.connected and asked_s >= self._trusted_from_s:
                self._miss(router_id)
        except (RequestTimeout, BusUnavailable):
            self._missed.pop(router_id, None)  # slow, or we are cut off: not gone
        else:
            self._missed.pop(router_id, None)
        finally:
            self._pinging.discard(router_id)

    def _miss(self, router_id: str) -> None:
        missed = self._missed.get(router_id, 0) + 1
        self._missed[router_id] = missed
        if missed >= self._misses:
            del self._missed[router_id]
            log.warning("router.gone", router_id=router_id)
            self._on_gone(router_id)


class FreezeWatch:
    """Notices that this process stood still (stopped, swapped out, its machine paused), and tells old messages from new ones.

    After a gap longer than `limit_s` every message read is taken for backlog, until the bus has confirmed a round trip that
    began after the wake: all that was sent to us while we stood still comes before it.
    """

    def __init__(
        self, bus: Bus, on_thaw: Callable[[float], None], *, limit_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._on_thaw = on_thaw
        self._limit_s = limit_s
        self._clock = clock
        self._last_tick_s = clock()
        self._backlog = False

    def stale(self) -> bool:
        """Whether a message read now may be from before we woke. Cheap: asked for every message."""
        self._look()
        return self._backlog

    async def run(self) -> None:
        """Runs until cancelled."""
        self._last_tick_s = self._clock()
        while True:
            await asyncio.sleep(_TICK_S)
            self._look()
            self._last_tick_s = self._clock()
            if self._backlog:
                await self._catch_up()

    def _look(self) -> None:
        now_s = self._clock()
        gap_s = now_s - self._last_tick_s
        if gap_s <= self._limit_s:
            return
        self._last_tick_s = now_s
        self._backlog = True
        log.warning("worker.thawed", frozen_s=round(gap_s, 3))
        self._on_thaw(gap_s)

    async def _catch_up(self) -> None:
        try:
            await self._bus.flush(timeout_s=1.0)
        except (RequestTimeout, BusUnavailable):
            return
        await asyncio.sleep(_SETTLE_S)  # what came before the confirmation is handed to its subscriptions' tasks first
        self._look()
        self._backlog = False
