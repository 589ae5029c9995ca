"""The time that all routers of a cluster share: the bus server's, as it stamped the registries' heartbeats; never a client's."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from time import monotonic

import msgspec
import structlog

from shared.bus import Bus, BusUnavailable, NoResponder, RequestTimeout
from shared.contracts.state import STATE_BUCKET

log = structlog.get_logger()

_STEP_S = 5.0  # behind by more than this, for a while: the server's clock was set back
_STEP_AFTER = 8  # heartbeats
_ASK_TIMEOUT_S = 2.0


class _Info(msgspec.Struct):
    ts: str = ""


_decode_info = msgspec.json.Decoder(_Info).decode


class ClusterClock:
    """Runs on between heartbeats, and without them, by this process's monotonic clock. Never goes back but by a step."""

    def __init__(self, monotonic_s: Callable[[], float] = monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._offset_s: float | None = None
        self._behind = 0

    def heard(self, stamp_s: float) -> None:
        """Something that the server stamped just now has come; how long it was on its way makes it only look older."""
        offset_s = stamp_s - self._monotonic_s()
        known_s = self._offset_s
        if known_s is None or offset_s >= known_s:
            self._offset_s = offset_s
            self._behind = 0
        elif known_s - offset_s > _STEP_S:
            self._behind += 1
            if self._behind >= _STEP_AFTER:
                log.warning("clock.set_back", by_s=round(known_s - offset_s, 3))
                self._offset_s = offset_s
                self._behind = 0
        else:
            self._behind = 0

    def unix_s(self) -> float:
        """0 before anything was heard; nothing is served then."""
        return 0.0 if self._offset_s is None else self._offset_s + self._monotonic_s()

    async def ask(self, bus: Bus) -> None:
        """The server itself, once: the last heartbeat may be old where no registry runs."""
        try:
            answer = _decode_info(await bus.request(f"$JS.API.STREAM.INFO.KV_{STATE_BUCKET}", b"", _ASK_TIMEOUT_S))
            self.heard(seconds_of(answer.ts))
        except (BusUnavailable, NoResponder, RequestTimeout, msgspec.MsgspecError, ValueError) as error:
            log.warning("clock.not_asked", error=str(error))


@lru_cache(maxsize=4096)
def seconds_of(timestamp: str) -> float:
    """Of an RFC 3339 timestamp, since 1970; UTC where it names no zone.

    :raises ValueError: it is none.
    """
    found = datetime.fromisoformat(timestamp)
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
