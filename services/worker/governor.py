"""The governor stands between the OpenAI application and the engine: handle check, in-flight counts, cancellation, metering.

Who may enter the engine, and when, is admission.py's.
"""

import asyncio
from contextvars import ContextVar

from services.worker.admission import Admission
from services.worker.admission_calls import Call, Place
from services.worker.request_plan import RequestPlan
from services.worker.step_ledger import StepLedger
from shared.contracts.inference import Handle, Totals
from shared.errors import Cancelled, HandleMismatch, TenantryError

_ONE_PROMPT = RequestPlan()


class Attempt:
    """One attempt of one request while it is in this worker. Mutable; owned by the governor."""

    def __init__(
        self, request_id: str, attempt: int, router_id: str, handle: Handle, path: str, *, key_id: str = "", began_s: float | None = None
    ) -> None:
        """`began_s`: loop time of its arrival."""
        self.request_id = request_id
        self.attempt = attempt
        self.router_id = router_id
        self.handle = handle
        self.path = path
        self.key_id = key_id
        self.began_s = began_s
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.subject_id = handle.subject_id
        self.plan = _ONE_PROMPT
        self.place = Place(handle.tenant_id)
        self.admitted = asyncio.Event()
        self.refusal: TenantryError | None = None  # set: whatever the application answers is replaced by this error
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.gpu_us = 0  # its part of the engine's steps
        self.steps_open = 0  # calls of the engine that may still be in one
        self.engine_requests: set[str] = set()  # the engine's ids of what runs for it now
        self.closed = False  # the application has ended with it, one way or another: nothing may start any more
        self.engine_started_s: float | None = None  # loop time of admission
        self.engine_ms = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    def totals(self) -> Totals:
        return Totals(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            engine_ms=self.engine_ms,
        )


current_attempt: ContextVar[Attempt] = ContextVar("tenantry_current_attempt")


class AdapterTotals:
    """Since this incarnation started, for one adapter (or the base)."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0


class Governor:
    """In-flight attempts by subject id (adapter_id, or the base's). Counts fall on every way out: `end` is in a finally."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.steps = StepLedger()
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._by_subject: dict[str, set[tuple[str, int]]] = {}
        self._by_tenant: dict[str, int] = {}
        self._idle: dict[str, asyncio.Event] = {}
        self.totals: dict[str, AdapterTotals] = {}

    def begin(self, attempt: Attempt) -> None:
        """Counts it as in flight, before anything can await."""
        subject = attempt.subject_id
        self._attempts[attempt.key] = attempt
        tenant_id = attempt.handle.tenant_id
        attempt.place.beam_tokens = self.admission.beam_tokens(tenant_id)
        self._by_tenant[tenant_id] = self._by_tenant.get(tenant_id, 0) + 1
        self._by_subject.setdefault(subject, set()).add(attempt.key)
        self._idle.setdefault(subject, asyncio.Event()).clear()
        self.totals.setdefault(subject, AdapterTotals()).requests += 1

    def end(self, attempt: Attempt) -> None:
        """Idempotent."""
        if self._attempts.pop(attempt.key, None) is None:
            return
        self.admission.finish(attempt.place, attempt.engine_ms / 1000.0)
        tenant_id = attempt.handle.tenant_id
        if self._by_tenant[tenant_id] == 1:
            del self._by_tenant[tenant_id]
        else:
            self._by_tenant[tenant_id] -= 1
        subject = attempt.subject_id
        members = self._by_subject[subject]
        members.discard(attempt.key)
        totals = self.totals[subject]
        totals.prompt_tokens += attempt.prompt_tokens
        totals.completion_tokens += attempt.completion_tokens
        if not members:
            del self._by_subject[subject]
            self._idle.pop(subject).set()

    def attempts(self, subject_id: str = "") -> list[Attempt]:
        """Those in flight, of one subject or all."""
        if not subject_id:
            return list(self._attempts.values())
        return [self._attempts[key] for key in self._by_subject.get(subject_id, ())]

    def find(self, request_id: str, attempt: int) -> Attempt | None:
        return self._attempts.get((request_id, attempt))

    def in_flight(self, subject_id: str = "") -> int:
        return len(self._by_subject.get(subject_id, ())) if subject_id else len(self._attempts)

    def has_room(self, tenant_id: str, limit: int) -> bool:
        """Whether this process may take one more attempt of the tenant, waiting or running, with `limit` in all.

        Over the limit a tenant may still have an equal part of it, so that no number of others keeps it out; twice the limit is the end.
        """
        count = len(self._attempts)
        if count < limit:
            return True
        mine = self._by_tenant.get(tenant_id, 0)
        tenants = len(self._by_tenant) + (mine == 0)
        return count < 2 * limit and mine < max(1, limit // tenants)

    async def wait_idle(self, subject_id: str) -> None:
        """Returns once nothing of the subject is in flight."""
        event = self._idle.get(subject_id)
        if event is not None:
            await event.wait()

    def check_handle(self, attempt: Attempt, engine_adapter_id: str) -> None:
        """The adapter that reached the engine ("" for the base) is the one the request resolved to.

        :raises HandleMismatch: it is not; the attempt's refusal is set, so that nothing of its answer goes out.
        """
        if engine_adapter_id == attempt.handle.adapter_id:
            return
        attempt.refusal = HandleMismatch(
            "the engine was about to answer with another adapter than the request resolved to; nothing was sent",
            expected=attempt.handle.digest or attempt.handle.base,
        )
        raise attempt.refusal

    async def admit(
        self, attempt: Attempt, prompt_tokens: int, max_tokens: int | None, samples: int, now_s: float, *, beam: bool = False
    ) -> Call:
        """One call of the engine for the attempt, once it may start; `leave` is owed for it.

        `max_tokens` is per sample. A beam search calls the engine once per beam and token; all its calls have one place, which it
        keeps until the attempt ends, and its prompt counts once. The wait ends when the attempt is closed or aborted.

        :raises TenantryError: refused (the attempt's refusal is set), or not waited for any more.
        """
        if beam and attempt.place.shared:
            prompt_tokens = 0
        try:
            call = await self.admission.admit(attempt.place, attempt.plan, attempt.key, prompt_tokens, max_tokens, samples, beam=beam)
        except Cancelled:
            raise
        except TenantryError as error:
            attempt.refusal = attempt.refusal or error
            raise
        attempt.prompt_tokens += prompt_tokens
        if attempt.engine_started_s is None:
            attempt.engine_started_s = now_s + attempt.place.queued_ms / 1000.0
        attempt.admitted.set()
        return call

    def leave(self, call: Call) -> None:
        """The engine's call has ended, one way or another. Idempotent."""
        self.admission.leave(call)

    def count(self, attempt: Attempt, call: Call, *, completion_tokens: int, cached_tokens: int, now_s: float) -> None:
        """Adds what one step of the engine made, and prompt tokens that it found in its cache."""
        if completion_tokens:
            if attempt.first_token_s is None:
                attempt.first_token_s = now_s
            if not call.output:
                self.admission.started(call)
            call.output += completion_tokens
            if call.output > call.due:
                self.admission.top_up(call)
        call.cached += cached_tokens
        attempt.completion_tokens += completion_tokens
        attempt.cached_tokens += cached_tokens
        if attempt.engine_started_s is not None:
            attempt.engine_ms = (now_s - attempt.engine_started_s) * 1000.0
