"""Runs in vLLM's engine process: a block of the KV cache is zeroed when a sequence gets it.

vLLM does so for some models only; elsewhere a block keeps what its last owner left. Attention gives weight zero to what lies behind a
sequence's end, and zero times what is no number is no number: one tenant's overflow would answer whoever gets its blocks next (seen:
every later request of every tenant, until the blocks were written over).
"""

# pyright: basic, reportMissingImports=false

import logging
from typing import Any

log = logging.getLogger(__name__)


def zero_new_blocks() -> None:
    """Before the cache is made, in each of the engine's processes. Idempotent."""
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.utils import KVBlockZeroer

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)  # type: ignore[method-assign, assignment]
    if KVBlockZeroer.__init__.__module__ != __name__:
        KVBlockZeroer.__init__ = _unless_pages_differ(KVBlockZeroer.__init__)  # type: ignore[method-assign]


def _unless_pages_differ(init: Any) -> Any:
    """vLLM zeroes blocks of one size only, and would not start with layers whose blocks differ."""

    def init_or_leave(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except AssertionError as error:
            self._meta = None
            log.warning("blocks of the KV cache are not zeroed when they change hands: %s", error)

    return init_or_leave


def watch_sliding_windows(scheduler: Any) -> None:
    """vLLM 0.26 names the new blocks of layers that attend to everything; those of sliding windows lie in the same memory."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager.kv_cache_spec, AttentionSpec):
            manager._record_new_block_ids = True
