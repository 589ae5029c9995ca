"""The engine client that vLLM's OpenAI application gets: every generation passes the governor, or does not happen.

Adapter, cache salt and priority are the platform's here, whatever the application was asked for. Imports nothing of vLLM.
"""

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

from services.worker.admission_calls import Call
from services.worker.engine import AsgiApp, Receive, Scope, Send
from services.worker.governor import Attempt, Governor, current_attempt
from services.worker.tenant_mark import TENANT_MARK
from shared.errors import Cancelled, EngineError, InternalError, WorkerLost

_BEAM_STEP = re.compile(r"-[0-9a-f]+-beam-\d+$")


def tenant_salt(secret: bytes, tenant_id: str) -> str:
    """Keeps one tenant's prefix-cache blocks apart from all others'; nobody without the cluster's secret can make it."""
    return hmac.new(secret, tenant_id.encode(), hashlib.sha256).hexdigest()


def group_salt(secret: bytes, group: str) -> str:
    """That of tenants that have all said to share; no tenant's id is written like a group."""
    return hmac.new(secret, f"group:{group}".encode(), hashlib.sha256).hexdigest()


class GovernedClient:
    """vLLM's engine client with `generate` and `encode` governed; the rest is the engine's own.

    `adapters` maps adapter_id to the LoRARequest that the engine loaded: one that only carries the right name does not pass.
    """

    def __init__(self, engine: Any, governor: Governor, adapters: Mapping[str, Any], secret: bytes) -> None:
        self._engine = engine
        self._governor = governor
        self._adapters = adapters
        self._secret = secret

    def __getattr__(self, name: str) -> Any:
        if name == "add_request":
            raise AttributeError("add_request would pass the governor by; use generate or encode")
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """One RequestOutput per step, or a single one at the end if the parameters ask for that.

        :raises HandleMismatch: with another adapter than the request resolved to.
        :raises InternalError: no attempt is set: nothing runs ungoverned.
        """
        attempt = self._checked_attempt(options)
        self._own(options, attempt)
        return self._generate(attempt, _checked_prompt(prompt), sampling_params, request_id, options)

    def encode(self, prompt: Any, pooling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """As `generate`, for pooling."""
        attempt = self._checked_attempt(options)
        options["priority"] = 0
        return self._encode(attempt, _checked_prompt(prompt), pooling_params, request_id, options)

    def closing(self, app: AsgiApp) -> AsgiApp:
        """`app`, after which nothing of the attempt is left in the engine, however it ended.

        Cancelled while it makes a whole answer, vLLM's application leaves the generation running: an adapter would be in use
        that nobody counts.
        """

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            finally:
                attempt = current_attempt.get(None)
                if attempt is not None:
                    attempt.closed = True
                    attempt.place.stop_waiting(_ended())
                    if attempt.engine_requests:
                        await self._engine.abort(tuple(attempt.engine_requests))

        return call

    async def _generate(
        self, attempt: Attempt, prompt: dict[str, Any], sampling_params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        call = await self._admit(attempt, prompt, request_id, sampling_params.max_tokens, sampling_params.n)
        prompt, mark = self._salted(prompt, attempt)
        if mark:
            sampling_params = sampling_params.clone()
            sampling_params.extra_args = {**(sampling_params.extra_args or {}), TENANT_MARK: mark}
        kinds = cast("Any", type(sampling_params.output_kind))
        deltas = sampling_params.output_kind is kinds.DELTA
        only_final = sampling_params.output_kind is kinds.FINAL_ONLY
        if only_final or sampling_params.max_tokens != call.max_tokens:
            sampling_params = sampling_params.clone()
            sampling_params.max_tokens = call.max_tokens
        if only_final:
            # Asked for step by step all the same, so that a request cancelled half-way has been metered so far.
            sampling_params.output_kind = kinds.CUMULATIVE
        samples: dict[int, Any] = {}
        counted: dict[int, int] = {}
        cached = 0
        attempt.engine_requests.add(request_id)
        self._governor.steps.open(request_id, attempt, sampling_params.n)
        steps = self._engine.generate(prompt, sampling_params, request_id, **options)
        try:
            async for output in steps:
                made = 0
                for sample in output.outputs:
                    before = 0 if deltas else counted.get(sample.index, 0)
                    made += len(sample.token_ids) - before
                    counted[sample.index] = len(sample.token_ids)
                    samples[sample.index] = sample
                hit = output.num_cached_tokens or 0
                self._governor.count(attempt, call, completion_tokens=made, cached_tokens=max(0, hit - cached), now_s=_now_s())
                cached = max(cached, hit)
                if not only_final:
                    yield output
                elif output.finished:
                    output.outputs = [samples[index] for index in sorted(samples)]
                    yield output
        except Exception as error:
            _fail(attempt, error, begun=bool(samples))
            raise
        finally:
            attempt.engine_requests.discard(request_id)
            try:
                await steps.aclose()  # aborts in the engine what has not finished
            finally:
                self._governor.steps.close(request_id, time.monotonic_ns())
                self._governor.leave(call)

    async def _encode(
        self, attempt: Attempt, prompt: dict[str, Any], pooling_params: Any, request_id: str, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        call = await self._admit(attempt, prompt, request_id, 0, 1)
        prompt, _ = self._salted(prompt, attempt)
        attempt.engine_requests.add(request_id)
        self._governor.steps.open(request_id, attempt, 1)
        steps = self._engine.encode(prompt, pooling_params, request_id, **options)
        try:
            async for output in steps:
                self._governor.count(attempt, call, completion_tokens=0, cached_tokens=0, now_s=_now_s())
                yield output
        except Exception as error:
            _fail(attempt, error, begun=False)
            raise
        finally:
            attempt.engine_requests.discard(request_id)
            try:
                await steps.aclose()
            finally:
                self._governor.steps.close(request_id, time.monotonic_ns())
                self._governor.leave(call)

    def _checked_attempt(self, options: Mapping[str, Any]) -> Attempt:
        attempt = current_attempt.get(None)
        if attempt is None:
            raise InternalError("a generation reached the engine outside any attempt; it was not started")
        asked = options.get("lora_request")
        if asked is None:
            self._governor.check_handle(attempt, "")
        else:
            loaded = self._adapters.get(asked.lora_name)
            right = loaded is not None and (loaded.lora_int_id, loaded.lora_path) == (asked.lora_int_id, asked.lora_path)
            self._governor.check_handle(attempt, asked.lora_name if right else f"{asked.lora_name} (not as loaded)")
        return attempt

    def _own(self, options: dict[str, Any], attempt: Attempt) -> None:
        """Overwrites what only the platform may set."""
        del attempt  # a tenant's priority comes from it once the engine schedules by priority
        options["priority"] = 0
        for name in ("data_parallel_rank", "session_id", "kv_hints", "trace_headers"):
            options.pop(name, None)

    def _salted(self, prompt: dict[str, Any], attempt: Attempt) -> tuple[dict[str, Any], str]:
        """And by what the scheduler is to know the tenant, if not by its salt."""
        tenant_id = attempt.handle.tenant_id
        limits = self._governor.admission.tenants.find(tenant_id)
        group = limits.cache_group if limits is not None else None
        salt = tenant_salt(self._secret, tenant_id) if group is None else group_salt(self._secret, group)
        salted = {**prompt, "cache_salt": salt}
        decoder = salted.get("decoder_prompt")
        if isinstance(decoder, dict):
            salted["decoder_prompt"] = {**cast("dict[str, Any]", decoder), "cache_salt": salt}
        return salted, "" if group is None else tenant_salt(self._secret, tenant_id)

    async def _admit(self, attempt: Attempt, prompt: dict[str, Any], request_id: str, max_tokens: int | None, samples: int) -> Call:
        if attempt.closed:
            raise _ended()
        beam = _BEAM_STEP.search(request_id) is not None
        call = await self._governor.admit(attempt, _prompt_tokens(prompt) or 0, max_tokens, samples, _now_s(), beam=beam)
        if attempt.closed:
            self._governor.leave(call)
            raise _ended()
        return call


def _ended() -> Cancelled:
    return Cancelled("the request has ended; nothing more is started for it")


def _fail(attempt: Attempt, error: Exception, *, begun: bool) -> None:
    """Ends the attempt as what it is, an engine's failure: vLLM's application would word it as an event, add [DONE] and be through.

    A ValueError before the first output is the engine's word on bad input, which the application tells the client.
    """
    if attempt.refusal is not None or (isinstance(error, ValueError) and not begun):
        return
    if type(error).__name__ == "EngineDeadError":
        attempt.refusal = WorkerLost("the engine died while it answered this request")
    else:
        attempt.refusal = EngineError("the engine failed while it answered this request")


def _checked_prompt(prompt: Any) -> dict[str, Any]:
    if not isinstance(prompt, dict) or _prompt_tokens(cast("dict[str, Any]", prompt)) is None:
        raise InternalError("a prompt reached the engine in a form whose tokens cannot be counted; it was not started")
    return cast("dict[str, Any]", prompt)


def _prompt_tokens(prompt: Mapping[str, Any]) -> int | None:
    tokens = prompt.get("prompt_token_ids")
    if tokens is None and isinstance(prompt.get("decoder_prompt"), dict):
        tokens = cast("dict[str, Any]", prompt["decoder_prompt"]).get("prompt_token_ids")
    return None if tokens is None else len(tokens)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
