"""What of a client's body reaches the engine."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker import request_policy as policy
from shared.contracts.errors import to_info
from shared.contracts.inference import Handle
from shared.errors import BodyTooLarge, EndpointNotSupported, FieldNotAllowed, InvalidRequest, TenantryError

ADAPTER = "ad_abcdefghijklmnopqrstuvwxyz"
HANDLE = Handle(
    tenant_id="tn_1", tenant="sales", pool_id="main", base="demo@" + "0" * 64, adapter_id=ADAPTER, alias="lora_sales", version=3
)
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "lora_sales", "messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"model": "lora_sales", "prompt": "hello"},
    "/v1/responses": {"model": "lora_sales", "input": "hello"},
    "/v1/messages": {"model": "lora_sales", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/embeddings": {"model": "lora_sales", "input": "hello"},
    "/v1/tokenize": {"model": "lora_sales", "prompt": "hello"},
}
CHAT = "/v1/chat/completions"


def prepared(path: str, **fields: Any) -> dict[str, Any]:
    body = {**MINIMAL[path], **fields}
    return json.loads(policy.prepare(path, json.dumps(body).encode(), HANDLE, ADAPTER).body)


@pytest.mark.parametrize("path", MINIMAL)
def test_the_engines_name_takes_the_place_of_the_model_and_the_rest_stays(path: str) -> None:
    body = prepared(path)
    assert body.pop("model") == ADAPTER
    assert body.pop("store", False) is False
    assert body == {name: value for name, value in MINIMAL[path].items() if name != "model"}


def test_a_body_without_a_model_gets_the_engines() -> None:
    assert json.loads(policy.prepare("/v1/completions", b'{"prompt":"x"}', HANDLE, ADAPTER).body)["model"] == ADAPTER


@pytest.mark.parametrize("path", MINIMAL)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", "mine"),
        ("priority", -5),
        ("priority", 0),
        ("request_id", "mine"),
        ("kv_transfer_params", {"do_remote_prefill": True}),
        ("ec_transfer_params", {}),
        ("vllm_xargs", {"a": 1}),
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("mm_processor_kwargs", {}),
        ("media_io_kwargs", {}),
        ("documents", []),
        ("chat_template", "{{ messages }}"),
        ("data_parallel_rank", 1),
        ("session_id", "s"),
        ("lora_request", {"lora_name": "x"}),
        ("lora_path", "/etc"),
        ("prompt_embeds", "AAAA"),
        ("conversation", "conv_1"),
        ("mcp_servers", [{"url": "http://x"}]),
        ("guided_json", {}),
        ("watermarking", True),
        ("an_unknown_field", 1),
    ],
)
def test_a_field_that_is_not_the_requests_own_is_refused_by_name(path: str, field: str, value: Any) -> None:
    with pytest.raises(FieldNotAllowed) as refused:
        prepared(path, **{field: value})
    assert refused.value.fields["field"] == field
    assert field in refused.value.message
    assert ADAPTER not in str(refused.value.fields)


@pytest.mark.parametrize("value", [None, False])
def test_null_and_false_pass_and_are_dropped(value: object) -> None:
    body = prepared("/v1/chat/completions", store=value, background=value, cache_salt=value)
    assert not body.keys() & {"store", "background", "cache_salt"}


def test_a_response_is_never_stored_by_default() -> None:
    assert prepared("/v1/responses")["store"] is False
    assert prepared("/v1/responses", store=False)["store"] is False


def test_labels_of_other_providers_are_accepted_and_dropped() -> None:
    assert "prompt_cache_key" not in prepared("/v1/responses", prompt_cache_key="k", safety_identifier="s")


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [1], "ignore_eos": True, "min_tokens": 2},
        {"structured_outputs": {"choice": ["a"]}, "logprobs": True, "top_logprobs": 5, "prompt_logprobs": 3},
        {"truncate_prompt_tokens": 10, "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True},
        {"n": 4, "seed": 1, "logit_bias": {"5": 1.0}, "stream": True, "stream_options": {"include_usage": True}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"url": "http://x"}}}], "tool_choice": "auto"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"image_url": {"type": "string"}}}}},
    ],
)
def test_sampling_that_concerns_the_request_alone_passes_unchanged(fields: dict[str, Any]) -> None:
    body = prepared(CHAT, **fields)
    assert {name: body[name] for name in fields} == fields


IMAGE = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}], "messages[0].content[0].image_url.url"),
        ([{"type": "image_url", "image_url": "https://example.com/x.png"}], "messages[0].content[0].image_url"),
        (
            [{"type": "text", "text": "x"}, {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}],
            "messages[0].content[1].audio_url.url",
        ),
        ([{"type": "video_url", "video_url": {"url": "HTTP://169.254.169.254/"}}], "messages[0].content[0].video_url.url"),
        ([{"image_url": "ftp://x/y"}], "messages[0].content[0].image_url"),
        ([{"type": "image_url", "image_url": {"url": " data:image/png;base64,AA"}}], "messages[0].content[0].image_url.url"),
        ([{"type": "image_url", "image_url": {"url": ["data:x"]}}], "messages[0].content[0].image_url.url"),
        ([{"type": "input_file", "file_url": "https://example.com/x.pdf"}], "messages[0].content[0].file_url"),
        ([{"type": "file", "file": {"file_id": "f"}}], "messages[0].content[0].file"),
        ([{"type": "image_url", "image_url": {"url": IMAGE}, "uuid": "another tenant's"}], "messages[0].content[0].uuid"),
        ([{"type": "image_url", "image_url": {"url": IMAGE, "uuid": "u"}}], "messages[0].content[0].image_url.uuid"),
        ([{"type": "image_embeds", "image_embeds": "AAAA"}], "messages[0].content[0].image_embeds"),
        ([{"type": "image", "source": {"type": "url", "url": "https://example.com"}}], "messages[0].content[0].source.url"),
        ([{"type": "document", "source": {"type": "file", "file_id": "f"}}], "messages[0].content[0].source.file_id"),
        (
            [{"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "http://localhost"}}]}],
            "messages[0].content[0].content[0].source.url",
        ),
    ],
)
def test_media_that_the_worker_would_fetch_or_share_are_refused_by_their_path(content: Any, field: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages"):
        with pytest.raises(FieldNotAllowed) as refused:
            prepared(path, messages=[{"role": "user", "content": content}])
        assert refused.value.fields["field"] == field


def test_media_in_a_responses_input_are_checked_too() -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]}
    with pytest.raises(FieldNotAllowed) as refused:
        prepared("/v1/responses", input=[item])
    assert refused.value.fields["field"] == "input[0].content[0].image_url"
    output = {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "http://10.0.0.1/"}}
    with pytest.raises(FieldNotAllowed):
        prepared("/v1/responses", input=[output])


def test_data_urls_and_the_callers_own_data_pass() -> None:
    content = [
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "tool_use", "id": "t", "name": "fetch", "input": {"url": "https://example.com"}},
        {"type": "text", "text": "see https://example.com"},
    ]
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"url":"http://x"}'}}]}
    messages = [{"role": "user", "content": content}, call]
    assert prepared(CHAT, messages=messages)["messages"] == messages


@pytest.mark.parametrize("kind", ["mcp", "web_search", "file_search", "code_interpreter", "bash_20250124"])
def test_a_tool_that_the_server_would_run_is_refused(kind: str) -> None:
    with pytest.raises(FieldNotAllowed) as refused:
        prepared("/v1/responses", tools=[{"type": "function", "name": "f"}, {"type": kind, "server_url": "http://x"}])
    assert refused.value.fields["field"] == "tools[1].type"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "documents", "conversation"])
def test_template_arguments_that_are_not_the_templates_are_refused(name: str) -> None:
    with pytest.raises(FieldNotAllowed) as refused:
        prepared(CHAT, chat_template_kwargs={name: "x"})
    assert refused.value.fields["field"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 129}),
        (CHAT, {"n": 10**30}),
        (CHAT, {"max_tokens": -1}),
        (CHAT, {"max_tokens": 10**30}),
        (CHAT, {"max_completion_tokens": 1e300}),
        (CHAT, {"min_tokens": -5}),
        ("/v1/responses", {"max_output_tokens": 2**31}),
        ("/v1/completions", {"truncate_prompt_tokens": -2}),
        (CHAT, {"n": 0}),
        (CHAT, {"top_logprobs": 21}),
        (CHAT, {"prompt_logprobs": -1}),
        ("/v1/completions", {"logprobs": -1}),
        ("/v1/completions", {"prompt": ["x"] * 1025}),
        ("/v1/completions", {"prompt": ["x"] * 20, "n": 100}),
        (CHAT, {"chat_template_kwargs": "x"}),
        (CHAT, {"stop": ["x"] * 129}),
        (CHAT, {"bad_words": ["x"] * 129}),
        ("/v1/messages", {"stop_sequences": ["x"] * 129}),
    ],
)
def test_values_out_of_bounds_are_invalid(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(path, **fields)
    assert refused.value.fields["field"] == next(iter(fields))


def test_a_long_prompt_of_token_ids_is_one_prompt() -> None:
    assert len(prepared("/v1/completions", prompt=list(range(5000)))["prompt"]) == 5000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b'{"model": "\xff"}', b'{"a":1}{"b":2}', b'{"a": NaN}'])
def test_what_is_not_a_json_object_is_invalid(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        policy.prepare(CHAT, body, HANDLE, ADAPTER)


@pytest.mark.parametrize("depth", [101, 2_000, 200_000])
def test_a_body_nested_too_deep_is_invalid(depth: int) -> None:
    with pytest.raises(InvalidRequest):
        policy.prepare(CHAT, b'{"messages":' + b"[" * depth + b"]" * depth + b"}", HANDLE, ADAPTER)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, b'"messages": [' + b"[]," * 5_000 + b"[]]"),
        (CHAT, b'"messages": [' + b"1," * 5_000 + b"1]"),
        (CHAT, b'"messages": [{"role": "user", "content": [' + b"1," * 5_000 + b"1]}]"),
        (CHAT, b'"messages": [' + (b'{"content": [' + b"{}," * 99 + b"{}]},") * 400 + b"{}]"),
        (CHAT, b'"messages": [' + (b'{"content": [' + b"1," * 4_000 + b"1]},") * 20 + b"{}]"),
        (CHAT, b'"messages": [{' + b",".join(b'"k%d": 1' % n for n in range(5_000)) + b"}]"),
        (CHAT, b'"stop": [' + b'"a",' * 5_000 + b'"a"]'),
        (CHAT, b'"allowed_token_ids": [' + b"1," * 300_000 + b"1]"),
        ("/v1/completions", b'"prompt": [' + b'1, "a",' * 5_000 + b"1]"),
        ("/v1/completions", b'"prompt": [' + b"true," * 5_000 + b"true]"),
        ("/v1/responses", b'"input": [' + b"{}," * 5_000 + b"{}]"),
    ],
)
def test_a_body_with_more_elements_than_the_engine_can_check_in_passing_is_invalid(path: str, fields: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"entries; up to|more than \d+ elements"):
        policy.prepare(path, b"{" + fields + b"}", HANDLE, ADAPTER)


def test_long_lists_of_token_ids_and_long_conversations_pass() -> None:
    assert len(prepared("/v1/completions", prompt=list(range(100_000)))["prompt"]) == 100_000
    assert len(prepared("/v1/completions", prompt=[list(range(10_000))] * 4)["prompt"]) == 4
    assert len(prepared(CHAT, allowed_token_ids=list(range(150_000)))["allowed_token_ids"]) == 150_000
    turn = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    assert len(prepared(CHAT, messages=[turn] * 4_000)["messages"]) == 4_000


def test_the_last_of_two_equal_fields_counts_for_the_check_and_for_the_engine() -> None:
    with pytest.raises(FieldNotAllowed):
        policy.prepare(CHAT, b'{"cache_salt": null, "cache_salt": "x"}', HANDLE, ADAPTER)


def test_a_body_over_the_limit_names_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_BODY_BYTES", 10)
    with pytest.raises(BodyTooLarge) as refused:
        policy.prepare(CHAT, b'{"model": "x"}', HANDLE, ADAPTER)
    assert refused.value.fields == {"asked_bytes": 14, "limit_bytes": 10}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/models", "/tokenize", "/v1/audio/transcriptions", ""])
def test_other_paths_are_not_served(path: str) -> None:
    with pytest.raises(EndpointNotSupported):
        policy.prepare(path, b"{}", HANDLE, ADAPTER)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(sorted(MINIMAL)), st.dictionaries(st.text(max_size=12), JSON, max_size=4))
def test_no_body_gets_a_field_past_the_allow_list(path: str, fields: dict[str, Any]) -> None:
    try:
        body = json.loads(policy.prepare(path, json.dumps(fields).encode(), HANDLE, ADAPTER).body)
    except TenantryError:
        return
    assert body["model"] == ADAPTER
    assert body.keys() <= policy.ALLOWED[path] | {"model", "store"}


def test_answers_show_the_public_name_in_json_and_in_events() -> None:
    event = b'data: {"id":"1","model":"' + ADAPTER.encode() + b'","choices":[]}\n\n'
    assert policy.publicise(event, ADAPTER, "lora_sales@3") == b'data: {"id":"1","model":"lora_sales@3","choices":[]}\n\n'
    assert json.loads(policy.publicise(b'{"model":"' + ADAPTER.encode() + b'"}', ADAPTER, 'a"b')) == {"model": 'a"b'}
    assert policy.publicise(b"demo demo", "demo", "demo") == b"demo demo"


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 10**30), ("seed", -(10**400)), ("stop_token_ids", [1, 2**63]), ("logit_bias", {"7": 10**25}), ("max_tokens", 10**4000)],
)
def test_a_whole_number_that_nothing_can_carry_is_invalid_by_its_fields_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        prepared(CHAT, **{name: value})
    msgspec.msgpack.encode(to_info(refused.value))


def test_a_long_number_in_a_text_is_nobodys_concern() -> None:
    messages = [{"role": "user", "content": "call 00491701234567890123456789"}]
    assert prepared(CHAT, messages=messages)["messages"] == messages
