"""What two LoRA paths answered to the same requests, compared where bfloat16 lets them be: log-probabilities, and tokens up
to the first position at which the other path's token was nearly as likely."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    """prompt: token ids. adapter: None for the base."""

    prompt: tuple[int, ...]
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """tokens: greedy. logprobs: at each position, of the most likely tokens. prompt_logprobs: of the prompt's own tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    prompt_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """logprobs: absolute differences, of the prompt's tokens and of the greedy ones up to the first that is another.

    margin: by how much the one path preferred its own token where the other took another; 0 where all are the same.
    """

    logprobs: tuple[float, ...]
    same_tokens: int
    margin: float


def ask(llm: Any, requests: Sequence[Request], adapters: dict[str, Any], *, num_tokens: int) -> list[Answer]:
    """All requests in one batch."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=20, prompt_logprobs=0)
    outputs = llm.generate(
        [{"prompt_token_ids": list(request.prompt)} for request in requests],
        params,
        lora_request=[adapters[request.adapter] if request.adapter else None for request in requests],
        use_tqdm=False,
    )
    return [
        Answer(
            tokens=tuple(output.outputs[0].token_ids),
            logprobs=tuple({token: entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs),
            prompt_logprobs=tuple(
                at[token].logprob for token, at in zip(request.prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
            ),
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def from_json(answer: dict[str, Any]) -> Answer:
    return Answer(
        tokens=tuple(answer["tokens"]),
        logprobs=tuple({int(token): logprob for token, logprob in at.items()} for at in answer["logprobs"]),
        prompt_logprobs=tuple(answer["prompt_logprobs"]),
    )


def compare(one: Answer, other: Answer) -> Difference:
    apart = [abs(a - b) for a, b in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)]
    same, margin = 0, 0.0
    for token, other_token, at, other_at in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        if token != other_token:
            margin = at[token] - at.get(other_token, float("-inf"))
            break
        apart.append(abs(at[token] - other_at[token]))
        same += 1
    return Difference(logprobs=tuple(apart), same_tokens=same, margin=margin)
