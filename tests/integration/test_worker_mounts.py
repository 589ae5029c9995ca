"""Loads, drains and reconciliation of a worker: real NATS, the scripted engine, a registry that keeps one entry."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.engine import LoadProof
from services.worker.scripted_engine import ScriptedEngine, ScriptedSettings
from shared.bus import Bus, publish_durable
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, inference
from shared.contracts.adapters import AdapterDrained, AdapterFailed, AdapterLoaded, DrainOrder, LoadAdapter, OnDeadline
from shared.contracts.errors import ErrorInfo
from shared.contracts.inference import FrameKind
from shared.errors import Conflict, StartFailed
from shared.policy.lifecycle import AdapterState
from tests.worker_peers import POOL, FakeRegistry, FakeRouter, WorkerHere, eventually, worker_here


@pytest.fixture
async def registry(bus: Bus, tmp_path: Path) -> FakeRegistry:
    registry = FakeRegistry(bus)
    registry.use_scratch(tmp_path / "registry")
    await registry.start()
    return registry


@pytest.fixture
async def router(bus: Bus) -> FakeRouter:
    router = FakeRouter(bus)
    await router.start()
    return router


@pytest.fixture
async def worker(nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path) -> AsyncIterator[WorkerHere]:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=100, slots=4)) as worker:
        yield worker


async def gone(registry: FakeRegistry, adapter_id: str) -> None:
    """Returns once the adapter has left the entry."""

    async def left() -> bool:
        return adapter_id not in (await registry.entry())[0].mounts

    while not await left():
        await eventually(lambda: True)


async def test_a_mount_is_loaded_proven_and_acknowledged_with_its_generation(worker: WorkerHere, registry: FakeRegistry) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    (ack,) = registry.acked(AdapterLoaded, "ad_one")
    entry, _ = await registry.entry()
    assert (ack.worker_id, ack.incarnation) == ("w1", entry.workers["w1"].incarnation)
    assert ack.generation > entry.mounts["ad_one"].ordered_after
    assert ack.modules_matched > 0
    assert ack.bytes_loaded == len(b"ad_one")
    assert await worker.engine.list_adapters() == {mount.adapter_id}


async def test_an_adapter_that_the_engine_keeps_in_host_memory_is_mounted_without_fetching_it(
    worker: WorkerHere, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, bool]] = []

    async def add_without_files(adapter_id: str, folder: Path, rank: int) -> LoadProof:
        given.append((folder.name, folder.exists()))
        worker.engine._adapters[adapter_id] = "kept"
        worker.engine._rank_classes[adapter_id] = rank
        return LoadProof(modules_matched=1, probe_difference=1.0, load_ms=1.0, bytes_loaded=1)

    monkeypatch.setattr(worker.engine, "is_staged", lambda folder: True)
    monkeypatch.setattr(worker.engine, "add_adapter", add_without_files)
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    assert given == [(mount.artifact_sha256, False)]


@pytest.mark.parametrize(
    ("files", "changes", "code"),
    [
        ({"adapter_model.safetensors": b"x", "refuse": b""}, {}, "load_failed"),
        ({"adapter_model.safetensors": b"x"}, {"rank": 64}, "load_failed"),
        ({"adapter_model.safetensors": b"x"}, {"artifact": "a/none"}, "not_found"),
        ({"adapter_model.safetensors": b"x"}, {"artifact_sha256": "0" * 64}, "object_corrupt"),
        ({"../evil": b"x"}, {}, "load_failed"),
    ],
)
async def test_a_load_that_fails_says_why_and_leaves_nothing(
    worker: WorkerHere, registry: FakeRegistry, tmp_path: Path, files: dict[str, bytes], changes: dict[str, Any], code: str
) -> None:
    good = await registry.mount("ad_good")
    await registry.ready("ad_good")
    mount = await registry.mount("ad_bad", files=files, worker_id="elsewhere")
    await registry.put(msgspec.structs.replace(mount, worker_id="w1", **changes))
    (ack,) = await eventually(lambda: registry.acked(AdapterFailed, "ad_bad"))
    assert ack.error.code == code
    await gone(registry, "ad_bad")
    assert await worker.engine.list_adapters() == {"ad_good"}
    assert [path.name for path in (tmp_path / "w1" / "adapters").iterdir()] == [good.artifact_sha256]


async def test_reports_go_on_while_the_engine_does_not_say_what_memory_it_uses(
    nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ScriptedEngine, "memory", never)
    async with worker_here(nats_server, tmp_path / "w2", engine=ScriptedSettings(slots=4)):
        await eventually(lambda: bool(registry.reports))
        first = registry.reports["w1"]
        await eventually(lambda: registry.reports["w1"] is not first)


async def test_a_drain_lets_running_streams_end_and_reports_after_the_last(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry, tmp_path: Path
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    keys = [await router.ask(worker.handle(mount), prompt=f"q{n}", tokens=60) for n in range(20)]
    await eventually(lambda: all(len(router.answers[key].frames) > 3 for key in keys))
    await registry.drain(mount)
    await eventually(lambda: worker.worker.service.served_adapters == frozenset())
    assert not registry.acked(AdapterDrained, "ad_one")
    for key in keys:
        answer = await router.answer(key)
        assert answer.error == ""
        assert answer.body.endswith(b"[DONE]\n\n")
    (ack,) = await eventually(lambda: registry.acked(AdapterDrained, "ad_one"))
    assert (ack.completed, ack.aborted) == (20, 0)
    assert ack.slot_bytes_returned > 0
    assert ack.host_bytes_freed == len(b"ad_one")
    assert await worker.engine.list_adapters() == frozenset()
    assert list((tmp_path / "w1" / "adapters").iterdir()) == []


async def test_requests_in_the_instant_of_a_drain_are_answered_or_bounced_and_never_empty(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    handle = worker.handle(mount)
    keys = [await router.ask(handle, prompt=f"before {n}", tokens=3) for n in range(50)]
    await registry.drain(mount)
    heard: list[str] = []
    await router.bus.subscribe("test.reply", lambda message: heard.append(message.status))
    while "503" not in heard:  # until the interest is gone
        keys.append(await router.ask(handle, prompt="during", tokens=3))
        await router.bus.publish(inference.infer_subject("ad_one", "w1"), b"", reply="test.reply")
        await router.bus.flush()
    ended = [key for key in keys if router.answers[key].frames]
    for key in ended:
        answer = await router.answer(key)
        assert answer.error in ("", "draining")
        assert (answer.kinds == [FrameKind.BOUNCED]) if answer.error else answer.body.endswith(b"[DONE]\n\n")
    assert len(keys) - len(ended) <= 1, "only what met no responder may stay unanswered"


async def test_a_drains_deadline_ends_what_still_runs_with_an_error(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    key = await router.ask(worker.handle(mount), prompt="[[hang]]", tokens=8)
    cancelled = await router.ask(worker.handle(mount), prompt="[[hang]]", tokens=8)
    await eventually(lambda: worker.governor.in_flight("ad_one") == 2)
    await registry.drain(mount, DrainOrder(deadline_s=0.5))
    await router.cancel(cancelled)
    assert (await router.answer(key)).error == "adapter_draining"
    (ack,) = await eventually(lambda: registry.acked(AdapterDrained, "ad_one"))
    assert (ack.completed, ack.aborted) == (1, 1)


async def test_a_drain_that_may_wait_waits_until_it_is_told_otherwise(
    worker: WorkerHere, router: FakeRouter, registry: FakeRegistry
) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    key = await router.ask(worker.handle(mount), prompt="[[hang]]")
    await eventually(lambda: worker.governor.in_flight("ad_one"))
    draining = await registry.drain(mount, DrainOrder(deadline_s=0.1, on_deadline=OnDeadline.WAIT))
    await eventually(lambda: worker.worker.service.served_adapters == frozenset())
    await eventually(lambda: router.answers[key].progress >= 1)
    assert router.answers[key].last is None

    def shortened(entry: adapters.PoolEntry, _: int) -> adapters.PoolEntry:
        order = DrainOrder(deadline_s=0.1, on_deadline=OnDeadline.ABORT)
        return msgspec.structs.replace(
            entry, mounts={**entry.mounts, "ad_one": msgspec.structs.replace(entry.mounts["ad_one"], drain=order)}
        )

    await registry.command(draining, await registry.change(shortened))
    assert (await router.answer(key)).error == "adapter_draining"


async def test_a_long_drain_holds_up_no_load(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    key = await router.ask(worker.handle(mount), prompt="[[hang]]")
    await eventually(lambda: worker.governor.in_flight("ad_one"))
    await registry.drain(mount)
    await registry.mount("ad_two")
    await registry.ready("ad_two")
    assert not registry.acked(AdapterDrained, "ad_one")
    await router.cancel(key)
    await eventually(lambda: registry.acked(AdapterDrained, "ad_one"))


async def test_a_hot_load_interrupts_no_stream(worker: WorkerHere, router: FakeRouter, registry: FakeRegistry) -> None:
    keys = [await router.ask(worker.handle(), prompt=f"q{n}", tokens=40) for n in range(20)]
    await eventually(lambda: all(len(router.answers[key].frames) > 3 for key in keys))
    await registry.mount("ad_one")
    await registry.ready("ad_one")
    for key in keys:
        assert (await router.answer(key)).error == ""


async def test_commands_redelivered_after_a_later_one_change_nothing(worker: WorkerHere, registry: FakeRegistry, bus: Bus) -> None:
    mount = await registry.mount("ad_one")
    await registry.ready("ad_one")
    _, old_generation = await registry.entry()
    await registry.drain(mount)
    await gone(registry, "ad_one")
    loads = len(registry.acked(AdapterLoaded, "ad_one"))
    for generation in (1, old_generation):
        order = LoadAdapter(pool_id=POOL, adapter_id="ad_one", generation=generation)
        await publish_durable(bus, adapters.load_subject("w1"), adapters.encode(order))
    await registry.mount("ad_two")  # its command comes after theirs
    await registry.ready("ad_two")
    assert await worker.engine.list_adapters() == {"ad_two"}
    assert len(registry.acked(AdapterLoaded, "ad_one")) == loads


async def test_commands_redelivered_after_a_restart_change_nothing(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1") as first:
        kept, dropped = await registry.mount("ad_kept"), await registry.mount("ad_dropped")
        await registry.ready("ad_kept", "ad_dropped")
        await registry.drain(dropped)
        await gone(registry, "ad_dropped")
        assert await first.engine.list_adapters() == {"ad_kept"}
    for generation in (1, 2, 3):
        for adapter_id in ("ad_dropped", "ad_kept"):
            order = LoadAdapter(pool_id=POOL, adapter_id=adapter_id, generation=generation)
            await publish_durable(registry.bus, adapters.load_subject("w1"), adapters.encode(order))
    async with worker_here(nats_server, tmp_path / "w1") as second:
        await registry.ready("ad_kept")
        await registry.mount("ad_later")
        await registry.ready("ad_later")
        assert await second.engine.list_adapters() == {"ad_kept", "ad_later"}
        assert (await router.asked(second.handle(kept))).error == ""


async def test_a_drain_ordered_while_the_worker_was_away_is_acknowledged_by_the_next_one(
    nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1"):
        mount = await registry.mount("ad_one")
        await registry.ready("ad_one")
    await registry.put(msgspec.structs.replace(mount, state=AdapterState.DRAINING, drain=DrainOrder()))
    async with worker_here(nats_server, tmp_path / "w1") as second:
        await gone(registry, "ad_one")
        assert await second.engine.list_adapters() == frozenset()
    assert registry.acked(AdapterDrained, "ad_one")[-1].incarnation == registry.hellos[-1].incarnation


async def test_an_adapter_that_waits_for_room_is_not_loaded(worker: WorkerHere, registry: FakeRegistry) -> None:
    waiting = await registry.mount("ad_waits", worker_id="elsewhere")
    await registry.put(msgspec.structs.replace(waiting, worker_id="w1", state=AdapterState.ADMITTED, waits_for="ad_one"))
    await registry.mount("ad_one")
    await registry.ready("ad_one")
    assert await worker.engine.list_adapters() == {"ad_one"}


async def test_an_adapter_that_the_engine_lost_is_not_served_until_it_is_loaded_again(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1") as worker:
        mount = await registry.mount("ad_one")
        await registry.ready("ad_one")
        before = (await router.asked(worker.handle(mount), prompt="q")).text
        worker.engine.lose("ad_one")
        await registry.mount("ad_two")  # wakes the reconciliation
        await registry.ready("ad_two")
        await eventually(lambda: worker.worker.service.served_adapters == {"ad_one", "ad_two"})
        assert await worker.engine.list_adapters() == {"ad_one", "ad_two"}
        assert (await router.asked(worker.handle(mount), prompt="q")).text == before


async def test_an_adapter_that_nobody_ordered_is_removed(worker: WorkerHere, registry: FakeRegistry, tmp_path: Path) -> None:
    folder = tmp_path / "stray"
    folder.mkdir()
    await worker.engine.add_adapter("ad_stray", folder, 8)
    await registry.mount("ad_one")
    await registry.ready("ad_one")
    await eventually(lambda: worker.engine.holds("ad_stray") is False)


async def test_a_worker_that_the_registry_refuses_does_not_start(nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path) -> None:
    registry.refuse = ErrorInfo(code="base_mismatch", message="pool main serves another base")
    with pytest.raises(ExceptionGroup) as caught:
        async with worker_here(nats_server, tmp_path / "w1"):
            pass
    assert caught.group_contains(StartFailed, match="another base")


async def test_a_worker_whose_id_was_taken_over_stops(nats_server: EmbeddedNats, registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with worker_here(nats_server, tmp_path / "w1"), worker_here(nats_server, tmp_path / "w1-again"):
            await eventually(lambda: False, timeout_s=10)
    assert caught.group_contains(Conflict, match="taken over")


async def test_a_stopping_worker_bounces_what_comes_finishes_what_runs_and_aborts_the_rest(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    async with worker_here(nats_server, tmp_path / "w1", engine=ScriptedSettings(tokens_per_s=50), grace_s=3.0) as worker:
        short = await router.ask(worker.handle(), tokens=40)
        endless = await router.ask(worker.handle(), prompt="[[hang]]")
        await eventually(lambda: worker.governor.in_flight() == 2)
        worker.stop.set("test")
        await eventually(lambda: worker.worker.service.stopping)
        late = await router.ask(worker.handle())
        await eventually(lambda: worker.governor.in_flight() == 0)
    assert (await router.answer(short)).error == ""
    assert (await router.answer(endless)).error == "worker_lost"
    assert router.answers[late].error in ("", "stopping", "draining")
    assert not router.answers[late].body


async def test_a_dead_engine_ends_running_requests_with_an_error_and_the_worker(
    nats_server: EmbeddedNats, registry: FakeRegistry, router: FakeRouter, tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with worker_here(nats_server, tmp_path / "w1") as worker:
            key = await router.ask(worker.handle(), prompt="[[hang]]")
            await eventually(lambda: worker.governor.in_flight())
            worker.engine.die("its process ended")
            await eventually(lambda: False, timeout_s=10)
    assert (await router.answer(key)).error == "engine_error"
    assert "its process ended" in repr(caught.value.exceptions)
