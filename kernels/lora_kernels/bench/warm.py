"""Compiles what a run will time, in parallel processes, into Triton's cache: one after the other takes longer than the timing."""

import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait

from lora_kernels.bench.rows import Key
from lora_kernels.bench.selection import is_unusual


class Compiling:
    """Begins when it is made. A case that fails here is told of, and fails again when it is timed."""

    def __init__(self, keys: Sequence[Key], *, with_vllm: bool) -> None:
        processes = max(1, min(8, (os.cpu_count() or 2) // 2, len(keys)))
        # Neighbours compile the same kernels: not at the same time.
        order = sorted(random.Random(0).sample(list(keys), len(keys)), key=is_unusual)
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        self._cases = [self._pool.submit(compile_case, key, with_vllm=with_vllm) for key in order]

    def finish(self, limit_s: float) -> int:
        """Waits at most about so long, and for what has begun; gives how many were left, to be compiled when they are timed."""
        left = wait(self._cases, timeout=max(0, limit_s)).not_done
        self._pool.shutdown(wait=True, cancel_futures=True)
        return len(left)


def compile_case(key: Key, *, with_vllm: bool) -> None:
    import torch

    from lora_kernels.bench.cases import build

    try:
        case = build(key, steps=1, layers=1)
        case.ours(0)
        torch.cuda.synchronize()
        if with_vllm and case.vllm:
            case.vllm()(0)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - compilers and peers fail in many ways
        sys.stderr.write(f"{key}: not compiled: {type(error).__name__}: {str(error)[:300]}\n")
    finally:
        torch.cuda.empty_cache()
