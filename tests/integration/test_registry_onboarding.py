"""Onboarding by event, on a server with the users and permissions of production: a tenant with its NATS user, and what it may not."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.js.api import ObjectMeta

from services.cli.nats_users import service_users, tenant_users
from shared.bus import Bus, BusSettings, connect, open_bucket, open_objects
from shared.bus.embedded import EmbeddedNats
from shared.contracts import adapters, admin, state
from shared.contracts.adapters import AdapterEvent, OnboardAdapter
from shared.contracts.permissions import TENANT_JETSTREAM_DOMAIN
from shared.errors import InvalidRequest
from tests import adapters_factory as factory
from tests.integration.registry_rig import BASE, QUICK, Admin, FakeWorker, obeying, running_registry
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until, until_async

PASSWORDS = {name: f"{name}-secret" for name in ("router", "registry", "worker", "supervisor")}


class Team:
    """A tenant with its NATS user: what it hears is in `heard`."""

    def __init__(self, view: admin.TenantView, client: Client) -> None:
        self.view = view
        self.client = client
        self.heard: list[AdapterEvent] = []

    async def put(self, name: str, content: bytes) -> None:
        js = self.client.jetstream(domain=TENANT_JETSTREAM_DOMAIN)
        store = await js.object_store(adapters.uploads_bucket(self.view.tenant_id))
        await store.put(name, content, meta=ObjectMeta(name=name))

    async def onboard(self, **fields: str) -> AdapterEvent:
        """The outcome's event: ready, rejected or failed."""
        request = OnboardAdapter(**{"request": f"r{len(self.heard)}", **fields})
        await self.client.publish(adapters.onboard_subject(self.view.tenant_id), adapters.encode(request))
        return await self.outcome(request.request)

    async def outcome(self, request: str) -> AdapterEvent:
        ends = {"ready", "rejected", "failed"}
        found: list[AdapterEvent] = []

        def told() -> bool:
            found[:] = [event for event in self.heard if event.request == request and event.state in ends]
            return bool(found)

        await until(told, what=f"the outcome of {request}")
        return found[0]


class Platform:
    def __init__(self, server: EmbeddedNats, manager: Admin, worker: FakeWorker) -> None:
        self.server = server
        self.manager = manager
        self.worker = worker
        self._clients: list[Client] = []

    async def team(self, name: str) -> Team:
        view = await self.manager.tenant(name, nats_password=True)
        bucket = await open_bucket(self.manager.bus, state.STATE_BUCKET)
        entries = [entry for key in await bucket.keys(state.TENANT_PREFIX) if (entry := await bucket.get(key))]
        tenants = [state.decode_tenant(entry.value) for entry in entries]
        await self.server.reload(service_users(PASSWORDS) + tenant_users(tenants))
        client = await nats.connect(
            self.server.url, user=view.nats_user, password=view.nats_password, inbox_prefix=f"_INBOX_{view.tenant_id}".encode()
        )
        self._clients.append(client)
        team = Team(view, client)

        async def hear(message: object) -> None:
            team.heard.append(adapters.decode_event(message.data))  # type: ignore[attr-defined]

        await client.subscribe(adapters.event_subject(view.tenant_id), cb=hear)
        await client.flush()
        return team

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def platform(tmp_path: Path, **settings: int) -> AsyncIterator[Platform]:
    server = EmbeddedNats(tmp_path / "nats", users=service_users(PASSWORDS))
    await server.start()
    buses: dict[str, Bus] = {
        name: await connect(BusSettings(url=server.url, name=name, user=name, password=PASSWORDS[name]))
        for name in ("registry", "router", "worker")
    }
    try:
        worker = FakeWorker(buses["worker"])
        quick = msgspec.structs.replace(QUICK, **settings)
        async with running_registry(buses["registry"], quick, asked_by=buses["router"]), obeying(worker):
            made = Platform(server, Admin(buses["router"]), worker)
            try:
                yield made
            finally:
                await made.close()
    finally:
        for bus in buses.values():
            await bus.close()
        await server.stop()


async def test_a_tenant_onboards_with_its_own_user_and_hears_every_step(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        await sales.put("tone.tar.gz", factory.pack(adapter(tmp_path), "tar.gz"))
        event = await sales.onboard(name="tone", object="tone.tar.gz", request="mine-1")
        assert (event.state, event.tenant, event.name, event.version, event.request) == ("ready", "sales", "tone", 1, "mine-1")
        assert [e.state for e in sales.heard] == ["uploaded", "validating", "admitted", "loading", "ready"]
        assert {e.request for e in sales.heard} == {"mine-1"}
        view = await running.manager.show("sales", "tone")
        assert (view.state, view.digest, view.adapter_id) == ("ready", event.digest, event.adapter_id)


async def test_a_rejected_onboarding_is_told_with_its_reason(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        folder = factory.BAD_KINDS["DoRA"].make(BASE, tmp_path / "dora")
        await sales.put("x", factory.pack(folder, "zip"))
        event = await sales.onboard(name="tone", object="x", base=BASE.identity)
        assert event.state == "rejected"
        assert event.error is not None
        assert event.error.fields["reason"] == "dora"
        assert running.worker.commands == []


async def test_what_cannot_even_begin_is_told_too(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales, cs = await running.team("sales"), await running.team("cs")
        await sales.put("good", factory.pack(adapter(tmp_path), "tar"))
        cases = [
            ({"name": "Bad Name", "object": "good"}, "invalid_request"),
            ({"name": "tone", "object": ""}, "invalid_request"),
            ({"name": "tone", "object": "missing"}, "not_found"),
            ({"name": "tone", "object": "good", "tenant_id": cs.view.tenant_id}, "not_permitted"),
        ]
        for fields, code in cases:
            event = await sales.onboard(**fields, request=f"case-{code}-{fields['name']}-{fields['object']}")
            assert event.state == "rejected"
            assert event.error is not None
            assert event.error.code == code
        await sales.client.publish(adapters.onboard_subject(sales.view.tenant_id), b"not json")
        await until(lambda: any(e.error and "not an onboarding request" in e.error.message for e in sales.heard), what="junk is refused")
        assert cs.heard == []
        assert (await running.manager.pool()).mounts == {}


async def test_the_same_bytes_again_end_in_what_they_already_are(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        await sales.put("tone", factory.pack(adapter(tmp_path), "tar"))
        first = await sales.onboard(name="tone", object="tone", request="one")
        await sales.put("tone", factory.pack(adapter(tmp_path), "zip"))
        again = await sales.onboard(name="tone", object="tone", request="two")
        assert (again.state, again.adapter_id, again.version) == ("ready", first.adapter_id, 1)
        assert len(running.worker.commands) == 1


async def test_an_upload_is_deleted_once_it_was_taken_or_refused(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        await sales.put("good", factory.pack(adapter(tmp_path), "tar"))
        await sales.put("bad", factory.pack(factory.BAD_KINDS["DoRA"].make(BASE, tmp_path / "dora"), "tar"))
        await sales.put("kept", b"nobody has asked for this yet")
        assert (await sales.onboard(name="tone", object="good")).state == "ready"
        assert (await sales.onboard(name="other", object="bad", base=BASE.identity)).state == "rejected"
        registry = await connect(BusSettings(url=running.server.url, name="registry", user="registry", password=PASSWORDS["registry"]))
        try:
            bucket = adapters.uploads_bucket(sales.view.tenant_id)
            objects = await open_objects(registry, bucket)

            async def only_the_untouched_is_left() -> bool:
                state = (await registry.js.stream_info(f"OBJ_{bucket}")).state
                return await objects.names() == ["kept"] and state.bytes < 4000

            await until_async(only_the_untouched_is_left, what="descriptions and bytes of what was looked at are gone")
            first = await objects.revision("kept")
            await sales.put("kept", b"another object under the name")
            assert not await objects.delete_revision("kept", first), "what has been put since is the tenant's"
            assert await objects.names() == ["kept"]
        finally:
            await registry.close()


async def test_an_object_that_is_shorter_than_it_says_is_refused_and_holds_nobody_up(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        await sales.put("short", factory.pack(adapter(tmp_path), "tar"))
        bucket = adapters.uploads_bucket(sales.view.tenant_id)
        js = sales.client.jetstream(domain=TENANT_JETSTREAM_DOMAIN)
        info = await (await js.object_store(bucket)).get_info("short")
        description = {**info.as_dict(), "size": 1 << 30}
        await sales.client.request(f"$O.{bucket}.M.{_encoded('short')}", msgspec.json.encode(description), timeout=2)
        event = await sales.onboard(name="tone", object="short")
        assert event.error is not None
        assert (event.state, event.error.code) == ("rejected", "object_corrupt")


async def test_what_tenants_write_themselves_is_bounded(tmp_path: Path) -> None:
    async with platform(tmp_path, tenant_uploads_limit_bytes=1 << 20) as running:
        sales = await running.team("sales")
        await sales.put("fits", bytes(500_000))
        with pytest.raises(nats.js.errors.APIError, match="maximum messages exceeded"):
            await sales.put("too much", bytes(900_000))
        with pytest.raises(nats.js.errors.APIError, match="message size exceeds"):
            subject = f"$O.{adapters.uploads_bucket(sales.view.tenant_id)}.C.x"
            await sales.client.jetstream(domain=TENANT_JETSTREAM_DOMAIN).publish(subject, bytes(300_000))
        with pytest.raises(nats.js.errors.APIError, match="message size exceeds"):
            subject = adapters.onboard_subject(sales.view.tenant_id)
            await sales.client.jetstream(domain=TENANT_JETSTREAM_DOMAIN).publish(subject, bytes(100_000))


async def test_a_name_that_means_something_else_in_requests_is_refused(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales = await running.team("sales")
        for name in ("default", BASE.label):
            event = await sales.onboard(name=name, object="any", request=f"named {name}")
            assert event.error is not None
            assert (event.state, event.error.code) == ("rejected", "invalid_request")
            with pytest.raises(InvalidRequest, match="mean something else"):
                await running.manager.add("sales", name, adapter(tmp_path), tmp_path)


async def test_knowing_anothers_digest_or_object_gives_nothing(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales, cs = await running.team("sales"), await running.team("cs")
        await sales.put("tone", factory.pack(adapter(tmp_path), "tar"))
        mine = await sales.onboard(name="tone", object="tone")
        await sales.put("tone", factory.pack(adapter(tmp_path), "tar"))
        for stolen in ("tone", f"{sales.view.tenant_id}.{mine.adapter_id}", mine.digest, f"../{adapters.ARTIFACTS_BUCKET}"):
            event = await cs.onboard(name="tone", object=stolen, request=f"steal {stolen}")
            assert event.error is not None
            assert event.error.code == "not_found", "as if nobody had it"
        assert [mount.tenant for mount in (await running.manager.pool()).mounts.values()] == ["sales"]


async def test_a_link_in_the_own_bucket_to_anothers_artifact_is_refused(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales, cs = await running.team("sales"), await running.team("cs")
        await sales.put("tone", factory.pack(adapter(tmp_path), "tar"))
        mine = await sales.onboard(name="tone", object="tone")
        await cs.put("loot", b"")
        js = cs.client.jetstream(domain=TENANT_JETSTREAM_DOMAIN)
        store = await js.object_store(adapters.uploads_bucket(cs.view.tenant_id))
        info = await store.get_info("loot")
        description = msgspec.json.decode(msgspec.json.encode(info.as_dict()))
        description["options"] = {"link": {"bucket": adapters.ARTIFACTS_BUCKET, "name": f"{sales.view.tenant_id}.{mine.adapter_id}"}}
        subject = f"$O.{adapters.uploads_bucket(cs.view.tenant_id)}.M.{_encoded('loot')}"
        await cs.client.request(subject, msgspec.json.encode(description), headers={"Nats-Rollup": "sub"}, timeout=2)
        event = await cs.onboard(name="tone", object="loot")
        assert event.state == "rejected"
        assert event.error is not None
        assert "link" in event.error.message


async def test_overwriting_or_purging_artifacts_is_out_of_a_tenants_reach(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales, cs = await running.team("sales"), await running.team("cs")
        await sales.put("tone", factory.pack(adapter(tmp_path), "tar"))
        mine = await sales.onboard(name="tone", object="tone")
        for bucket in (adapters.ARTIFACTS_BUCKET, adapters.uploads_bucket(sales.view.tenant_id)):
            for subject in (f"$O.{bucket}.M.{_encoded('tone')}", f"$JS.{TENANT_JETSTREAM_DOMAIN}.API.STREAM.PURGE.OBJ_{bucket}"):
                with pytest.raises((nats.errors.Error, asyncio.TimeoutError)):
                    await cs.client.request(subject, b"{}", timeout=0.3)
        mount = (await running.manager.pool()).mounts[mine.adapter_id]
        store = await open_objects(running.worker.bus, adapters.ARTIFACTS_BUCKET)
        assert await store.get_file(mount.artifact, tmp_path / "got", sha256=mount.artifact_sha256) == mount.artifact_bytes


async def test_a_tenant_cannot_onboard_for_another(tmp_path: Path) -> None:
    async with platform(tmp_path) as running:
        sales, cs = await running.team("sales"), await running.team("cs")
        await cs.put("tone", factory.pack(adapter(tmp_path), "tar"))
        forged = OnboardAdapter(name="tone", object="tone", request="forged")
        await cs.client.publish(adapters.onboard_subject(sales.view.tenant_id), adapters.encode(forged))
        await cs.client.flush()
        await cs.onboard(name="tone", object="tone", request="own")
        assert sales.heard == []
        assert {mount.tenant for mount in (await running.manager.pool()).mounts.values()} == {"cs"}


def _encoded(name: str) -> str:
    """An object's name as its description's subject has it."""
    return base64.urlsafe_b64encode(name.encode()).decode()
