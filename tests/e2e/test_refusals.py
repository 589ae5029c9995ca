"""What must not be mounted is refused with a reason that names the figure or field; nothing stays reserved, nobody notices."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.client import ClientError
from shared.artifacts.base_model import describe_base
from shared.contracts.base import BaseDescription
from tests.adapters_factory import BAD_KINDS, make_adapter
from tests.e2e.ask import Asker, ask
from tests.e2e.stack import DEMO, Stack, wait_for

MB = 1024 * 1024


@pytest.fixture(scope="module")
def base() -> BaseDescription:
    return describe_base(DEMO / "base", label="tenantry/qwen3-moe-demo", dtype="float32", cache=None)


@pytest.fixture(autouse=True)
async def nothing_changed(stack: Stack, asker: Asker) -> Iterator[None]:
    """Held bytes and mounts are as before, and the tenants' adapters still answer."""
    before = state(stack)
    yield
    assert state(stack) == before
    pair = asker.goldens["lora_sales"][0]
    async with asker.clients() as clients:
        answer = await ask(clients["sales"], "lora_sales", pair["question"], stream=False)
    assert answer.text == pair["answer"]


def state(stack: Stack) -> object:
    held = {tenant.name: tenant.vram_held_bytes for tenant in stack.admin.tenants()}
    mounted = sorted((view.tenant, view.name, view.version, view.state) for view in stack.admin.adapters())
    return held, mounted


@pytest.mark.parametrize("kind", [kind for kind in BAD_KINDS if kind != "symlink in a folder"])  # the client packs what the links point to
def test_a_bad_artifact_is_refused_by_reason(stack: Stack, base: BaseDescription, tmp_path: Path, kind: str) -> None:
    bad = BAD_KINDS[kind]
    path = bad.make(base, tmp_path / "bad")
    with pytest.raises(ClientError) as refused:
        stack.admin.upload("sales", "bad", path, base=base_identity(stack))
    assert refused.value.fields.get("reason") == bad.reason.value, refused.value
    assert 400 <= refused.value.status < 500
    assert len(refused.value.message) > 20


def base_identity(stack: Stack) -> str:
    return stack.base_identity()


def test_the_adapter_made_for_another_revision_of_the_base_is_refused(stack: Stack) -> None:
    with pytest.raises(ClientError) as unknown:
        stack.admin.upload("sales", "v0", DEMO / "other" / "lora_sales_v0")
    assert unknown.value.peer_code == "base_unknown"
    assert "tenantry/qwen3-moe-demo@v0" in unknown.value.message
    assert "matrix alias" in unknown.value.message
    stack.admin.set_label("tenantry/qwen3-moe-demo@v0", "qwen3-moe-demo@" + "0" * 64)
    try:
        with pytest.raises(ClientError) as mismatch:
            stack.admin.upload("sales", "v0", DEMO / "other" / "lora_sales_v0")
    finally:
        stack.admin.remove_label("tenantry/qwen3-moe-demo@v0")
    assert mismatch.value.peer_code == "base_mismatch"
    assert base_identity(stack) in json.dumps([mismatch.value.message, mismatch.value.fields])


def test_an_unknown_base_label_is_refused_with_the_command_that_would_allow_it(stack: Stack, base: BaseDescription, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a", base, base_model_name_or_path="someone/other-model")
    with pytest.raises(ClientError) as refused:
        stack.admin.upload("sales", "other", folder)
    assert refused.value.peer_code == "base_unknown"
    assert "someone/other-model" in refused.value.message


def test_over_the_tenants_quota_says_asked_held_and_allowed(stack: Stack, base: BaseDescription, tmp_path: Path) -> None:
    stack.add_tenant("poor", quota_mb=0)
    with pytest.raises(ClientError) as refused:
        stack.admin.upload("poor", "one", make_adapter(tmp_path / "a", base, revision="v1"), base=base_identity(stack))
    stack.admin.delete_tenant("poor")
    del stack.keys["poor"]
    assert refused.value.peer_code == "quota_exceeded"
    figures = refused.value.fields
    assert figures["asked_bytes"] > 0
    assert (figures["held_bytes"], figures["limit_bytes"]) == (0, 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one", "use_beam_search": True, "n": 3, "max_tokens": 33, "temperature": 0}),
        ("/v1/completions", {"prompt": ["one", "two"], "use_beam_search": True, "n": 2, "max_tokens": 33, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 3, "max_tokens": 33}),
    ],
)
def test_a_beam_search_over_the_kv_quota_is_a_429_of_its_own_and_one_within_it_is_answered(
    stack: Stack, path: str, body: dict[str, Any]
) -> None:
    headers = {"authorization": f"Bearer {stack.keys['sales']}"}
    body = {"model": "lora_sales", **body}

    def asked() -> httpx.Response:
        return httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=120, trust_env=False)

    stack.admin.update_tenant("sales", limits={"kv_quota_bytes": 1})
    try:
        wait_for(lambda: asked().status_code == 429, 20, "a worker that knows the quota")
        refused = asked()
    finally:
        stack.admin.update_tenant("sales", limits={"kv_quota_bytes": None})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], refused.headers["content-type"]) == (429, "kv_quota_exceeded", "application/json")
    assert error["asked_bytes"] > 3 * error["limit_bytes"]
    wait_for(lambda: asked().status_code == 200, 20, "a worker that knows that it is gone")
    assert asked().headers["x-tenantry-queue-ms"] == "0"


def test_an_upgrade_without_headroom_is_refused_and_offers_drain_first(stack: Stack) -> None:
    held = next(tenant.vram_held_bytes for tenant in stack.admin.tenants() if tenant.name == "sales")
    quota = next(tenant.vram_quota_bytes for tenant in stack.admin.tenants() if tenant.name == "sales")
    stack.admin.update_tenant("sales", vram_quota_bytes=held)
    try:
        with pytest.raises(ClientError) as refused:
            stack.admin.upload("sales", "lora_sales", DEMO / "adapters" / "lora_cs")
    finally:
        stack.admin.update_tenant("sales", vram_quota_bytes=quota)
    assert refused.value.peer_code == "quota_exceeded"
    assert "drain" in refused.value.message
    assert refused.value.fields["held_bytes"] == held


def test_no_free_slot_says_how_many_there_are(stack: Stack, base: BaseDescription, tmp_path: Path) -> None:
    mounted: list[str] = []
    try:
        with pytest.raises(ClientError) as refused:
            for number in range(10):
                folder = make_adapter(tmp_path / str(number), base, seed=number, rank=1, leaves=("q_proj",))
                stack.admin.upload("sales", f"filler{number}", folder, base=base_identity(stack))
                mounted.append(f"filler{number}")
    finally:
        for name in mounted:
            stack.admin.unload(name, "sales", wait=True)
    assert refused.value.peer_code == "no_free_slot"
    assert refused.value.fields["limit_slots"] == 6
    assert len(mounted) == 3


@pytest.mark.parametrize("name", ["UPPER", "with space", "a/b", "..", "-x", "é", "x" * 80, "a.b"])
def test_strange_names_are_refused(stack: Stack, name: str) -> None:
    with pytest.raises(ClientError) as refused:
        stack.admin.upload("sales", name, DEMO / "adapters" / "lora_sales")
    assert 400 <= refused.value.status < 500


def test_the_same_digest_twice_is_one_adapter(stack: Stack) -> None:
    before = stack.admin.show("lora_sales", "sales")
    again = stack.admin.upload("sales", "lora_sales", DEMO / "adapters" / "lora_sales")
    assert (again.adapter_id, again.version, again.state) == (before.adapter_id, before.version, "ready")


def test_an_upload_cut_off_in_the_middle_leaves_nothing(stack: Stack) -> None:
    def half() -> Iterator[bytes]:
        yield b"\x1f\x8b" + bytes(100_000)
        raise OSError("the client's cable was pulled")

    with pytest.raises((OSError, httpx.HTTPError)):
        httpx.post(f"{stack.url}/admin/v1/adapters/sales/cut", content=half(), headers=stack.admin_headers, timeout=30, trust_env=False)
    assert all(view.name != "cut" for view in stack.admin.adapters(all_versions=True))
