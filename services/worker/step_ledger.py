"""What attempts cost the engine: its steps' time split over the requests in them, and an account of all of its time.

Engines tell of their steps in batches (step_records.py). A step's microseconds are charged whole to the attempts whose requests were in
it; to what the platform itself asked (probes), as overhead.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from services.worker.step_records import PROBE_PREFIX, Row, StepBatch, StepRecord
from shared.contracts.base import EngineLimits
from shared.contracts.usage import CostModel, EngineTime
from shared.policy.cost_model import CostFit, Load, features, split, weights
from shared.policy.kv_ledger import KvLayout
from shared.policy.time_account import BUSY, IDLE, TimeAccount

log = structlog.get_logger()

_FIRST_FIT_STEPS = 64
_FIT_EVERY_STEPS = 512
_RANDOM_END = 9  # "-" and eight digits that vLLM adds to a request's name
_SAMPLE = re.compile(r"^\d+_")
_LATE_NS = 500_000_000  # what the engine was told to end this long ago is in no step any more, whether or not it has said so


class Charged(Protocol):
    """An attempt."""

    gpu_us: int
    steps_open: int  # its requests that the engine may still compute


class _Request:
    """One call of the engine: a prompt with its samples."""

    __slots__ = ("attempt", "closed_ns", "engine_ids", "left", "name")

    def __init__(self, name: str, attempt: Charged, samples: int) -> None:
        self.name = name
        self.attempt = attempt
        self.engine_ids: list[str] = []
        self.left = samples  # that the engine has not ended
        self.closed_ns = 0


class StepLedger:
    """`open` and `close` around every call of the engine, `take` for what it tells."""

    def __init__(self) -> None:
        self.lost_steps = 0
        self.unbilled_us = 0  # of requests that nobody had opened
        self.is_told = False  # whether the engine tells of its steps at all
        self.adapter_bytes: Callable[[int], int] = lambda _: 0
        self.pull: Callable[[], StepBatch] | None = None  # of an engine that tells nothing while nothing happens
        self._requests: dict[str, _Request] = {}
        self._closed: dict[str, _Request] = {}  # of them, in the order in which they were closed
        self._by_engine_id: dict[str, _Request | None] = {}
        self._account: TimeAccount | None = None
        self._fit = CostFit()
        self._next_fit = _FIRST_FIT_STEPS
        self._number = 0
        self._steps = 0
        self._busy_ns = 0
        self._told_us = 0  # of busy_ns, what was split so far
        self._billed_us = 0
        self._probe_us = 0
        self._layout: KvLayout | None = None
        self._token_bytes = 0.0
        self._block_bytes = 0

    @property
    def cost_model(self) -> CostModel:
        return self._fit.model

    def use(self, limits: EngineLimits) -> None:
        """The engine, which is like this, will tell of its steps."""
        self.is_told = True
        self._block_bytes = limits.kv_block_bytes
        self._token_bytes = limits.kv_block_bytes / limits.kv_block_tokens if limits.kv_block_tokens else 0.0
        if len(limits.kv_groups) > 1 or any(group.most_tokens for group in limits.kv_groups):
            self._layout = KvLayout(tuple((group.block_tokens, group.most_tokens) for group in limits.kv_groups))

    def open(self, name: str, attempt: Charged, samples: int) -> None:
        """A call of the engine begins, as the request `name`."""
        if self.is_told:
            self._requests[name] = _Request(name, attempt, samples)
            attempt.steps_open += 1

    def close(self, name: str, now_ns: int) -> None:
        """The call has returned; the engine may compute for it a little longer."""
        request = self._requests.get(name)
        if request is not None and not request.closed_ns:
            request.closed_ns = now_ns
            self._closed[name] = request
            if request.left <= 0:
                self._forget(request)

    def take(self, batch: StepBatch) -> None:
        if self._account is None:
            self._account = TimeAccount(min((start for _, start, _ in batch.spans), default=batch.until_ns))
        account = self._account
        for step in batch.steps:
            self._take_step(step, account)
        for name, start_ns, end_ns in batch.spans:
            account.add(name, start_ns, end_ns)
        if batch.idle_since_ns:
            account.add(IDLE, batch.idle_since_ns, batch.until_ns)
        for engine_id in batch.ended:
            self._end(engine_id)
        if batch.until_ns:
            account.close(batch.until_ns)
            self._forget_late(batch.until_ns)
        if self._steps >= self._next_fit:
            self._next_fit = self._steps + _FIT_EVERY_STEPS
            self._fit.refit()

    def engine_time(self, worker_id: str, incarnation: str, pool_id: str, checkpoint: int) -> EngineTime | None:
        """None: the engine has told nothing yet."""
        if self.pull is not None:
            self.take(self.pull())
        account = self._account
        if account is None:
            return None
        overhead_us = {name: size_ns // 1000 for name, size_ns in sorted(account.overhead_ns.items())}
        busy_us = account.busy_ns // 1000
        idle_us, wall_us = account.idle_ns // 1000, account.wall_ns // 1000
        if self._probe_us:
            overhead_us["probe"] = min(self._probe_us, busy_us)
            busy_us -= overhead_us["probe"]
        return EngineTime(
            worker_id=worker_id,
            incarnation=incarnation,
            pool_id=pool_id,
            checkpoint=checkpoint,
            wall_us=wall_us,
            busy_us=busy_us,
            idle_us=idle_us,
            unaccounted_us=wall_us - busy_us - idle_us - sum(overhead_us.values()),
            overhead_us=overhead_us,
            billed_us=self._billed_us,
            steps=self._steps,
            cost_model=self._fit.model,
        )

    def _take_step(self, step: StepRecord, account: TimeAccount) -> None:
        if self._number and step.number > self._number + 1:
            self.lost_steps += step.number - self._number - 1
            log.error("steps.lost", steps=step.number - self._number - 1, lost_total=self.lost_steps)
        self._number = step.number
        if not step.rows:
            return
        self._steps += 1
        for start_ns, end_ns in step.busy:
            account.add(BUSY, start_ns, end_ns)
            self._busy_ns += max(0, end_ns - max(start_ns, account.until_ns))
        took_us = self._busy_ns // 1000 - self._told_us
        self._told_us += took_us
        loads = [self._load(row) for row in step.rows]
        self._fit.add(features(loads), float(took_us))
        parts = split(took_us, weights(self._fit.model, loads))
        for row, part_us in zip(step.rows, parts, strict=True):
            self._charge(row.engine_id, part_us)

    def _load(self, row: Row) -> Load:
        if self._layout is not None:
            context_bytes = self._layout.blocks(row.context_tokens, 0, 1) * self._block_bytes
        else:
            context_bytes = int(row.context_tokens * self._token_bytes)
        if not row.adapter:
            return Load(row.prefill_tokens, row.decode_rows, context_bytes)
        return Load(row.prefill_tokens, row.decode_rows, context_bytes, str(row.adapter), self.adapter_bytes(row.adapter))

    def _charge(self, engine_id: str, part_us: int) -> None:
        request = self._find(engine_id)
        if request is not None:
            request.attempt.gpu_us += part_us
            self._billed_us += part_us
        elif engine_id.startswith(PROBE_PREFIX):
            self._probe_us += part_us
        else:
            self.unbilled_us += part_us

    def _find(self, engine_id: str) -> _Request | None:
        """By what vLLM makes of a request's name: `name-1f2e3d4c`, of several samples `0_name-1f2e3d4c`."""
        if engine_id in self._by_engine_id:
            return self._by_engine_id[engine_id]
        names: Sequence[str] = (engine_id, engine_id[:-_RANDOM_END], _SAMPLE.sub("", engine_id)[:-_RANDOM_END])
        request = next((self._requests[name] for name in names if name in self._requests), None)
        self._by_engine_id[engine_id] = request
        if request is not None:
            request.engine_ids.append(engine_id)
        return request

    def _end(self, engine_id: str) -> None:
        request = self._find(engine_id)
        del self._by_engine_id[engine_id]
        if request is not None:
            request.engine_ids.remove(engine_id)
            request.left -= 1
            if request.left <= 0 and request.closed_ns:
                self._forget(request)

    def _forget_late(self, until_ns: int) -> None:
        while self._closed:
            request = next(iter(self._closed.values()))
            if request.closed_ns + _LATE_NS > until_ns:
                return
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        del self._requests[request.name], self._closed[request.name]
        for engine_id in request.engine_ids:
            del self._by_engine_id[engine_id]
        request.attempt.steps_open -= 1
