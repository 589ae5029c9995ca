"""A real vLLM CPU engine in a process of its own, in which a call's requests are all scheduled from the same first step.

vLLM's usual engine process takes requests as they arrive, so what is batched together varies from run to run; here the
engine runs in the child's own thread and starts stepping when all requests of a call are in.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_DEADLINE_S = 240
CALL_DEADLINE_S = 60
MAX_LORAS = 6
MAX_LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request of a batch; adapter: a mounted adapter's name, or None for the base."""

    prompt: tuple[int, ...]
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Greedy tokens, and each position's (token id, log-probability) pairs; prompt_logprobs likewise where asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    prompt_logprobs: tuple[tuple[tuple[int, float], ...], ...]


class Engine:
    """The parent's side. Every call has a deadline; a child that misses one is killed."""

    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, model), daemon=True)
        self._process.start()
        child.close()
        self._answer(START_DEADLINE_S)

    def generate(self, rows: Sequence[Row], *, num_tokens: int, prompt_logprobs: int | None = None) -> list[Answer]:
        return self._call("generate", list(rows), num_tokens, prompt_logprobs)

    def add(self, name: str, path: Path) -> None:
        self._call("add", name, path)

    def remove(self, name: str) -> None:
        self._call("remove", name)

    def inspect(self, method: str, *args: Any) -> Any:
        """A method of WorkerInspection; an adapter's name stands for its id."""
        return self._call("inspect", method, args)

    def poison(self, slot: int) -> None:
        """Fills every tensor of the slot with NaN."""
        self._call("poison", slot)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)

    def _call(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._answer(CALL_DEADLINE_S)

    def _answer(self, deadline_s: float) -> Any:
        if not self._pipe.poll(deadline_s):
            self._process.kill()
            raise TimeoutError(f"the engine did not answer in {deadline_s} s")
        outcome = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _serve(pipe: Connection, model: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    # Matrices this small only lose by threads, most of all where other tests want the cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    child = _Child(model)
    pipe.send(None)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        call: Callable[..., Any] = getattr(child, method)
        try:
            pipe.send(call(*args))
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class _Child:
    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self.requests: dict[str, Any] = {}
        self.next_id = 1
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            enable_lora=True,
            max_loras=MAX_LORAS,
            max_lora_rank=MAX_LORA_RANK,
            block_size=32,
            max_model_len=128,
            max_num_seqs=32,
            enable_prefix_caching=False,
            worker_extension_cls="lora_kernels.vllm_plugin.inspect.WorkerInspection",
        )

    def generate(self, rows: list[Row], num_tokens: int, prompt_logprobs: int | None) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=3,
            prompt_logprobs=prompt_logprobs,
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(row.prompt)} for row in rows],
            params,
            lora_request=[self.requests[row.adapter] if row.adapter else None for row in rows],
            use_tqdm=False,
        )
        return [
            Answer(
                tokens=tuple(output.outputs[0].token_ids),
                logprobs=_pairs(output.outputs[0].logprobs),
                prompt_logprobs=_pairs((output.prompt_logprobs or [])[1:]),
            )
            for output in outputs
        ]

    def add(self, name: str, path: Path) -> None:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, self.next_id, str(path))
        self.next_id += 1
        self.requests[name] = request
        self.llm.llm_engine.add_lora(request)

    def remove(self, name: str) -> None:
        self.llm.llm_engine.remove_lora(self.requests.pop(name).lora_int_id)

    def inspect(self, method: str, args: tuple[Any, ...]) -> Any:
        ids = tuple(self.requests[arg].lora_int_id if isinstance(arg, str) else arg for arg in args)
        (answer,) = self.llm.collective_rpc(method, args=ids)
        return answer

    def poison(self, slot: int) -> None:
        self.llm.collective_rpc(_fill_with_nan, args=(slot,))


def _fill_with_nan(worker: Any, slot: int) -> None:
    from lora_kernels.vllm_plugin.slots import slot_tensors

    for stack in slot_tensors(worker.model_runner.lora_manager._adapter_manager):
        stack[slot] = float("nan")


def _pairs(positions: Any) -> tuple[tuple[tuple[int, float], ...], ...]:
    return tuple(tuple((token, entry.logprob) for token, entry in position.items()) for position in positions)
