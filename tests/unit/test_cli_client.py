"""The Python client against a small stand-in for the admin plane: what goes over the wire, and how refusals read."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.cli.archive import local_digest, pack
from services.cli.ask import text_pieces
from services.cli.client import ClientError
from shared.artifacts.archive import read_bundle
from tenantry import Client
from tests.unit.test_cli_plan import adapter

Handler = Callable[[httpx.Request], httpx.Response]


def client_of(handler: Handler) -> Client:
    return Client("http://here", "the-key", transport=httpx.MockTransport(handler))


class Plane:
    """Two tenants have an adapter `shared_name`; `cs` alone has `lora_cs`."""

    def __init__(self) -> None:
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if request.method == "GET":
            views = [adapter("lora_cs", tenant="cs"), adapter("shared_name", tenant="cs"), adapter("shared_name", tenant="sales")]
            return httpx.Response(200, content=msgspec.json.encode(views))
        return httpx.Response(200, content=msgspec.json.encode(adapter("lora_cs", tenant="cs")))


def test_unload_by_name_alone_finds_the_tenant() -> None:
    plane = Plane()
    client_of(plane).unload("lora_cs", mode="draining")
    request = plane.seen[-1]
    assert (request.method, request.url.path) == ("POST", "/admin/v1/adapters/cs/lora_cs/unload")
    assert msgspec.json.decode(request.content)["mode"] == "draining"
    assert request.headers["authorization"] == "Bearer the-key"


def test_a_name_that_several_tenants_have_needs_the_tenant() -> None:
    plane = Plane()
    with pytest.raises(ClientError, match="cs, sales"):
        client_of(plane).unload("shared_name")
    client_of(plane).unload("shared_name", tenant="sales")
    assert plane.seen[-1].url.path == "/admin/v1/adapters/sales/shared_name/unload"


def test_a_name_that_nobody_has_is_said_to_be_unknown() -> None:
    with pytest.raises(ClientError) as caught:
        client_of(Plane()).unload("nothing")
    assert (caught.value.status, caught.value.peer_code) == (404, "adapter_not_found")


def test_a_refusal_keeps_the_service_s_words_code_and_figures() -> None:
    body = {"error": {"message": "over the quota", "code": "quota_exceeded", "asked_bytes": 3, "held_bytes": 2, "limit_bytes": 4}}
    with pytest.raises(ClientError) as caught:
        client_of(lambda _request: httpx.Response(409, json=body)).tenants()
    assert (caught.value.message, caught.value.peer_code, caught.value.status) == ("over the quota", "quota_exceeded", 409)
    assert caught.value.fields["held_bytes"] == 2


def test_an_answer_without_a_reason_is_still_one_line() -> None:
    with pytest.raises(ClientError, match="HTTP 502"):
        client_of(lambda _request: httpx.Response(502, text="<html>")).tenants()


def test_a_service_that_is_not_there_says_what_to_start() -> None:
    def nobody(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(ClientError, match="tenantry up"):
        client_of(nobody).tenants()


def test_a_folder_is_sent_as_an_archive_of_the_adapter_s_files_with_its_progress(tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "lora", more={"optimizer.pt": b"o" * 999, "README.md": b"r"})
    plane, seen = Plane(), []
    client_of(plane).upload("cs", "lora_cs", folder, ceiling_mb=3, progress=lambda sent, size: seen.append((sent, size)))
    request = plane.seen[-1]
    assert dict(request.url.params) == {"ceiling_bytes": str(3 * 1024 * 1024), "wait_s": "120.0"}
    with tarfile.open(fileobj=io.BytesIO(request.content)) as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert seen[-1] == (len(request.content), len(request.content))


def an_adapter(folder: Path, more: dict[str, bytes] | None = None) -> Path:
    folder.mkdir()
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", **(more or {})}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_digest_computed_here_is_the_registry_s(tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "lora", more={"chat_template.jinja": b"{{ x }}", "tokenizer.json": b"{}"})
    pack(folder, tmp_path / "lora.tar")
    assert local_digest(folder) == read_bundle(tmp_path / "lora.tar", tmp_path / "out").digest


def test_a_pickle_goes_along_where_there_are_no_safetensors_so_that_it_is_refused_by_name(tmp_path: Path) -> None:
    folder = an_adapter(tmp_path / "lora", more={"adapter_model.bin": b"pickle"})
    (folder / "adapter_model.safetensors").unlink()
    pack(folder, tmp_path / "lora.tar")
    with tarfile.open(tmp_path / "lora.tar") as tar:
        assert sorted(tar.getnames()) == ["adapter_config.json", "adapter_model.bin"]
    assert local_digest(folder) == ""


def chunk(text: str) -> str:
    body: dict[str, Any] = {"choices": [{"delta": {"content": text}}]}
    return "data: " + msgspec.json.encode(body).decode()


def test_a_stream_s_pieces_are_the_answer_s_text() -> None:
    assert "".join(text_pieces(iter([chunk("Hel"), "", ": comment", chunk("lo"), "data: [DONE]"]))) == "Hello"


def test_a_stream_that_ends_without_its_end_is_an_error_not_a_short_answer() -> None:
    with pytest.raises(ClientError, match="broke off"):
        list(text_pieces(iter([chunk("Hel")])))


def test_an_error_in_the_stream_is_told_in_its_own_words() -> None:
    with pytest.raises(ClientError, match="worker died"):
        list(text_pieces(iter([chunk("Hel"), 'data: {"error": {"message": "the worker died", "code": "worker_lost"}}'])))
