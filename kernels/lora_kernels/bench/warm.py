"""Compiles what a run will time, in parallel processes, into Triton's cache: one after the other takes longer than the timing."""

import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from lora_kernels.bench.rows import Key


def start(keys: Sequence[Key], *, with_vllm: bool, processes: int | None = None) -> ProcessPoolExecutor:
    """Begins; the pool's `shutdown()` waits for the end. A case that fails here is told of and fails again when it is timed."""
    processes = processes or max(1, min(8, (os.cpu_count() or 2) // 2, len(keys)))
    keys = random.Random(0).sample(list(keys), len(keys))  # neighbours compile the same kernels: not at the same time
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    for key in keys:
        pool.submit(compile_case, key, with_vllm=with_vllm)
    return pool


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
