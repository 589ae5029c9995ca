"""vLLM's scheduler with one rule more: while tenants share the engine, one tenant's prompts take only the shared budget of a step.

Runs in vLLM's engine process (its `scheduler_cls`). A tenant is known by its cache salt or its mark (tenant_mark.py). Alone, a tenant's
prompts take whole steps.
"""

# pyright: basic, reportMissingImports=false

from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.tenant_mark import owner_of
from services.worker.vllm_blocks import watch_sliding_windows, zero_new_blocks
from services.worker.vllm_step_hook import metered
from shared.policy.engine_room import shape_of


def tenant_scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's own choice of its two, with our rule. `long_prefill_token_threshold` is the budget; 0: engine_room's default."""
    zero_new_blocks()
    base = AsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else Scheduler
    scheduler = metered(type("TenantScheduler", (_SharedSteps, base), {}))(*args, **kwargs)
    watch_sliding_windows(scheduler)
    return scheduler


class _SharedSteps:
    """Both schedulers read the threshold anew in every step."""

    scheduler_config: Any
    running: Any
    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.scheduler_config
        shape = shape_of(config.max_num_seqs, config.max_num_batched_tokens, config.long_prefill_token_threshold)
        self._shared_prefill_tokens = shape.shared_prefill_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        shared = self._is_shared()
        self.scheduler_config.long_prefill_token_threshold = self._shared_prefill_tokens if shared else 0
        held = self._hold_back() if shared else ()
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            for request in held:
                self.waiting.add_request(request)

    def _hold_back(self) -> list[Any]:
        """Takes out of the waiting ones, for this step, prompts for which their tenant's budget has no room beside those before them.

        Samples of one prompt come as so many prompts: once the first has been read, the others find it in the cache.
        """
        budget = self._shared_prefill_tokens
        reading: dict[str | None, int] = {}
        for request in self.running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            if left > 0:
                owner = owner_of(request)
                reading[owner] = reading.get(owner, 0) + min(left, budget)
        held: list[Any] = []
        for request in self.waiting:
            part = min(max(1, request.num_prompt_tokens - request.num_computed_tokens), budget)
            owner = owner_of(request)
            before = reading.get(owner, 0)
            if before and before + part > budget:
                held.append(request)
            else:
                reading[owner] = before + part
        if held:
            self.waiting.remove_requests(held)
        return held

    def _is_shared(self) -> bool:
        owners = map(owner_of, chain(self.running, self.waiting))
        first = next(owners, None)
        return any(owner != first for owner in owners)
