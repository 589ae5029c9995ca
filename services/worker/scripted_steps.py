"""An engine's steps without its arithmetic: continuous batching with chunked prefill, first come, first served, and time by a model.

Scheduled as vLLM's V1 scheduler does: sequences that run first, in the order they came in, then waiting ones while the step has tokens
and a seat is free; no prefix cache. What a step costs is linear in its prompt tokens and its sequences. Told of as vLLM's hook does.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from services.worker.step_records import Row, Span, StepBatch, StepRecord


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are near GPT-OSS-20B with eight adapters on an H200 (5.7 ms a step for one sequence, 12.6 ms for 32)."""

    base_ms: float = 5.5
    sequence_us: float = 220.0
    prefill_token_us: float = 25.0
    step_tokens: int = 8192
    shared_prefill_tokens: int = 0  # the most of one tenant's prompts in a step while another has something here; 0: all


class Sequence:
    """One sample of one prompt in the engine. Mutable; owned by the stepper."""

    __slots__ = (
        "adapter", "count", "engine_id", "first_step", "is_out", "made", "name", "prompt_left", "prompt_tokens", "taken", "tenant_id",
        "waiter",
    )  # fmt: skip

    def __init__(self, name: str, tenant_id: str, prompt_tokens: int, count: int, *, engine_id: str = "", adapter: int = 0) -> None:
        self.name = name
        self.engine_id = engine_id or name
        self.adapter = adapter
        self.is_out = False  # removed
        self.tenant_id = tenant_id
        self.prompt_tokens = prompt_tokens
        self.prompt_left = prompt_tokens
        self.count = count
        self.made = 0
        self.taken = 0
        self.first_step: int | None = None  # in which the first part of its prompt was read
        self.waiter: asyncio.Future[None] | None = None


class Stepper:
    """`steps` counts those that have begun."""

    def __init__(self, model: StepModel, seats: int, block_tokens: int) -> None:
        self.steps = 0
        self.on_first_step: Callable[[Sequence], None] | None = None
        self.on_blocks: Callable[[int], None] | None = None  # of KV cache, in use in a step
        self.on_told: Callable[[StepBatch], None] | None = None
        self.busy_ns = 0
        self._model = model
        self._seats = seats
        self._block_tokens = block_tokens
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._loop = asyncio.get_running_loop()
        self._in_step = False
        self._idle_since_ns = self._now_ns()
        self._ended_ns = 0
        self._step_parts: list[tuple[Sequence, int]] = []

    def submit(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        if not self._in_step:
            self._in_step = True
            self._loop.call_soon(self._begin)  # what comes in this turn is in the same step

    async def token(self, sequence: Sequence) -> None:
        """Returns once the sequence's next token has been made."""
        if sequence.taken == sequence.made:
            sequence.waiter = self._loop.create_future()
            await sequence.waiter
        sequence.taken += 1

    def remove(self, sequence: Sequence) -> None:
        """Finished, or aborted: it is in no further step. Idempotent."""
        if sequence.is_out:
            return
        sequence.is_out = True
        if all(one is not sequence for one, _ in self._step_parts):  # else it is told with the step that it still is in
            self._tell(StepBatch(0, 0, [], [], [sequence.engine_id]))
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def idle_so_far(self) -> StepBatch:
        """Told to whoever wants to know while nothing happens."""
        return StepBatch(0 if self._step_parts else self._now_ns(), self._idle_since_ns, [], [], [])

    def _begin(self) -> None:
        self._running = [one for one in self._running if one.made < one.count]
        began_ns = self._now_ns()
        between: list[Span] = [] if self._idle_since_ns else [("output", self._ended_ns, began_ns)]
        self._tell(StepBatch(began_ns, self._idle_since_ns, [], between, []))
        if not self._running and not self._waiting:
            self._in_step = False
            self._idle_since_ns = began_ns
            return
        self._idle_since_ns = 0
        self.steps += 1
        parts = self._schedule()
        model = self._model
        if self.on_blocks is not None:
            self.on_blocks(sum(self._blocks(one, tokens) for one, tokens in parts))
        prefill_tokens = sum(tokens for one, tokens in parts if one.prompt_left)
        took_ms = model.base_ms + (model.prefill_token_us * prefill_tokens + model.sequence_us * len(parts)) / 1000.0
        self._step_parts = parts
        self._loop.call_later(took_ms / 1000.0, self._end, parts, began_ns)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        model, left = self._model, self._model.step_tokens
        tenants = {one.tenant_id for one in self._running} | {one.tenant_id for one in self._waiting}
        chunk = model.shared_prefill_tokens if len(tenants) > 1 and model.shared_prefill_tokens else model.step_tokens
        parts: list[tuple[Sequence, int]] = []
        reading: dict[str, int] = {}  # by tenant, what its prompts may take of a step
        for one in self._running:
            part = min(one.prompt_left, chunk)
            reading[one.tenant_id] = reading.get(one.tenant_id, 0) + part
            tokens = min(max(1, part), left)
            if tokens:
                parts.append((one, tokens))
                left -= tokens
        held: deque[Sequence] = deque()
        while left > 0 and self._waiting and len(self._running) < self._seats:
            one = self._waiting.popleft()
            part = min(max(1, one.prompt_left), chunk)
            before = reading.get(one.tenant_id, 0)
            if chunk < model.step_tokens and before and before + part > chunk:
                held.append(one)
                continue
            reading[one.tenant_id] = before + part
            self._running.append(one)
            one.first_step = self.steps
            if self.on_first_step is not None:
                self.on_first_step(one)
            parts.append((one, min(part, left)))
            left -= min(part, left)
        self._waiting.extendleft(reversed(held))
        return parts

    def _end(self, parts: list[tuple[Sequence, int]], began_ns: int) -> None:
        self._step_parts = []
        ended_ns = self._ended_ns = self._now_ns()
        self.busy_ns += ended_ns - began_ns
        rows = [_row(one, tokens) for one, tokens in parts]
        ended = [one.engine_id for one, _ in parts if one.is_out]
        self._tell(StepBatch(ended_ns, 0, [StepRecord(self.steps, [(began_ns, ended_ns)], rows)], [], ended))
        for one, tokens in parts:
            one.prompt_left = max(0, one.prompt_left - tokens)
            if one.prompt_left == 0:
                one.made += 1
                if one.waiter is not None and not one.waiter.done():
                    one.waiter.set_result(None)
        self._begin()

    def _tell(self, batch: StepBatch) -> None:
        if self.on_told is not None:
            self.on_told(batch)

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def _blocks(self, one: Sequence, tokens: int) -> int:
        return -(-(one.prompt_tokens - one.prompt_left + one.made + tokens) // self._block_tokens)


def _row(one: Sequence, tokens: int) -> Row:
    context_tokens = one.prompt_tokens - one.prompt_left + one.made + tokens
    return (
        Row(one.engine_id, tokens, 0, context_tokens, one.adapter)
        if one.prompt_left
        else Row(one.engine_id, 0, 1, context_tokens, one.adapter)
    )
