"""Sends batches of random prompts to a vLLM engine client and notes when tokens come: the same for every system in process."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.figures import Stream

_LOWEST_ID = 1000  # below lie ids that some tokenizers give a meaning


class Driver:
    """`adapters` are given to requests in turn; none: the base answers."""

    def __init__(self, engine: Any, sampling_params: Any, delta: Any, vocabulary: int, adapters: Sequence[Any] = ()) -> None:
        self._engine = engine
        self._sampling_params = sampling_params
        self._delta = delta
        self._vocabulary = vocabulary
        self._adapters = adapters
        self._sent = 0

    async def batch(self, size: int, prompt_tokens: int, output_tokens: int, seed: str) -> list[Stream]:
        """`size` requests at once. Equal seeds are equal prompts, which the engine may find in its cache.

        :raises AssertionError: an answer is shorter or longer than asked.
        """
        prompts = random_prompts(size, prompt_tokens, self._vocabulary, seed)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._stream(number, prompt, output_tokens)) for number, prompt in enumerate(prompts)]
        return [task.result() for task in tasks]

    async def check_finite(self) -> None:
        """:raises AssertionError: logits are not numbers, or the same token follows whatever was asked."""
        prompts = random_prompts(4, 64, self._vocabulary, "finite")
        said: set[int] = set()
        for number, prompt in enumerate(prompts):
            params = self._sampling_params(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)
            last = None
            async for output in self._generate(number, prompt, params):
                last = output
            assert last is not None
            assert all(-1e4 < entry.logprob <= 0.0 for row in last.outputs[0].logprobs for entry in row.values()), "logits are not finite"
            said.update(last.outputs[0].token_ids)
        assert len(said) > 1, "every prompt is answered by the same token"

    async def _stream(self, number: int, prompt: list[int], output_tokens: int) -> Stream:
        params = self._sampling_params(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        arrivals: list[tuple[float, int]] = []
        sent_s = time.perf_counter()
        async for output in self._generate(number, prompt, params):
            arrivals.append((time.perf_counter(), len(output.outputs[0].token_ids)))
        stream = Stream(sent_s=sent_s, arrivals=[arrival for arrival in arrivals if arrival[1]])
        assert stream.tokens == output_tokens, f"{stream.tokens} tokens came, {output_tokens} were asked for"
        return stream

    def _generate(self, number: int, prompt: list[int], params: Any) -> Any:
        self._sent += 1
        adapter = self._adapters[number % len(self._adapters)] if self._adapters else None
        return self._engine.generate({"prompt_token_ids": prompt}, params, f"bench-{self._sent}", lora_request=adapter)


def random_prompts(count: int, tokens: int, vocabulary: int, seed: str) -> list[list[int]]:
    chooser = random.Random(seed)
    lowest = min(_LOWEST_ID, vocabulary // 2)
    return [[chooser.randrange(lowest, vocabulary - lowest) for _ in range(tokens)] for _ in range(count)]
