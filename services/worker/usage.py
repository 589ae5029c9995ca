"""Usage to the USAGE stream: of attempts, cumulative every second while they run and once at their end, when the engine has told the last
step in which they were; and every second where the engine's time went. Off the token path.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from services.worker.governor import Attempt, Governor
from services.worker.identity import Identity
from shared.bus import BusUnavailable
from shared.contracts.usage import BATCH_LIMIT, AttemptUsage, EngineTime, encode

log = structlog.get_logger()

Store = Callable[[bytes, str], Awaitable[None]]  # (encoded usage, message id); raises BusUnavailable

_RETRY_S = 0.5
_GATHER_S = 0.1  # what is noted meanwhile goes in one message
_SETTLE_CHECK_S = 0.1
_SETTLE_LIMIT_S = 3.0  # an engine that has not told an attempt's last step by then will not

_Key = tuple[str, int]  # request and attempt; incarnation and -1


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
        self._checkpoints: dict[_Key, int] = {}
        self._unsent: dict[_Key, AttemptUsage | EngineTime] = {}
        self._settling: dict[_Key, tuple[Attempt, str, float]] = {}  # ended; outcome, and when it is noted in any case
        self._sending = 0
        self._changed = asyncio.Event()

    def finish(self, attempt: Attempt, outcome: str) -> None:
        """The attempt's last figures; it has left the governor."""
        attempt.ended_s = asyncio.get_running_loop().time()
        if attempt.steps_open:
            self._settling[attempt.key] = (attempt, outcome, attempt.ended_s + _SETTLE_LIMIT_S)
        else:
            self._note_last(attempt, outcome)

    async def run(self, interval_s: float = 1.0, senders: int = 4) -> None:
        """Takes checkpoints and sends until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(senders):
                group.create_task(self._send())
            group.create_task(self._settle())
            while True:
                await asyncio.sleep(interval_s)
                for attempt in self._governor.attempts():
                    self._note(attempt, final=False, outcome="running")
                self._note_engine()

    async def flush(self, timeout_s: float) -> bool:
        """Whether everything noted so far was stored in time; `run` must be running."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._settling:
                    await asyncio.sleep(0.01)
                self._note_engine()
                while self._unsent or self._sending:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(_SETTLE_CHECK_S)
            now_s = asyncio.get_running_loop().time()
            for key, (attempt, outcome, give_up_s) in list(self._settling.items()):
                if attempt.steps_open and now_s < give_up_s:
                    continue
                if attempt.steps_open:
                    log.warning("usage.steps_not_told", request_id=attempt.request_id, attempt=attempt.attempt)
                del self._settling[key]
                self._note_last(attempt, outcome)

    def _note_engine(self) -> None:
        key = (self._me.incarnation, -1)
        checkpoint = self._checkpoints.get(key, 0) + 1
        time = self._governor.steps.engine_time(self._me.worker_id, self._me.incarnation, self._me.pool_id, checkpoint)
        if time is not None:
            self._checkpoints[key] = checkpoint
            self._unsent[key] = time
            self._changed.set()

    def _note_last(self, attempt: Attempt, outcome: str) -> None:
        self._note(attempt, final=True, outcome=outcome)
        self._checkpoints.pop(attempt.key, None)

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
            tenant=handle.tenant,
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
            gpu_us=attempt.gpu_us,
        )
        self._changed.set()

    def _make_room(self) -> None:
        victim = next((key for key, usage in self._unsent.items() if not (isinstance(usage, AttemptUsage) and usage.final)), None)
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
            batch = {key: self._unsent.pop(key) for key in list(self._unsent)[:BATCH_LIMIT]}
            self._batches += 1
            self._sending += 1
            try:
                await self._store(encode(list(batch.values())), f"{self._me.incarnation}:{self._batches}")
            except BusUnavailable as error:
                log.warning("usage.not_stored", error=error.message)
                for key, usage in batch.items():
                    newer = self._unsent.get(key)
                    if newer is None or newer.checkpoint < usage.checkpoint:
                        self._unsent[key] = usage
                await asyncio.sleep(_RETRY_S)
            finally:
                self._sending -= 1
            await asyncio.sleep(_GATHER_S)


def _ms(began_s: float | None, until_s: float | None) -> float:
    return max(0.0, until_s - began_s) * 1000.0 if began_s is not None and until_s is not None else 0.0
