"""Usage of attempts to the USAGE stream: cumulative every second while they run and once at their end. Off the token path."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.worker.governor import Attempt, Governor
from services.worker.identity import Identity
from shared.bus import BusUnavailable
from shared.contracts.usage import BATCH_LIMIT, AttemptUsage, encode

log = structlog.get_logger()

Store = Callable[[bytes, str], Awaitable[None]]  # (encoded usage, message id); raises BusUnavailable

_RETRY_S = 0.5
_GATHER_S = 0.1  # what is noted meanwhile goes in one message


class UsageMeter:
    """Holds at most `limit` unsent checkpoints, one per attempt: a newer one replaces an older one, which it includes.

    When full (the bus has been away for long), checkpoints of running attempts are left out first; a final one that is lost is
    counted in `lost` and logged.
    """

    def __init__(self, governor: Governor, store: Store, *, me: Identity, limit: int = 16_384) -> None:
        self.lost = 0
        self._batches = 0
        self._governor = governor
        self._me = me
        self._store = store
        self._limit = limit
        self._checkpoints: dict[tuple[str, int], int] = {}
        self._unsent: dict[tuple[str, int], AttemptUsage] = {}
        self._sending = 0
        self._changed = asyncio.Event()

    def finish(self, attempt: Attempt, outcome: str) -> None:
        """The attempt's last figures; it has left the governor."""
        attempt.ended_s = asyncio.get_running_loop().time()
        self._note(attempt, final=True, outcome=outcome)
        self._checkpoints.pop(attempt.key, None)

    async def run(self, interval_s: float = 1.0, senders: int = 4) -> None:
        """Takes checkpoints and sends until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(senders):
                group.create_task(self._send())
            while True:
                await asyncio.sleep(interval_s)
                for attempt in self._governor.attempts():
                    self._note(attempt, final=False, outcome="running")

    async def flush(self, timeout_s: float) -> bool:
        """Whether everything noted so far was stored in time; `run` must be running."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._unsent or self._sending:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    def _note(self, attempt: Attempt, *, final: bool, outcome: str) -> None:
        key = attempt.key
        if len(self._unsent) >= self._limit and key not in self._unsent:
            if not final:
                return
            self._make_room()
        checkpoint = self._checkpoints.get(key, 0) + 1
        self._checkpoints[key] = checkpoint
        handle = attempt.handle
        now_s = attempt.ended_s if attempt.ended_s is not None else asyncio.get_running_loop().time()
        self._unsent[key] = AttemptUsage(
            request_id=attempt.request_id,
            attempt=attempt.attempt,
            checkpoint=checkpoint,
            final=final,
            tenant_id=handle.tenant_id,
            adapter_id=handle.adapter_id,
            digest=handle.digest,
            pool_id=self._me.pool_id,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            path=attempt.path,
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.completion_tokens,
            cached_tokens=attempt.cached_tokens,
            engine_ms=attempt.engine_ms,
            outcome=outcome,
            alias=handle.alias,
            version=handle.version,
            base=handle.base,
            key_id=attempt.key_id,
            queue_ms=attempt.place.queued_until_ms(now_s),
            first_token_ms=_ms(attempt.began_s, attempt.first_token_s),
            total_ms=_ms(attempt.began_s, now_s),
            kv_byte_ms=self._governor.admission.kv_byte_ms(attempt.place),
        )
        self._changed.set()

    def _make_room(self) -> None:
        victim = next((key for key, usage in self._unsent.items() if not usage.final), None)
        if victim is None:
            victim = next(iter(self._unsent))
            self.lost += 1
            log.error("usage.lost", request_id=victim[0], attempt=victim[1], lost_total=self.lost)
        del self._unsent[victim]

    async def _send(self) -> None:
        while True:
            if not self._unsent:
                self._changed.clear()
                await self._changed.wait()
                continue
            batch = [self._unsent.pop(key) for key in list(self._unsent)[:BATCH_LIMIT]]
            self._batches += 1
            self._sending += 1
            try:
                await self._store(encode(batch), f"{self._me.incarnation}:{self._batches}")
            except BusUnavailable as error:
                log.warning("usage.not_stored", error=error.message)
                for usage in batch:
                    key = (usage.request_id, usage.attempt)
                    newer = self._unsent.get(key)
                    if newer is None or newer.checkpoint < usage.checkpoint:
                        self._unsent[key] = usage
                await asyncio.sleep(_RETRY_S)
            finally:
                self._sending -= 1
            await asyncio.sleep(_GATHER_S)


def _ms(began_s: float | None, until_s: float | None) -> float:
    return max(0.0, until_s - began_s) * 1000.0 if began_s is not None and until_s is not None else 0.0
