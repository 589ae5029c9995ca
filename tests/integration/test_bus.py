"""The bus against a real nats-server: compare-and-set, mirrors through crashes, durable commands, objects by digest."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.bus import (
    Bus,
    BusSettings,
    BusUnavailable,
    Consumer,
    Entry,
    Message,
    Mirror,
    NoResponder,
    ObjectCorrupt,
    RequestTimeout,
    connect,
    ensure_stream,
    open_bucket,
    open_objects,
    publish_durable,
    read_last,
)
from shared.bus.embedded import EmbeddedNats
from shared.errors import Conflict, NotFound
from tests.waiting import until, until_async

Change = tuple[str, bytes | None]


def recorder(changes: list[Change]) -> Callable[[str, Entry | None], None]:
    def record(key: str, entry: Entry | None) -> None:
        changes.append((key, entry.value if entry else None))

    return record


async def test_compare_and_set_refuses_a_writer_that_read_an_older_revision(bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    first = await bucket.create("pool.a", b"1")
    second = await bucket.update("pool.a", b"2", first)
    with pytest.raises(Conflict):
        await bucket.update("pool.a", b"lost", first)
    with pytest.raises(Conflict):
        await bucket.create("pool.a", b"again")
    with pytest.raises(Conflict):
        await bucket.delete("pool.a", revision=first)
    assert await bucket.get("pool.a") == Entry(b"2", second)
    await bucket.delete("pool.a", revision=second)
    assert await bucket.get("pool.a") is None
    assert await bucket.create("pool.a", b"3") > second


async def test_a_bucket_lists_its_live_keys_by_prefix(bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    assert await bucket.keys() == []
    for key in ("tenant.b", "tenant.a", "key.x"):
        await bucket.put(key, b"1")
    await bucket.delete("tenant.b")
    assert await bucket.keys("tenant.") == ["tenant.a"]


async def test_listing_a_bucket_again_and_again_is_always_whole_and_leaves_no_consumers(bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    for number in range(5):
        await bucket.put(f"pool.{number}", b"1")
    for _ in range(200):
        assert len(await bucket.keys("pool.")) == 5
    await until_async(lambda: _no_consumers(bus), 10)


async def _no_consumers(bus: Bus) -> bool:
    return not await bus.js.consumers_info("KV_state")


async def test_a_mirror_never_forgets_what_stands_while_it_is_made_anew(bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    for number in range(20):
        await bucket.put(f"key.{number}", b"1")
    changes: list[Change] = []
    mirror = Mirror(bus, bucket, recorder(changes))
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(mirror.run())
        await asyncio.wait_for(mirror.synced.wait(), 5)
        assert len(mirror.entries) == 20
        for turn in range(50):
            mirror.rebuild()
            await until(lambda turn=turn: mirror.rebuilds > turn)
        watching.cancel()
    assert [change for change in changes if change[1] is None] == []


async def test_a_bucket_that_nobody_made_is_an_error_that_names_it(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="nowhere"):
        await open_bucket(bus, "nowhere")


async def test_a_mirror_shows_what_changed_while_the_server_was_down(nats_server: EmbeddedNats, bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    await bucket.put("gone", b"1")
    await bucket.put("kept", b"1")
    changes: list[Change] = []
    mirror = Mirror(bus, bucket, recorder(changes))
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(mirror.run())
        await asyncio.wait_for(mirror.synced.wait(), 5)
        await nats_server.kill()
        await until(lambda: not bus.connected)
        await nats_server.start()
        # another client deletes and adds before our watch is back
        other = await connect(BusSettings(url=nats_server.url, name="other"))
        theirs = await open_bucket(other, "state")
        await theirs.delete("gone")
        await theirs.put("new", b"2")
        await until(lambda: set(mirror.entries) == {"kept", "new"})
        await theirs.put("kept", b"9")
        await until(lambda: mirror.entries["kept"].value == b"9")
        await other.close()
        watching.cancel()
    assert ("gone", None) in changes
    assert mirror.rebuilds >= 1


async def test_a_mirror_whose_consumer_was_lost_catches_up_after_rebuild(bus: Bus) -> None:
    bucket = await open_bucket(bus, "state", create=True)
    await bucket.put("a", b"1")
    mirror = Mirror(bus, bucket, recorder([]))
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(mirror.run())
        await asyncio.wait_for(mirror.synced.wait(), 5)
        for consumer in await bus.js.consumers_info("KV_state"):
            await bus.js.delete_consumer("KV_state", consumer.name)
        await bucket.put("a", b"2")
        mirror.rebuild()
        await until(lambda: mirror.entries["a"].value == b"2")
        watching.cancel()


async def test_a_command_is_delivered_again_until_it_is_acknowledged(bus: Bus) -> None:
    await ensure_stream(bus, "COMMANDS", ("cmd.*",))
    await publish_durable(bus, "cmd.w1", b"load")
    await publish_durable(bus, "cmd.w2", b"not ours")
    consumer = Consumer(bus, "COMMANDS", "w1", ("cmd.w1",), ack_wait_s=0.5)
    deliveries: list[int] = []
    async for delivery in consumer.messages():
        assert delivery.data == b"load"
        deliveries.append(delivery.deliveries)
        if len(deliveries) == 2:
            await delivery.ack()
            break
    assert deliveries == [1, 2]
    await publish_durable(bus, "cmd.w1", b"drain")
    async for delivery in Consumer(bus, "COMMANDS", "w1", ("cmd.w1",), ack_wait_s=0.5).messages():
        assert delivery.data == b"drain"
        await delivery.ack()
        break


async def test_a_message_with_a_known_id_is_stored_once(bus: Bus) -> None:
    await ensure_stream(bus, "EVENTS", ("event.*",))
    for _ in range(3):
        await publish_durable(bus, "event.t", b"once", message_id="m1")
    await publish_durable(bus, "event.t", b"twice", message_id="m2")
    assert await read_last(bus, "EVENTS", "event.*", 10) == [b"once", b"twice"]
    assert await read_last(bus, "EVENTS", "event.*", 1) == [b"twice"]


async def test_streams_and_objects_survive_kill_9_of_the_server(nats_server: EmbeddedNats, bus: Bus, tmp_path: Path) -> None:
    await ensure_stream(bus, "EVENTS", ("event.*",))
    await publish_durable(bus, "event.t", b"kept")
    objects = await open_objects(bus, "artifacts", create=True)
    source = tmp_path / "weights"
    source.write_bytes(bytes(range(256)) * 8192)
    await objects.put_file("t1.ad_1", source)
    await nats_server.kill()
    await nats_server.start()
    await until(lambda: bus.connected)
    assert await read_last(bus, "EVENTS", "event.*", 10) == [b"kept"]
    target = tmp_path / "fetched"
    assert await objects.get_file("t1.ad_1", target) == source.stat().st_size
    assert target.read_bytes() == source.read_bytes()


async def test_an_object_with_other_bytes_than_expected_is_refused(bus: Bus, tmp_path: Path) -> None:
    objects = await open_objects(bus, "artifacts", create=True)
    source = tmp_path / "weights"
    source.write_bytes(b"other bytes")
    await objects.put_file("a", source)
    with pytest.raises(ObjectCorrupt) as refused:
        await objects.get_file("a", tmp_path / "out", sha256="0" * 64)
    assert refused.value.fields["expected"] == "0" * 64
    with pytest.raises(ObjectCorrupt) as too_large:
        await objects.get_file("a", tmp_path / "out", limit_bytes=3)
    assert too_large.value.fields["limit_bytes"] == 3
    await objects.delete("a")
    await objects.delete("a")
    with pytest.raises(NotFound):
        await objects.get_file("a", tmp_path / "out")


async def test_a_publish_that_nobody_hears_is_reported_on_its_reply_subject(bus: Bus) -> None:
    heard: list[Message] = []
    await bus.subscribe("answer.r1.*", heard.append)
    await bus.publish("infer.nobody", b"x", reply="answer.r1.42")
    await until(lambda: bool(heard))
    assert (heard[0].subject, heard[0].status) == ("answer.r1.42", "503")


async def test_a_request_says_at_once_that_nobody_listens_and_times_out_when_the_peer_is_silent(bus: Bus) -> None:
    with pytest.raises(NoResponder):
        await bus.request("ping.nobody", b"", timeout_s=30)
    await bus.subscribe("ping.silent", lambda _: None)
    with pytest.raises(RequestTimeout):
        await bus.request("ping.silent", b"", timeout_s=0.1)


async def test_draining_handles_what_was_delivered_and_takes_no_more(bus: Bus) -> None:
    handled: list[bytes] = []
    release = asyncio.Event()

    async def slow(message: Message) -> None:
        await release.wait()
        handled.append(message.data)

    subscription = await bus.subscribe("infer.a", slow)
    for number in range(3):
        await bus.publish("infer.a", str(number).encode())
    await bus.flush()
    async with asyncio.TaskGroup() as group:
        draining = group.create_task(subscription.drain())
        await until(lambda: not draining.done())
        release.set()
    with pytest.raises(NoResponder):
        await bus.request("infer.a", b"late", timeout_s=5)
    assert handled == [b"0", b"1", b"2"]


async def test_connecting_to_nothing_is_one_clear_error() -> None:
    with pytest.raises(BusUnavailable, match=r"cannot connect to NATS at nats://127\.0\.0\.1:1"):
        await asyncio.wait_for(connect(BusSettings(url="nats://127.0.0.1:1", name="x")), 20)
