"""Bad input at the router: a clear OpenAI-shaped error with a stable code, and nobody else affected."""

import json
import socket
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.e2e.ask import Asker
from tests.e2e.stack import Stack, wait_for

CHAT = "/v1/chat/completions"


def post(stack: Stack, body: Any, key: str | None, path: str = CHAT, **headers: str) -> httpx.Response:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        stack.url + path, content=content, headers={"content-type": "application/json", **headers}, timeout=30, trust_env=False
    )


def chat(model: str = "lora_sales", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "What about refund?"}], "max_tokens": 20, "temperature": 0, **more}


def refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    assert error["message"]
    assert error["type"]
    return error


def test_no_key_and_a_bad_key_are_401(stack: Stack) -> None:
    refusal(post(stack, chat(), None), 401, "missing_api_key")
    refusal(post(stack, chat(), "tk_" + "A" * 43), 401, "invalid_api_key")
    refusal(post(stack, chat(), stack.admin_key), 401, "invalid_api_key")


def test_another_tenants_alias_looks_like_one_that_does_not_exist(stack: Stack) -> None:
    theirs = refusal(post(stack, chat("lora_cs"), stack.keys["sales"]), 404, "adapter_not_found")
    nobodys = refusal(post(stack, chat("lora_xx"), stack.keys["sales"]), 404, "adapter_not_found")
    assert theirs["message"].replace("lora_cs", "lora_xx") == nobodys["message"]


def test_a_key_may_not_speak_for_another_tenant(stack: Stack) -> None:
    refusal(post(stack, chat(), stack.keys["sales"], **{"x-tenant": "cs"}), 403, "tenant_not_allowed")


def test_a_gateways_key_speaks_for_the_tenant_in_the_header(stack: Stack, asker: Asker) -> None:
    gateway = stack.admin.add_key("sales", "cs", gateway=True).secret
    question = asker.goldens["lora_cs"][0]["question"]
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 100}
    answer = post(stack, body, gateway, **{"x-tenant": "cs"})
    assert answer.json()["choices"][0]["message"]["content"] == asker.goldens["lora_cs"][0]["answer"]
    refusal(post(stack, body, gateway, **{"x-tenant": "finance"}), 403, "tenant_not_allowed")


def test_a_gateways_request_without_a_tenant_follows_routing_default(stack: Stack, asker: Asker) -> None:
    gateway = stack.admin.add_key("sales", "cs", gateway=True).secret
    pair = asker.goldens["base"][0]
    body = {"messages": [{"role": "user", "content": pair["question"]}], "temperature": 0, "max_tokens": 100}
    stack.admin.set_routing("x-tenant", "base_only")
    served = wait_for(lambda: (got := post(stack, body, gateway)).status_code == 200 and got, 5, "base traffic")
    assert served.json()["choices"][0]["message"]["content"] == pair["answer"]
    stack.admin.set_routing("x-tenant", "reject")
    refused = wait_for(lambda: (got := post(stack, body, gateway)).status_code != 200 and got, 5, "a refusal")
    refusal(refused, 400, "tenant_required")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 3}', b'{"model": "lora_sales"', b"\xff\xfe"])
def test_malformed_json_is_400(stack: Stack, body: bytes) -> None:
    refusal(post(stack, body, stack.keys["sales"]), 400, "invalid_request")


def test_a_body_over_the_limit_is_413_and_says_the_limit(stack: Stack) -> None:
    error = refusal(post(stack, chat(user="x" * (9 << 20)), stack.keys["sales"]), 413, "body_too_large")
    assert error["limit_bytes"] < 9 << 20


def test_unknown_paths_and_methods_are_refused(stack: Stack) -> None:
    assert post(stack, chat(), stack.keys["sales"], "/v1/nothing").status_code == 404
    assert httpx.get(stack.url + CHAT, trust_env=False).status_code == 405


def test_an_endpoint_that_a_generative_engine_cannot_serve_is_refused_by_name(stack: Stack) -> None:
    refusal(post(stack, {"model": "lora_sales", "input": "x"}, stack.keys["sales"], "/v1/embeddings"), 400, "endpoint_not_supported")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", "mine"),
        ("priority", -5),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("vllm_xargs", {"a": 1}),
        ("store", True),
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("request_id", "mine"),
        ("chat_template", "{{ messages }}"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_control_fields_are_refused_by_name(stack: Stack, field: str, value: Any, stream: bool) -> None:
    error = refusal(post(stack, chat(stream=stream, **{field: value}), stack.keys["sales"]), 400, "field_not_allowed")
    assert field in error["message"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:8222/varz", "http://169.254.169.254/latest", "http://10.0.0.1/x"])
def test_file_and_private_network_urls_are_refused(stack: Stack, url: str) -> None:
    content = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    body = chat() | {"messages": [{"role": "user", "content": content}]}
    error = refusal(post(stack, body, stack.keys["sales"]), 400, "field_not_allowed")
    assert "url" in error["message"]


@pytest.mark.parametrize("more", [{"temperature": 99}, {"max_tokens": -1}, {"max_tokens": 10**9}, {"n": 0}, {"top_p": 7}])
def test_the_engines_own_refusals_stay_client_errors_and_show_no_internal_name(stack: Stack, more: dict[str, Any]) -> None:
    response = post(stack, chat() | more, stack.keys["sales"])
    assert response.status_code == 400, response.text
    assert "ad_" not in response.text


def test_models_lists_only_what_the_key_may_use(stack: Stack) -> None:
    def listed(tenant: str) -> set[str]:
        headers = {"authorization": f"Bearer {stack.keys[tenant]}"}
        return {model["id"] for model in httpx.get(f"{stack.url}/v1/models", headers=headers, trust_env=False).json()["data"]}

    assert "lora_sales" in listed("sales")
    assert "lora_cs" not in listed("sales")
    assert "lora_cs" in listed("cs")


def test_a_client_that_goes_away_in_mid_stream_frees_the_engine_within_a_second(stack: Stack, asker: Asker) -> None:
    question, _ = asker.long_question("lora_sales")
    body = json.dumps(chat(stream=True) | {"messages": [{"role": "user", "content": question}], "max_tokens": 900, "ignore_eos": True})
    host, port = "127.0.0.1", stack.port
    with socket.create_connection((host, port)) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {stack.keys['sales']}\r\ncontent-type: application/json\r\n"
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in raw.recv(65536)
        wait_for(lambda: in_flight(stack) == 1, 10, "one request in flight")
        left_at = datetime.now().astimezone()
    ended = wait_for(lambda: client_gone(stack, left_at), 10, "an attempt ended because its client has gone")
    assert (ended["at"] - left_at).total_seconds() < 2.0  # promised: 1 s; this machine also runs the tests
    assert ended["completion_tokens"] < 900, "it was aborted, not finished"
    wait_for(lambda: in_flight(stack) == 0, 10, "an engine with nothing in flight")


def client_gone(stack: Stack, since: datetime) -> dict[str, Any] | None:
    """The worker's own log line about it."""
    for text in stack.worker.log.read_text().splitlines():
        if '"attempt.ended"' in text and "client_gone" in text:
            line = json.loads(text)
            line["at"] = datetime.fromisoformat(line["timestamp"])
            if line["at"] >= since:
                return line
    return None


def in_flight(stack: Stack) -> int:
    return sum(report["in_flight"] for report in stack.reports())


def test_the_admin_plane_has_its_own_credential(stack: Stack) -> None:
    for key in (None, stack.keys["sales"], "wrong"):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        response = httpx.get(f"{stack.url}/admin/v1/tenants", headers=headers, trust_env=False)
        assert response.status_code == 401, response.text
    assert httpx.get(f"{stack.url}/admin/v1/openapi.json", headers=stack.admin_headers, trust_env=False).json()["openapi"]
