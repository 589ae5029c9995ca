"""Tenants, keys, routing and the matrix, as managers change them."""

import hashlib
from pathlib import Path

import bcrypt
import msgspec
import pytest

from shared.bus import Bus, BusUnavailable, open_bucket, open_objects
from shared.contracts import adapters, admin, state
from shared.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from tests.integration.registry_rig import BASE, SLOT_BYTES, Admin, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.waiting import until_async


async def stored_key(bus: Bus, secret: str) -> state.ApiKey | None:
    found = await (await open_bucket(bus, state.STATE_BUCKET)).get(state.KEY_PREFIX + hashlib.sha256(secret.encode()).hexdigest())
    return state.decode_key(found.value) if found else None


async def test_a_keys_secret_is_shown_once_and_only_its_hash_is_kept(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        made = msgspec.convert(await manager.ask(admin.CreateKey(tenants=("sales",), label="ci")), admin.KeyView)
        assert made.secret.startswith("tk_")
        assert len(made.secret) == 46
        kept = await stored_key(bus, made.secret)
        assert kept is not None
        assert (kept.key_id, kept.tenants, kept.label, kept.revoked) == (made.key_id, ("sales",), "ci", False)
        bucket = await open_bucket(bus, state.STATE_BUCKET)
        for key in await bucket.keys():
            entry = await bucket.get(key)
            assert entry is not None
            assert made.secret.encode() not in entry.value

        async def listed() -> bool:
            keys = msgspec.convert(await manager.ask(admin.ListKeys(tenant="sales")), list[admin.KeyView])
            return [(key.key_id, key.secret) for key in keys] == [(made.key_id, "")]

        await until_async(listed, what="the key is listed without its secret")


async def test_a_revoked_key_is_marked_so_and_revoking_twice_is_once(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        made = await manager.ask(admin.CreateKey(tenants=("sales",)))
        for _ in range(2):
            assert (await manager.ask(admin.RevokeKey(key_id=made["key_id"])))["revoked"] is True
        kept = await stored_key(bus, made["secret"])
        assert kept is not None
        assert kept.revoked
        with pytest.raises(NotFound):
            await manager.ask(admin.RevokeKey(key_id="key_unknown"))


async def test_a_key_for_several_tenants_is_a_gateways_only(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        await manager.tenant("cs")
        with pytest.raises(InvalidRequest):
            await manager.ask(admin.CreateKey(tenants=("sales", "cs")))
        with pytest.raises(InvalidRequest):
            await manager.ask(admin.CreateKey(tenants=()))
        with pytest.raises(NotFound, match="nobody"):
            await manager.ask(admin.CreateKey(tenants=("nobody",)))
        made = await manager.ask(admin.CreateKey(tenants=("sales", "cs"), gateway=True))
        assert (made["tenants"], made["gateway"]) == (["sales", "cs"], True)


async def test_a_tenants_nats_password_is_shown_once_kept_as_bcrypt_and_comes_with_its_bucket(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        made = await manager.tenant("sales", nats_password=True)
        assert made.nats_user == made.tenant_id
        entry = await (await open_bucket(bus, state.STATE_BUCKET)).get("tenant.sales")
        assert entry is not None
        kept = state.decode_tenant(entry.value)
        assert bcrypt.checkpw(made.nats_password.encode(), kept.nats_password_bcrypt.encode())
        assert kept.nats_password_bcrypt.startswith("$2b$10$")
        assert await (await open_objects(bus, adapters.uploads_bucket(made.tenant_id))).names() == []
        again = await manager.ask(admin.UpdateTenant(name="sales", nats_password=True))
        assert again["nats_password"] not in ("", made.nats_password)


async def test_a_name_is_given_once(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        first = await manager.tenant("sales", quota=5)
        with pytest.raises(Conflict, match="sales exists already"):
            await manager.tenant("sales", quota=6)
        entry = await (await open_bucket(bus, state.STATE_BUCKET)).get("tenant.sales")
        assert entry is not None
        assert state.decode_tenant(entry.value).tenant_id == first.tenant_id
        with pytest.raises(InvalidRequest) as caught:
            await manager.tenant("cs", quota=-1)
        assert caught.value.fields["field"] == "vram_quota_bytes"


async def test_an_update_changes_what_it_names_and_leaves_the_rest(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales", quota=5, upgrade_headroom_bytes=7)
        changed = msgspec.convert(
            await manager.ask(admin.UpdateTenant(name="sales", vram_quota_bytes=9, adapter_ceilings={"tone": 3}, default_adapter="tone")),
            admin.TenantView,
        )
        assert (changed.vram_quota_bytes, changed.upgrade_headroom_bytes, changed.base_allowed) == (9, 7, True)
        assert (changed.adapter_ceilings, changed.default_adapter) == ({"tone": 3}, "tone")


async def test_a_quota_below_what_is_held_is_accepted_told_as_over_quota_and_lets_nothing_new_in(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        lowered = msgspec.convert(
            await manager.ask(admin.UpdateTenant(name="sales", vram_quota_bytes=SLOT_BYTES - 1)), admin.TenantView
        )  # fmt: skip
        assert lowered.over_quota == ("vram_bytes",)
        assert (lowered.vram_held_bytes, lowered.vram_quota_bytes) == (SLOT_BYTES, SLOT_BYTES - 1)
        assert (await manager.show("sales", "tone")).state == "ready"
        with pytest.raises(QuotaExceeded) as caught:
            await manager.add("sales", "mail", adapter(tmp_path, 2), tmp_path)
        assert (caught.value.fields["held_bytes"], caught.value.fields["limit_bytes"]) == (SLOT_BYTES, SLOT_BYTES - 1)
        assert len(worker.commands) == 1, "nothing was evicted"
        raised = msgspec.convert(await manager.ask(admin.UpdateTenant(name="sales", vram_quota_bytes=SLOT_BYTES)), admin.TenantView)
        assert raised.over_quota == ()


async def test_a_tenant_that_holds_adapters_is_not_deleted_and_its_keys_end_with_it(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.tenant("cs")
        key = await manager.ask(admin.CreateKey(tenants=("sales",)))
        gateway = await manager.ask(admin.CreateKey(tenants=("sales", "cs"), gateway=True))
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        with pytest.raises(Conflict, match="tone"):
            await manager.ask(admin.DeleteTenant(name="sales"))
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        await manager.ask(admin.DeleteTenant(name="sales"))
        own, shared = await stored_key(bus, key["secret"]), await stored_key(bus, gateway["secret"])
        assert own is not None
        assert own.revoked
        assert shared is not None
        assert (shared.tenants, shared.revoked) == (("cs",), False)
        with pytest.raises(NotFound):
            await manager.show("sales", "tone")
        artifacts = await open_objects(bus, adapters.ARTIFACTS_BUCKET)

        async def forgotten() -> bool:
            return await artifacts.names() == []

        await until_async(forgotten, what="its artifacts are deleted")
        again = await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        assert (view.version, again.vram_held_bytes) == (1, 0)


async def test_a_deleted_tenant_leaves_neither_its_upload_bucket_nor_a_key_made_a_moment_before(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        for _ in range(5):
            made = await manager.tenant("sales", nats_password=True)
            await open_objects(bus, adapters.uploads_bucket(made.tenant_id))
            live = await open_bucket(bus, state.STATE_BUCKET)
            name = state.KEY_PREFIX + hashlib.sha256(made.tenant_id.encode()).hexdigest()
            await live.put(name, state.encode(state.ApiKey(key_id="key_late", label="", tenants=("sales",))))
            await manager.ask(admin.DeleteTenant(name="sales"))
            late = await live.get(name)
            assert late is not None
            assert state.decode_key(late.value).revoked
            with pytest.raises(BusUnavailable):
                await open_objects(bus, adapters.uploads_bucket(made.tenant_id))
        with pytest.raises(NotFound):
            await manager.ask(admin.CreateKey(tenants=("sales",)))


async def test_the_first_adapter_made_default_is_the_tenants_default(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path, make_default=True)
        entry = await (await open_bucket(bus, state.STATE_BUCKET)).get("tenant.sales")
        assert entry is not None
        assert state.decode_tenant(entry.value).default_adapter == "tone"


async def test_routing_takes_a_header_and_a_default_by_name(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        assert await manager.ask(admin.SetRouting(header="X-Team", default="base_only")) == {"header": "x-team", "default": "base_only"}
        for header, default in (("bad header", "reject"), ("x-tenant", "guess")):
            with pytest.raises(InvalidRequest):
                await manager.ask(admin.SetRouting(header=header, default=default))
        entry = await (await open_bucket(bus, state.STATE_BUCKET)).get(state.ROUTING_KEY)
        assert entry is not None
        assert state.decode_routing(entry.value).header == "x-team"


async def test_labels_and_pairs_are_added_and_removed_by_name(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        other = "tiny@" + "9" * 64
        await manager.ask(admin.SetLabel(label="tiny@v1", base=BASE.identity))
        matrix = msgspec.convert(await manager.ask(admin.SetLabel(label="tiny@v1", base=other)), state.Matrix)
        assert matrix.labels == {"tiny@v1": (BASE.identity, other)}
        matrix = msgspec.convert(await manager.ask(admin.RemoveLabel(label="tiny@v1", base=other)), state.Matrix)
        assert matrix.labels == {"tiny@v1": (BASE.identity,)}
        assert (await manager.ask(admin.RemoveLabel(label="tiny@v1")))["labels"] == {}
        with pytest.raises(NotFound):
            await manager.ask(admin.RemoveLabel(label="tiny@v1"))
        with pytest.raises(InvalidRequest):
            await manager.ask(admin.SetLabel(label="tiny", base="tiny@v1"))
        digest = "sha256:" + "a" * 64
        await manager.ask(admin.SetPair(adapter_digest=digest, base=other, allowed=False))
        matrix = msgspec.convert(await manager.ask(admin.SetPair(adapter_digest=digest, base=other, allowed=True)), state.Matrix)
        assert [pair.allowed for pair in matrix.pairs] == [True]
        assert (await manager.ask(admin.RemovePair(adapter_digest=digest, base=other)))["pairs"] == []
        with pytest.raises(NotFound):
            await manager.ask(admin.RemovePair(adapter_digest=digest, base=other))
