"""vLLM's scheduler with one rule more: while several tenants have sequences in the engine, a prompt takes only the shared budget of a step.

Runs in vLLM's engine process (its `scheduler_cls`). A tenant is known by its cache salt. Alone, a tenant's prompts take whole steps.
"""

# pyright: basic, reportMissingImports=false

from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from services.worker.vllm_blocks import watch_sliding_windows, zero_new_blocks
from shared.policy.engine_room import shape_of


def tenant_scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's own choice of its two, with our rule. `long_prefill_token_threshold` is the budget; 0: engine_room's default."""
    zero_new_blocks()
    base = AsyncScheduler if kwargs["vllm_config"].scheduler_config.async_scheduling else Scheduler
    scheduler = type("TenantScheduler", (_SharedSteps, base), {})(*args, **kwargs)
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
        self.scheduler_config.long_prefill_token_threshold = self._shared_prefill_tokens if self._is_shared() else 0
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _is_shared(self) -> bool:
        salts = iter(chain(self.running, self.waiting))
        first = next(salts, None)
        return first is not None and any(request.cache_salt != first.cache_salt for request in salts)
