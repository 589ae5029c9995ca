"""Who may do what on the bus, with the configuration that `tenantry up` writes and a real server.

Services: each does its own work as its own user, and no operation of it meets a refusal. Tenants: what is not theirs is out of
reach, also by the ways that subject permissions alone leave open.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import bcrypt
import nats
import nats.errors
import pytest
from nats.aio.client import Client

from services.cli.nats_users import service_users, tenant_users
from shared.bus import (
    INCREMENT_HEADER,
    Bucket,
    Bus,
    BusSettings,
    BusUnavailable,
    Consumer,
    Message,
    Mirror,
    connect,
    counted,
    decode_moved,
    ensure_counters,
    ensure_stream,
    open_bucket,
    open_objects,
    publish_durable,
    read_last,
    read_page,
)
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, admin, audit, canary, inference, rates, state, tenancy, usage, workers
from tests.waiting import until

PASSWORDS = {name: f"{name}-secret" for name in ("router", "registry", "worker", "supervisor")}
SALES, CS = "t_sales", "t_cs"

Refusals = list[str]


class Rig:
    """A server as in use, and connections of which every refusal is kept."""

    def __init__(self, server: EmbeddedNats) -> None:
        self.server = server
        self.refusals: dict[str, Refusals] = {}
        self._open: list[Bus] = []
        self._raw: list[Client] = []

    async def service(self, name: str) -> Bus:
        bus = await connect(BusSettings(url=self.server.url, name=name, user=name, password=PASSWORDS[name]))
        refused = self.refusals.setdefault(name, [])

        async def note(error: Exception) -> None:
            refused.append(str(error))

        bus._client._error_cb = note
        self._open.append(bus)
        return bus

    async def tenant(self, tenant_id: str) -> Client:
        refused = self.refusals.setdefault(tenant_id, [])

        async def note(error: Exception) -> None:
            refused.append(str(error))

        client = await nats.connect(
            self.server.url, user=tenant_id, password=f"{tenant_id}-secret", inbox_prefix=f"_INBOX_{tenant_id}".encode(), error_cb=note
        )
        self._raw.append(client)
        return client

    async def close(self) -> None:
        for client in self._raw:
            await client.close()
        for bus in self._open:
            await bus.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    tenants = [
        state.Tenant(
            tenant_id=tenant_id,
            name=tenant_id[2:],
            nats_password_bcrypt=bcrypt.hashpw(f"{tenant_id}-secret".encode(), bcrypt.gensalt(4)).decode(),
        )
        for tenant_id in (SALES, CS)
    ]
    server = EmbeddedNats(tmp_path / "nats", users=service_users(PASSWORDS) + tenant_users(tenants))
    await server.start()
    made = Rig(server)
    registry = await made.service("registry")
    for bucket in (state.STATE_BUCKET, state.CATALOG_BUCKET):
        await open_bucket(registry, bucket, create=True)
    for store in (adapters.STAGING_BUCKET, adapters.ARTIFACTS_BUCKET, adapters.uploads_bucket(SALES), adapters.uploads_bucket(CS)):
        await open_objects(registry, store, create=True)
    await ensure_stream(registry, adapters.COMMANDS_STREAM, adapters.COMMANDS_SUBJECTS)
    await ensure_stream(registry, adapters.ACKS_STREAM, adapters.ACKS_SUBJECTS)
    await ensure_stream(registry, adapters.EVENTS_STREAM, adapters.EVENTS_SUBJECTS)
    await ensure_stream(registry, adapters.ONBOARD_STREAM, adapters.ONBOARD_SUBJECTS)
    await ensure_stream(registry, usage.USAGE_STREAM, usage.USAGE_SUBJECTS)
    await ensure_stream(registry, audit.AUDIT_STREAM, audit.AUDIT_SUBJECTS, append_only=True)
    await ensure_counters(registry, rates.RATES_STREAM, rates.RATES_SUBJECTS, rates.KEPT_S)
    yield made
    await made.close()
    await server.stop()


async def mirrored(bus: Bus, bucket: Bucket, key: str, write: Callable[[], Awaitable[object]], keys: str = ">") -> None:
    """A mirror of this bus sees what `write` puts under `key`."""
    mirror = Mirror(bus, bucket, lambda _key, _entry: None, keys)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(mirror.run())
        await asyncio.wait_for(mirror.synced.wait(), 5)
        await write()
        await until(lambda: key in mirror.entries, what=f"{key} seen")
        running.cancel()


async def heard(bus: Bus, subject: str, publish: Callable[[], Awaitable[object]]) -> Message:
    messages: list[Message] = []
    subscription = await bus.subscribe(subject, messages.append)
    await bus.flush()
    await publish()
    await until(lambda: bool(messages), what=f"{subject} heard")
    await subscription.drain()
    return messages[0]


async def answering(bus: Bus, subject: str) -> None:
    async def answer(message: Message) -> None:
        await bus.publish(message.reply, b"answer")

    await bus.subscribe(subject, answer)
    await bus.flush()


async def refused(rig: Rig, client: Client, who: str, attempt: Callable[[], Awaitable[object]]) -> None:
    """The server says so to the client; nothing else shows it."""
    before = len(rig.refusals[who])
    await attempt()
    await client.flush()
    await until(lambda: len(rig.refusals[who]) > before, what="a refusal")
    assert "permissions violation" in rig.refusals[who][-1].lower()


async def test_a_router_does_its_work_without_a_refusal(rig: Rig, tmp_path: Path) -> None:
    registry, worker, router = await rig.service("registry"), await rig.service("worker"), await rig.service("router")
    registry_state, router_state = await open_bucket(registry, state.STATE_BUCKET), await open_bucket(router, state.STATE_BUCKET)
    await mirrored(router, router_state, "hb", lambda: registry_state.put("hb", b"1"))
    assert await router_state.get("hb") is not None
    assert await router_state.get("nothing") is None
    await answering(registry, admin.ADMIN_SUBJECT)
    assert await router.request(admin.ADMIN_SUBJECT, b"?", 2) == b"answer"
    await answering(worker, inference.worker_ping_subject("w1"))
    assert await router.request(inference.worker_ping_subject("w1"), b"?", 2) == b"answer"
    upload = tmp_path / "upload"
    upload.write_bytes(b"x" * 2_000_000)
    staging = await open_objects(router, adapters.STAGING_BUCKET)
    await staging.put_file("one", upload)
    assert await (await open_objects(registry, adapters.STAGING_BUCKET)).get_file("one", tmp_path / "taken") == 2_000_000
    await staging.delete("one")
    await heard(worker, inference.infer_subject("ad_1", "w1"), lambda: router.publish(inference.infer_subject("ad_1", "w1"), b"ask"))
    await heard(worker, inference.control_subject("w1"), lambda: router.publish(inference.control_subject("w1"), b"cancel"))
    await heard(router, inference.answer_subject("r1"), lambda: worker.publish(inference.answer_subject("r1"), b"frame"))
    await heard(router, workers.report_subject("w1"), lambda: worker.publish(workers.report_subject("w1"), b"report"))
    await publish_durable(router, usage.router_usage_subject("r1"), b"outcome")
    counter = rates.rate_subject(SALES, rates.REQUESTS, 7)
    own = f"{inference.answer_subject('r1')}.rate.1"
    moved = await heard(router, own, lambda: router.publish(counter, b"", own, {INCREMENT_HEADER: "+3"}))
    assert decode_moved(moved.data).val == "3"
    assert await counted(registry, rates.RATES_STREAM, counter) == 3
    assert rig.refusals == {"registry": [], "worker": [], "router": []}


async def test_a_router_cannot_write_the_state_or_command_workers(rig: Rig) -> None:
    router = await rig.service("router")
    for subject in (
        "$KV.tenantry_state.hb",
        adapters.load_subject("w1"),
        adapters.ack_subject("loaded", "w1"),
        "$O.tenantry_artifacts.M.x",
        f"$KV.tenantry_state.{tenancy.shares_key('main', SALES)}",
        audit.audit_subject(SALES),
        f"$JS.API.STREAM.PURGE.{rates.RATES_STREAM}",
        f"$JS.API.STREAM.UPDATE.{rates.RATES_STREAM}",
        f"$JS.API.STREAM.DELETE.{rates.RATES_STREAM}",
        f"$JS.API.STREAM.MSG.DELETE.{rates.RATES_STREAM}",
    ):
        await refused(rig, router._client, "router", lambda subject=subject: router.publish(subject, b"x"))


async def test_a_worker_does_its_work_without_a_refusal(rig: Rig, tmp_path: Path) -> None:
    registry, router, worker = await rig.service("registry"), await rig.service("router"), await rig.service("worker")
    registry_state, worker_state = await open_bucket(registry, state.STATE_BUCKET), await open_bucket(worker, state.STATE_BUCKET)
    await mirrored(worker, worker_state, "pool.main", lambda: registry_state.put("pool.main", b"1"), keys="pool.main")
    await answering(registry, workers.HELLO_SUBJECT)
    assert await worker.request(workers.HELLO_SUBJECT, b"hello", 2) == b"answer"
    artifact = tmp_path / "artifact"
    artifact.write_bytes(b"y" * 3_000_000)
    await (await open_objects(registry, adapters.ARTIFACTS_BUCKET)).put_file("a", artifact)
    assert await (await open_objects(worker, adapters.ARTIFACTS_BUCKET)).get_file("a", tmp_path / "fetched") == 3_000_000
    await publish_durable(registry, adapters.load_subject("w1"), b"command")
    subjects = (adapters.load_subject("w1"), adapters.drain_subject("w1"))
    consumer = Consumer(worker, adapters.COMMANDS_STREAM, "worker-w1", subjects)
    async for delivery in consumer.messages():
        await delivery.working()
        await delivery.ack()
        break
    for kind in ("loaded", "drained", "failed"):
        await publish_durable(worker, adapters.ack_subject(kind, "w1"), b"ack")
    await publish_durable(worker, usage.worker_usage_subject("w1"), b"usage")
    await answering(router, inference.router_ping_subject("r1"))
    assert await worker.request(inference.router_ping_subject("r1"), b"?", 2) == b"answer"
    assert rig.refusals == {"registry": [], "router": [], "worker": []}


async def test_a_worker_cannot_write_state_or_artifacts_or_manage(rig: Rig) -> None:
    worker = await rig.service("worker")
    for subject in (
        "$KV.tenantry_state.pool.main",
        f"$KV.tenantry_state.{tenancy.shares_key('main', SALES)}",
        "$O.tenantry_artifacts.M.x",
        admin.ADMIN_SUBJECT,
        adapters.onboard_subject(SALES),
        rates.rate_subject(SALES, rates.TOKENS, 7),
        audit.audit_subject(SALES),
        canary.counts_subject("r1"),
    ):
        await refused(rig, worker._client, "worker", lambda subject=subject: worker.publish(subject, b"x"))


async def test_a_worker_reads_pools_and_neither_tenants_nor_keys(rig: Rig) -> None:
    registry, worker = await rig.service("registry"), await rig.service("worker")
    await (await open_bucket(registry, state.STATE_BUCKET)).put("key.abc", b"a key's tenants")
    bucket = await open_bucket(worker, state.STATE_BUCKET)
    with pytest.raises(BusUnavailable):
        await bucket.get("key.abc")
    for keys in (">", "key.>", "tenant.*"):
        with pytest.raises((nats.errors.TimeoutError, TimeoutError)):
            async with bucket.watch(keys):
                pass
    assert len(rig.refusals["worker"]) == 4


async def test_a_worker_watches_its_pools_shares_without_a_refusal(rig: Rig) -> None:
    registry, worker = await rig.service("registry"), await rig.service("worker")
    written, own = await open_bucket(registry, state.STATE_BUCKET), await open_bucket(worker, state.STATE_BUCKET)
    key = tenancy.shares_key("main", SALES)
    await mirrored(worker, own, key, lambda: written.put(key, b"{}"), f"{tenancy.SHARES_PREFIX}main.*")
    assert rig.refusals["worker"] == []


async def test_a_registry_does_its_work_without_a_refusal(rig: Rig, tmp_path: Path) -> None:
    registry, worker, sales = await rig.service("registry"), await rig.service("worker"), await rig.tenant(SALES)
    catalog = await open_bucket(registry, state.CATALOG_BUCKET)
    await mirrored(registry, catalog, "matrix", lambda: catalog.put("matrix", b"{}"))
    await sales.jetstream(domain="tenantry").publish(adapters.onboard_subject(SALES), b"{}")
    async for delivery in Consumer(registry, adapters.ONBOARD_STREAM, "onboard", adapters.ONBOARD_SUBJECTS).messages():
        await delivery.ack()
        break
    await publish_durable(worker, adapters.ack_subject("loaded", "w1"), b"ack")
    async for delivery in Consumer(registry, adapters.ACKS_STREAM, "acks", adapters.ACKS_SUBJECTS).messages():
        await delivery.retry(0)
        break
    await publish_durable(registry, adapters.event_subject(SALES), b"event")
    assert await read_last(registry, adapters.EVENTS_STREAM, "tenantry.v1.adapter.event.*", 5) == [b"event"]
    await heard(registry, workers.report_subject("w1"), lambda: worker.publish(workers.report_subject("w1"), b"report"))
    uploads = await open_objects(registry, adapters.uploads_bucket(SALES))
    assert await uploads.names() == []
    await publish_durable(registry, audit.audit_subject(SALES), b"done")
    found, waits = await read_page(registry, audit.AUDIT_STREAM, audit.audit_subject(SALES), count=5)
    assert ([each.data for each in found], waits) == ([b"done"], False)
    router = await rig.service("router")
    await heard(registry, canary.counts_subject("r1"), lambda: router.publish(canary.counts_subject("r1"), b"counts"))
    assert rig.refusals == {"registry": [], "worker": [], "router": [], SALES: []}


@pytest.mark.parametrize("verb", ["DELETE", "PURGE", "MSG.DELETE"])
async def test_not_even_a_registry_takes_anything_out_of_the_audit(rig: Rig, verb: str) -> None:
    registry = await rig.service("registry")
    await refused(rig, registry._client, "registry", lambda: registry.publish(f"$JS.API.STREAM.{verb}.{audit.AUDIT_STREAM}", b"{}"))


async def test_a_supervisor_only_looks(rig: Rig) -> None:
    registry, supervisor = await rig.service("registry"), await rig.service("supervisor")
    bucket, own = await open_bucket(registry, state.STATE_BUCKET), await open_bucket(supervisor, state.STATE_BUCKET)
    await mirrored(supervisor, own, "tenant.sales", lambda: bucket.put("tenant.sales", b"1"))
    assert rig.refusals["supervisor"] == []
    await refused(rig, supervisor._client, "supervisor", lambda: supervisor.publish(admin.ADMIN_SUBJECT, b"x"))


async def test_a_tenant_uploads_onboards_and_hears_its_outcome(rig: Rig, tmp_path: Path) -> None:
    registry, sales = await rig.service("registry"), await rig.tenant(SALES)
    js = sales.jetstream(domain="tenantry")
    bucket = await js.object_store(adapters.uploads_bucket(SALES))
    await bucket.put("adapter.tar", b"first" * 100_000)
    await bucket.put("adapter.tar", b"again" * 100_000)  # overwriting one's own purges the old pieces
    await (await open_objects(registry, adapters.uploads_bucket(SALES))).get_file("adapter.tar", tmp_path / "taken")
    assert (tmp_path / "taken").read_bytes() == b"again" * 100_000
    assert (await js.publish(adapters.onboard_subject(SALES), b"{}")).stream == adapters.ONBOARD_STREAM
    outcomes = await sales.subscribe(adapters.event_subject(SALES))
    await sales.flush()
    await publish_durable(registry, adapters.event_subject(SALES), b"outcome")
    assert (await outcomes.next_msg(timeout=5)).data == b"outcome"
    assert rig.refusals == {"registry": [], SALES: []}


NOT_THEIRS = [
    adapters.onboard_subject(CS),
    f"$O.{adapters.uploads_bucket(CS)}.C.x",
    f"$JS.API.STREAM.PURGE.OBJ_{adapters.uploads_bucket(CS)}",
    f"$JS.tenantry.API.STREAM.PURGE.OBJ_{adapters.uploads_bucket(CS)}",
    f"$JS.tenantry.API.STREAM.MSG.GET.OBJ_{adapters.uploads_bucket(CS)}",
    f"$JS.API.STREAM.PURGE.OBJ_{adapters.ARTIFACTS_BUCKET}",
    f"$JS.API.STREAM.MSG.GET.OBJ_{adapters.ARTIFACTS_BUCKET}",
    f"$JS.API.STREAM.DELETE.OBJ_{adapters.uploads_bucket(SALES)}",
    f"$JS.API.CONSUMER.CREATE.OBJ_{adapters.uploads_bucket(SALES)}",
    f"$JS.API.DIRECT.GET.OBJ_{adapters.uploads_bucket(SALES)}.x",
    "$JS.API.STREAM.NAMES",
    "$JS.API.INFO",
    f"$O.{adapters.ARTIFACTS_BUCKET}.M.x",
    f"$O.{adapters.STAGING_BUCKET}.M.x",
    f"$KV.{state.STATE_BUCKET}.pool.main",
    f"$KV.{state.STATE_BUCKET}.{tenancy.shares_key('main', SALES)}",
    rates.rate_subject(SALES, rates.REQUESTS, 7),
    audit.audit_subject(SALES),
    canary.counts_subject("r1"),
    f"$JS.API.STREAM.PURGE.{rates.RATES_STREAM}",
    admin.ADMIN_SUBJECT,
    workers.HELLO_SUBJECT,
    adapters.event_subject(SALES),
    inference.infer_subject("ad_1", "w1"),
    inference.control_subject("w1"),
    inference.answer_subject("r1"),
    adapters.load_subject("w1"),
    adapters.ack_subject("drained", "w1"),
    usage.worker_usage_subject("w1"),
    "_INBOX_router.x",
    f"_INBOX_{CS}.x",
    "$SYS.REQ.SERVER.PING",
]


async def test_a_tenant_may_not_publish_what_is_not_its_own(rig: Rig) -> None:
    sales = await rig.tenant(SALES)
    for subject in NOT_THEIRS:
        await refused(rig, sales, SALES, lambda subject=subject: sales.publish(subject, b"x"))


NOT_FOR_THEM = [
    ">",
    "*.*.*.*.*",
    "tenantry.>",
    adapters.event_subject(CS),
    "tenantry.v1.adapter.event.*",
    "tenantry.v1.answer.>",
    "tenantry.v1.infer.>",
    "_INBOX_router.>",
    f"_INBOX_{CS}.>",
    "$SYS.>",
    "$KV.>",
    "$O.>",
]


async def test_a_tenant_may_not_listen_to_what_is_not_its_own(rig: Rig) -> None:
    sales = await rig.tenant(SALES)
    for subject in NOT_FOR_THEM:
        await refused(rig, sales, SALES, lambda subject=subject: sales.subscribe(subject))


async def test_a_tenant_cannot_make_the_server_write_for_it_by_choosing_a_reply_subject(rig: Rig) -> None:
    """The server answers wherever a client says: in the services' account that would overwrite a key, or manage as the router."""
    registry, sales = await rig.service("registry"), await rig.tenant(SALES)
    bucket = await open_bucket(registry, state.STATE_BUCKET)
    await bucket.put("pool.main", b"as it was")
    managed: list[Message] = []
    await registry.subscribe(admin.ADMIN_SUBJECT, managed.append)
    await registry.flush()
    order = b'{"type":"delete_tenant","name":"cs"}'
    chunk = f"$O.{adapters.uploads_bucket(SALES)}.C.x"
    await sales.publish(chunk, order, reply=f"$KV.{state.STATE_BUCKET}.pool.main")
    await sales.publish(adapters.onboard_subject(SALES), order, reply=f"$KV.{state.STATE_BUCKET}.pool.main")
    info = f"$JS.tenantry.API.STREAM.INFO.OBJ_{adapters.uploads_bucket(SALES)}"
    last = f"$JS.tenantry.API.STREAM.MSG.GET.OBJ_{adapters.uploads_bucket(SALES)}"
    for request, body in ((info, b""), (last, b'{"seq":1}')):
        await sales.publish(request, body, reply=admin.ADMIN_SUBJECT)
    js = sales.jetstream(domain="tenantry")
    await js.publish(chunk, b"after all of it")
    await registry.flush()
    entry = await bucket.get("pool.main")
    assert entry is not None
    assert entry.value == b"as it was"
    assert managed == []


async def test_a_tenant_that_is_added_while_the_server_runs_can_work_at_once_and_nobody_is_cut(rig: Rig) -> None:
    registry, sales = await rig.service("registry"), await rig.tenant(SALES)
    cut: list[str] = []
    registry.on_disconnect(lambda: cut.append("registry"))
    new = state.Tenant(tenant_id="t_new", name="new", nats_password_bcrypt=bcrypt.hashpw(b"t_new-secret", bcrypt.gensalt(4)).decode())
    await open_objects(registry, adapters.uploads_bucket("t_new"), create=True)
    await rig.server.reload(rig.server.users + tenant_users([new]))
    client = await rig.tenant("t_new")
    js = client.jetstream(domain="tenantry")
    await (await js.object_store(adapters.uploads_bucket("t_new"))).put("a", b"1")
    await js.publish(adapters.onboard_subject("t_new"), b"{}")
    await sales.jetstream(domain="tenantry").publish(adapters.onboard_subject(SALES), b"{}")
    assert cut == []


async def test_a_tenant_that_is_taken_away_is_cut_off(rig: Rig) -> None:
    sales = await rig.tenant(SALES)
    gone = asyncio.Event()

    async def note() -> None:
        gone.set()

    sales._disconnected_cb = note
    await rig.server.reload(tuple(user for user in rig.server.users if user.name != SALES))
    await asyncio.wait_for(gone.wait(), 5)


async def test_nobody_comes_in_without_a_password(rig: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    await reader.readline()
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert b"Authorization Violation" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()
