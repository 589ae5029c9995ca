"""The worker's report every second: what is mounted and busy, memory, speed. Core NATS: the next one replaces a lost one."""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from services.worker import health
from services.worker.engine import Engine
from services.worker.governor import AdapterTotals, Governor
from services.worker.identity import Identity
from services.worker.mounting import Mounter
from shared.bus import Bus, BusUnavailable
from shared.contracts.inference import base_subject_id
from shared.contracts.workers import AdapterUse, MemoryReport, WorkerReport, encode, report_subject

log = structlog.get_logger()

_SPEED_WINDOW = 5  # reports


class Reporter:
    def __init__(
        self,
        *,
        bus: Bus,
        engine: Engine,
        governor: Governor,
        mounter: Mounter,
        me: Identity,
        state: Callable[[], str],
        generation: Callable[[], int],
        health_file: Path | None = None,
    ) -> None:
        self._bus = bus
        self._me = me
        self._engine = engine
        self._governor = governor
        self._mounter = mounter
        self._state = state
        self._generation = generation
        self._health_file = health_file
        self._memory = MemoryReport()
        self._tokens: deque[tuple[float, int]] = deque(maxlen=_SPEED_WINDOW + 1)
        self._loop = asyncio.get_running_loop()

    async def run(self, interval_s: float = 1.0) -> None:
        """Runs until cancelled. A report never waits for the engine: one that is busy for long is no dead worker."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_memory(interval_s))
            subject = report_subject(self._me.worker_id)
            while True:
                try:
                    await self._bus.publish(subject, encode(self.report(self._loop.time())))
                except BusUnavailable as error:
                    log.debug("report.not_sent", error=error.message)
                if self._health_file is not None:
                    health.write(self._health_file, self._state())
                await asyncio.sleep(interval_s)

    async def _watch_memory(self, interval_s: float) -> None:
        while True:
            try:
                self._memory = await self._engine.memory()
            except Exception as error:  # noqa: BLE001  a dying engine; its death is noticed elsewhere
                log.debug("report.no_memory", reason=type(error).__name__)
            await asyncio.sleep(interval_s)

    def report(self, now_s: float) -> WorkerReport:
        """As things stand; also takes the sample that the speed is computed from."""
        attempts = self._governor.attempts()
        made = sum(t.completion_tokens for t in self._governor.totals.values()) + sum(a.completion_tokens for a in attempts)
        self._tokens.append((now_s, made))
        base_id = base_subject_id(self._engine.description.identity)
        return WorkerReport(
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            pool_id=self._me.pool_id,
            generation=self._generation(),
            state=self._state(),
            in_flight=len(attempts),
            waiting=sum(1 for attempt in attempts if not attempt.admitted.is_set()),
            capacity=self._engine.limits.max_num_seqs,
            base=self._use(base_id, ""),
            adapters=tuple(self._use(adapter_id, adapter_id) for adapter_id in self._mounter.mounts),
            memory=self._memory,
            completion_tokens_per_s=speed(self._tokens),
            tenants=tuple(self._governor.admission.uses()),
            shares_revision=self._governor.admission.shares_revision,
        )

    def _use(self, subject_id: str, adapter_id: str) -> AdapterUse:
        running = self._governor.attempts(subject_id)
        ended = self._governor.totals.get(subject_id) or AdapterTotals()
        mount = self._mounter.mounts.get(adapter_id)
        return AdapterUse(
            adapter_id=adapter_id,
            residency="device",
            in_flight=len(running),
            waiting=sum(1 for attempt in running if not attempt.admitted.is_set()),
            slot_bytes=mount.slot_bytes if mount else 0,
            true_bytes=mount.true_bytes if mount else 0,
            requests=ended.requests,
            prompt_tokens=ended.prompt_tokens + sum(attempt.prompt_tokens for attempt in running),
            completion_tokens=ended.completion_tokens + sum(attempt.completion_tokens for attempt in running),
        )


def speed(samples: deque[tuple[float, int]]) -> float:
    """Tokens per second between the oldest and the newest (time, tokens so far) sample."""
    if len(samples) < 2:
        return 0.0
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    return max(0.0, (last - first) / (last_s - first_s)) if last_s > first_s else 0.0
