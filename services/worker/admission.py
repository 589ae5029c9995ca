"""Carries admission decisions out: an attempt's engine calls are put to the queue as one request, wait for their turn, and are let in.

What may enter is decided in shared/policy/admission_queue.py. An attempt is refused before anything of it has been sent.
"""

import asyncio
from collections.abc import Hashable, Iterator

import structlog

from services.worker.admission_calls import Call, Place, Wave
from services.worker.known_tenants import KnownTenants
from services.worker.refusals import refusal, timed_out
from services.worker.request_plan import RequestPlan
from shared.contracts.base import EngineLimits
from shared.contracts.tenancy import Share, TenantLimits
from shared.contracts.workers import TenantUse
from shared.errors import Cancelled, InternalError, TenantryError
from shared.policy.admission_queue import AdmissionQueue
from shared.policy.asks import Ask, AskState, TenantTerms
from shared.policy.engine_room import EngineRoom, EngineShape, shape_of
from shared.policy.fair_order import FairOrder
from shared.policy.kv_ledger import KvLayout, KvLedger, KvShare

log = structlog.get_logger()

_UNKNOWN_BLOCKS = 1 << 50
_UNKNOWN_BLOCK_TOKENS = 16
_BLOCKS_PER_RESERVED = 32
_WAVE_PATIENCE_S = 10.0  # the application starts all prompts of a request at once
_TOP_UP_TOKENS = 32
_LONGEST_RETRY_S = 60.0
_RUNS_KEPT = 4096


class Admission:
    """Made before the engine; `use` tells it what the engine holds, `set_tenant` what a tenant may."""

    def __init__(self) -> None:
        self.shares_revision = 0
        self.tenants = KnownTenants()
        self._waiters: dict[Hashable, asyncio.Future[TenantryError | None]] = {}
        self._not_reserved: dict[Hashable, Place] = {}  # by the key of a first ask that waits
        self._run_s: dict[str, float] = {}  # how long a tenant's requests run lately
        self.use(EngineLimits(slots=0, max_rank=0, bytes_per_rank=0))

    def use(self, limits: EngineLimits, shape: EngineShape | None = None) -> None:
        """Before anything is admitted."""
        whole = ((limits.kv_block_tokens or _UNKNOWN_BLOCK_TOKENS, 0),)
        self._layout = KvLayout(tuple((group.block_tokens, group.most_tokens) for group in limits.kv_groups) or whole)
        self._block_bytes = limits.kv_block_bytes
        self._max_model_len = limits.max_model_len
        room = EngineRoom(shape or shape_of(limits.max_num_seqs, limits.max_batched_tokens))
        blocks = limits.kv_blocks or _UNKNOWN_BLOCKS
        self.queue = AdmissionQueue(room, KvLedger(blocks, blocks // _BLOCKS_PER_RESERVED), FairOrder())

    def set_tenant(self, tenant_id: str, limits: TenantLimits, share: Share | None) -> None:
        """A tenant's limits and this worker's part of them; without a part, where there is something to split, it stays unknown."""
        if share is None and (limits.kv_quota_bytes is not None or limits.max_concurrent is not None):
            self.tenants.forget(tenant_id)
            return
        if limits.kv_quota_bytes is not None and not self._block_bytes:
            log.warning("tenant.kv_quota_cannot_be_kept", tenant_id=tenant_id)
            self.tenants.forget(
                tenant_id, "the engine has not said how its KV cache is laid out, so that the tenant's quota of it cannot be kept"
            )
            return
        self.queue.set_terms(
            tenant_id,
            TenantTerms(
                kv=KvShare(
                    self._blocks(share.kv_bytes if share is not None else None),
                    limits.burst,
                    self._blocks(limits.kv_quota_bytes),
                    self._blocks(share.assured_kv_bytes if share is not None else None),
                ),
                concurrent=share.concurrent if share is not None else None,
                most_concurrent=limits.max_concurrent,
                weight=limits.weight,
                queue_limit=limits.queue_limit,
            ),
        )
        over = self.queue.ledger.over_share(tenant_id)
        if over:
            log.warning("tenant.over_kv_share", tenant_id=tenant_id, over_bytes=over * self._block_bytes)
        self.tenants.add(tenant_id, limits)
        self.pump()

    def forget_tenant(self, tenant_id: str) -> None:
        """It is deleted: what it was guaranteed is everybody's again, what it has in the engine runs to its end."""
        self.queue.set_terms(tenant_id, TenantTerms())
        self.tenants.forget(tenant_id)
        self._run_s.pop(tenant_id, None)
        self.pump()

    async def admit(
        self,
        place: Place,
        plan: RequestPlan,
        key: Hashable,
        prompt_tokens: int,
        max_tokens: int | None,
        samples: int,
        *,
        beam: bool = False,
    ) -> Call:
        """One call of the engine, once it may start. `key` is the attempt's; `max_tokens` per sample, None: what the model's length leaves.

        :raises TenantryError: its attempt is refused (asked, held and allowed are in the fields), or has stopped waiting.
        """
        limits = self.tenants.find(place.tenant_id)
        if limits is None:
            limits = await self.tenants.wait_for(place.tenant_id)
        if beam and place.shared:
            return place.shared[0]
        if beam:
            samples, max_tokens = plan.beams or samples, plan.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self._max_model_len - prompt_tokens)
        if not beam and plan.max_tokens is None and limits.default_max_tokens is not None:
            max_tokens = min(max_tokens, limits.default_max_tokens)
        ask = Ask(
            (key, len(place.firsts), len(place.wave.asks) if place.wave is not None else 0),
            place.tenant_id,
            kv_blocks=self._layout.blocks(prompt_tokens, max_tokens, samples),
            seats=samples,
            prefill=self.queue.room.step_share(prompt_tokens),
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_tokens * samples,
            rank=plan.rank,
        )
        if plan.prompts > 1 and not place.firsts:
            await self._enter_together(place, ask, plan.prompts, limits)
        elif self._offer(place, ask):
            await self._wait_first(place, ask, limits)
        call = self._call(place, ask, 1 if beam else max_tokens, shared=beam)
        if beam:
            place.shared += (call,)
        return call

    def beam_tokens(self, tenant_id: str) -> tuple[int, int] | None:
        """What a beam search of the tenant without max_tokens may make, as far as is known, and the model's length."""
        limits = self.tenants.find(tenant_id)
        if limits is None or limits.default_max_tokens is None:
            return None
        return limits.default_max_tokens, self._max_model_len

    def started(self, call: Call) -> None:
        """Its first token is there."""
        self.queue.prefilled(call.ask)
        if self.queue.has_waiting:
            self.pump()

    def top_up(self, call: Call) -> None:
        """It has generated what its tenant was charged ahead."""
        service = self.queue.order.price.output * _TOP_UP_TOKENS
        call.ask.charged += service
        call.due += _TOP_UP_TOKENS
        self.queue.line(call.ask.tenant_id).account.serve(service)

    def leave(self, call: Call) -> None:
        """The engine's call has ended. Idempotent."""
        if not call.shared:
            self._left(call.place, call.ask, call.cached, call.output)

    def finish(self, place: Place, ran_s: float) -> None:
        """The attempt is over, after so long in the engine: nothing of it waits or holds anything."""
        if place.waiting:
            place.stop_waiting(Cancelled("the request has ended"))
        if not place.firsts:
            return
        freed = sum(self.queue.leave(call.ask, call.cached, call.output) for call in place.shared)
        for first in place.firsts:
            freed += self.queue.finish(first)
            self._not_reserved.pop(first.key, None)
        place.held.change(-freed, self._now_us())
        before_s = self._run_s.pop(place.tenant_id, ran_s)  # the last to have run stands last
        self._run_s[place.tenant_id] = before_s + (ran_s - before_s) / 8
        if len(self._run_s) > _RUNS_KEPT:
            del self._run_s[next(iter(self._run_s))]
        if self.queue.has_waiting:
            self.pump()

    def pump(self) -> None:
        """Lets in what may enter now."""
        for ask in self.queue.take():
            place = self._not_reserved.pop(ask.key, None)
            if place is not None:
                place.held.change(ask.all_blocks, self._now_us())
            future = self._waiters.get(ask.key)
            if future is not None and not future.done():
                future.set_result(None)

    def kv_byte_ms(self, place: Place) -> int:
        """Bytes of KV cache that were reserved for it, times the milliseconds for which they were, until now."""
        return place.held.block_us(self._now_us()) * self._block_bytes // 1000

    def uses(self) -> Iterator[TenantUse]:
        """Of the tenants that have anything or wait for it."""
        for tenant_id, line in self.queue.lines.items():
            held = self.queue.ledger.held_by(tenant_id)
            if line.running or line.waiting_requests or held:
                kv_bytes = held * self._block_bytes
                yield TenantUse(tenant_id=tenant_id, running=line.running, waiting=line.waiting_requests, kv_bytes=kv_bytes)

    def _blocks(self, size_bytes: int | None) -> int | None:
        return size_bytes // self._block_bytes if size_bytes is not None and self._block_bytes else None

    def _call(self, place: Place, ask: Ask, max_tokens: int, *, shared: bool) -> Call:
        return Call(place, ask, max_tokens, self.queue.line(ask.tenant_id).account.mean_output, shared=shared)

    def _offer(self, place: Place, ask: Ask) -> bool:
        """Whether `ask`, with its followers one request, has to wait.

        :raises TenantryError: it is refused.
        """
        short = self.queue.offer(ask)
        if short is not None:
            raise refusal(short, self._block_bytes, self._retry_after_s(place.tenant_id))
        place.firsts.append(ask)
        if ask.state is AskState.WAITING:
            self._not_reserved[ask.key] = place
        else:
            place.held.change(ask.all_blocks, self._now_us())
        if ask.state is AskState.WAITING or ask.followers:
            self.pump()
        return ask.state is AskState.WAITING

    async def _wait_first(self, place: Place, ask: Ask, limits: TenantLimits) -> None:
        place.queued_since_s = self._time()
        try:
            await self._wait(place, ask, limits.queue_deadline_s)
        finally:
            place.queued_ms = place.queued_until_ms(self._time())
            place.queued_since_s = None

    async def _enter_together(self, place: Place, ask: Ask, prompts: int, limits: TenantLimits) -> None:
        """Waits for all prompts of the attempt, so that there is one decision; then for this one's turn."""
        wave = place.wave = place.wave or Wave()
        wave.asks.append(ask)
        if len(wave.asks) < prompts:
            await self._decided(place, wave)
        else:
            first, *others = wave.asks
            for one in others:
                one.leads = False
            first.followers = tuple(others)
            error: TenantryError | None = Cancelled("the request has ended")
            try:
                if self._offer(place, first):
                    await self._wait_first(place, first, limits)
                error = None
            except TenantryError as refused:
                error = refused
                raise
            finally:
                for future in wave.deciding:
                    if not future.done():
                        future.set_result(error)
        if ask.state is AskState.WAITING:
            await self._wait(place, ask, None)

    async def _decided(self, place: Place, wave: Wave) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TenantryError | None] = loop.create_future()
        wave.deciding.append(future)
        place.waiting.append(future)
        incomplete = InternalError("the application did not start all prompts of the request; none was started")
        timer = loop.call_later(_WAVE_PATIENCE_S, lambda: place.firsts or place.stop_waiting(incomplete))
        try:
            error = await future
        finally:
            timer.cancel()
            place.waiting.remove(future)
        if error is not None:
            raise error

    async def _wait(self, place: Place, ask: Ask, deadline_s: float | None) -> None:
        """Returns once it has entered; otherwise it has left the queue."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        future: asyncio.Future[TenantryError | None] = loop.create_future()
        self._waiters[ask.key] = future
        place.waiting.append(future)
        error: TenantryError | None = None
        entered = False
        try:
            async with asyncio.timeout(deadline_s):
                error = await future
            entered = error is None
        except TimeoutError:
            entered = ask.state is not AskState.WAITING  # in this very moment
            if not entered:
                waited_ms = (loop.time() - asked_s) * 1000.0
                short = self.queue.waits_for(ask)
                error = timed_out(short, self._block_bytes, waited_ms, self._retry_after_s(place.tenant_id))
        finally:
            del self._waiters[ask.key]
            place.waiting.remove(future)
            if not entered:
                self._not_reserved.pop(ask.key, None)
                self._left(place, ask)
        if error is not None:
            raise error

    def _left(self, place: Place, ask: Ask, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        freed = self.queue.leave(ask, cached_tokens, output_tokens)
        if freed:
            place.held.change(-freed, self._now_us())
        if self.queue.has_waiting:
            self.pump()

    def _time(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_us(self) -> int:
        return round(self._time() * 1_000_000)

    def _retry_after_s(self, tenant_id: str) -> float:
        """About when its tenant's queue will have moved up."""
        line = self.queue.line(tenant_id)
        expected_s = self._run_s.get(tenant_id, 1.0) * max(1, line.waiting_requests) / max(1, line.running)
        return round(min(_LONGEST_RETRY_S, max(1.0, expected_s)), 1)
