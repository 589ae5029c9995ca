"""What of a client's body reaches the engine: an allow-list per endpoint, content from data URLs only, and `model` as the engine knows it.

Pure. Quotas are the governor's; what a field means is the engine's.
"""

import re
from functools import lru_cache
from typing import Any, cast

import msgspec

from services.worker.request_content import check_content
from services.worker.request_plan import RequestPlan, plan_of
from services.worker.request_shape import MAX_DEPTH, check_numbers, check_shape
from shared.contracts.inference import Handle
from shared.errors import BodyTooLarge, EndpointNotSupported, FieldNotAllowed, InvalidRequest

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_PROMPTS = 1024  # times n
MAX_TOKENS = (1 << 31) - 1  # what the engine's counters hold; its model's length is its own bound
MAX_STOPS = 128  # each is looked for in every token's text, in the loop that all streams share

_COMMON = frozenset({"model", "user", "metadata", "temperature", "top_p", "top_k", "stream"})
_SAMPLING = frozenset(
    {
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "repetition_detection",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "structured_outputs",
    }
)
_GENERATION = _SAMPLING | {
    "n",
    "max_tokens",
    "min_tokens",
    "stream_options",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "use_beam_search",
    "length_penalty",
    "allowed_token_ids",
    "bad_words",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "response_format",
    "thinking_token_budget",
    "echo",
    "add_special_tokens",
}
_TEMPLATE = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs", "tools"}
)

ALLOWED: dict[str, frozenset[str]] = {
    "/v1/chat/completions": _COMMON
    | _GENERATION
    | _TEMPLATE
    | {
        "max_completion_tokens",
        "top_logprobs",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "include_reasoning",
        "service_tier",
    },
    "/v1/completions": _COMMON | _GENERATION | {"prompt", "suffix"},
    "/v1/responses": _COMMON
    | _SAMPLING
    | {
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "parallel_tool_calls",
        "reasoning",
        "include_reasoning",
        "include",
        "service_tier",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "truncation",
        "chat_template_kwargs",
    },
    "/v1/messages": _COMMON
    | {"messages", "max_tokens", "output_config", "thinking", "stop_sequences", "system", "tool_choice", "tools", "chat_template_kwargs"},
    "/v1/embeddings": frozenset(
        {
            "model",
            "user",
            "input",
            "messages",
            "encoding_format",
            "dimensions",
            "embed_dtype",
            "endianness",
            "truncate_prompt_tokens",
            "truncation_side",
            "add_special_tokens",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        }
    ),
    "/v1/tokenize": _TEMPLATE | {"model", "prompt", "return_token_strs"},
}
"""By OpenAI path, the fields that concern the request alone. Whatever is missing here is refused by name."""

_DROPPED = frozenset({"safety_identifier", "prompt_cache_key"})
"""Labels for a provider's own bookkeeping: accepted, never passed on."""

_TEMPLATE_RESERVED = frozenset(
    {
        "chat_template",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_HINTS = {
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "cache_salt": "the platform sets it from the tenant",
    "priority": "the platform sets it",
    "request_id": "the platform sets it",
    "chat_template": "an adapter's own template is kept with the adapter",
    "store": "answers are not stored; send false or leave it out",
    "background": "requests are answered on their own connection; send false or leave it out",
    "previous_response_id": "answers are not stored; send the conversation in `input`",
}
_BOUNDS = {
    "n": (1, MAX_SAMPLES),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens": (0, MAX_TOKENS),
    "max_completion_tokens": (0, MAX_TOKENS),
    "max_output_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "truncate_prompt_tokens": (-1, MAX_TOKENS),
    "thinking_token_budget": (-1, MAX_TOKENS),
    "top_k": (-1, MAX_TOKENS),
}

_LONG_NUMBER = re.compile(rb"\d{19}")  # in a text, perhaps

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Prepared(msgspec.Struct, frozen=True):
    body: bytes  # for the engine's application
    plan: RequestPlan


def prepare(path: str, body: bytes, handle: Handle, engine_model: str) -> Prepared:
    """The body that the engine's application gets for a client's, and what it will make of it.

    A field outside the endpoint's allow-list is refused by name; null and false pass and are dropped, because clients'
    libraries send `store: false` and the like unasked. Media come as data URLs only: an address (http, https, file), on
    a private network or not, would be fetched by the worker.

    :raises FieldNotAllowed: `field` is its path, e.g. "messages[0].content[1].image_url".
    :raises InvalidRequest: not a JSON object, nested too deep, with too many elements, or a value out of bounds.
    :raises BodyTooLarge: over MAX_BODY_BYTES.
    :raises EndpointNotSupported: no such path.
    """
    allowed = ALLOWED.get(path)
    if allowed is None:
        raise EndpointNotSupported(f"{path} is not served; served are: {', '.join(sorted(ALLOWED))}", path=path)
    fields = _parse(body)
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in allowed:
            kept[name] = value
        elif value is not None and value is not False and name not in _DROPPED:
            raise _not_allowed(name, handle)
    _check_bounds(path, kept)
    check_content(kept)
    kept["model"] = engine_model
    if path == "/v1/responses":
        kept["store"] = False  # the engine's default is true
    return Prepared(_encode(kept), plan_of(kept))


def publicise(piece: bytes, engine_model: str, public_model: str) -> bytes:
    """A piece of an answer with the engine's name for the model replaced by the one clients know.

    Adapter ids are unguessable, so that no text holds one by chance. The engine sends a JSON body or a server-sent event as
    one piece, so that no name is cut in two.
    """
    if engine_model == public_model:
        return piece
    return piece.replace(*_model_names(engine_model, public_model))


@lru_cache(maxsize=4096)
def _model_names(engine_model: str, public_model: str) -> tuple[bytes, bytes]:
    return engine_model.encode(), _encode(public_model)[1:-1]


def _parse(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(
            f"the body has {len(body)} bytes, {MAX_BODY_BYTES} are allowed", asked_bytes=len(body), limit_bytes=MAX_BODY_BYTES
        )
    try:
        parsed = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("the body must be a JSON object")
    fields = cast("dict[str, Any]", parsed)
    check_shape(fields)
    if _LONG_NUMBER.search(body):
        check_numbers(fields)
    return fields


def _check_bounds(path: str, fields: dict[str, Any]) -> None:
    bounds = dict(_BOUNDS)
    if path == "/v1/completions":
        bounds["logprobs"] = (0, MAX_LOGPROBS)
    for name, (low, high) in bounds.items():
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not low <= value <= high:
            raise InvalidRequest(f"{name} is {value}; {low} to {high} is allowed", field=name, asked=value, allowed=high)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        prompts = cast("list[Any]", prompt)
        samples = fields.get("n")
        asked = len(prompts) * (samples if isinstance(samples, int) else 1)
        if asked > MAX_PROMPTS and isinstance(prompts[0], str | list):
            raise InvalidRequest(
                f"{asked} answers (prompts times n) in one request; up to {MAX_PROMPTS} are allowed",
                field="prompt",
                asked=asked,
                allowed=MAX_PROMPTS,
            )
    for name in ("stop", "stop_sequences", "bad_words"):
        stops = fields.get(name)
        if isinstance(stops, list) and len(cast("list[Any]", stops)) > MAX_STOPS:
            asked = len(cast("list[Any]", stops))
            raise InvalidRequest(f"{name} has {asked} entries; up to {MAX_STOPS} are allowed", field=name, asked=asked, allowed=MAX_STOPS)
    template = fields.get("chat_template_kwargs")
    if template is not None and not isinstance(template, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", field="chat_template_kwargs")
    for name in cast("dict[str, Any]", template or {}):
        if name in _TEMPLATE_RESERVED:
            raise FieldNotAllowed(f"chat_template_kwargs.{name} is the platform's to set", field=f"chat_template_kwargs.{name}")


def _not_allowed(name: str, handle: Handle) -> FieldNotAllowed:
    hint = _HINTS.get(name, "only fields that concern the request alone are passed on")
    return FieldNotAllowed(f"the field `{name}` is not allowed here: {hint}", field=name, model=handle.public_model)
