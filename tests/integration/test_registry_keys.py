"""Keys with scopes, told apart by their prefix, rotated with overlap, and each tenant's own."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from shared.bus import Bus
from shared.contracts import admin
from shared.errors import Conflict, InvalidRequest, NotFound
from tests.integration.registry_rig import Admin, running_registry
from tests.integration.test_registry_tenants import stored_key


async def make(manager: Admin, **fields: Any) -> admin.KeyView:
    return msgspec.convert(await manager.ask(admin.CreateKey(**{"tenants": ("sales",), **fields})), admin.KeyView)


async def test_a_key_has_the_scopes_it_was_made_with_and_infer_alone_otherwise(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        assert (await make(manager)).scopes == ("infer",)
        wide = await make(manager, scopes=("adapters", "admin", "adapters"))
        kept = await stored_key(bus, wide.secret)
        assert kept is not None
        assert kept.scopes == ("adapters", "admin")
        assert wide.secret.startswith(kept.prefix)
        assert len(kept.prefix) <= 10
        for scopes in ((), ("root",), ("infer", "x" * 10_000)):
            with pytest.raises(InvalidRequest) as caught:
                await make(manager, scopes=scopes)
            assert caught.value.fields["field"] == "scopes"


async def test_rotation_gives_a_new_secret_with_the_same_rights_and_ends_the_old_one_later(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        old = await make(manager, scopes=("infer", "adapters"), label="ci")
        before = datetime.now(UTC)
        new = msgspec.convert(await manager.ask(admin.RotateKey(key_id=old.key_id, overlap_s=3600.0)), admin.KeyView)
        assert (new.scopes, new.label, new.tenants, new.replaces) == (("infer", "adapters"), "ci", ("sales",), old.key_id)
        assert new.secret != old.secret
        kept = await stored_key(bus, old.secret)
        assert kept is not None
        assert not kept.revoked
        ends = datetime.fromisoformat(kept.expires_at)
        assert timedelta(minutes=59) < ends - before < timedelta(minutes=61)
        fresh = await stored_key(bus, new.secret)
        assert fresh is not None
        assert fresh.expires_at == ""
        await manager.ask(admin.RotateKey(key_id=old.key_id, overlap_s=7200.0))
        again = await stored_key(bus, old.secret)
        assert again is not None
        assert again.expires_at == kept.expires_at, "a second rotation does not give the old secret more time"


async def test_rotation_without_overlap_revokes_at_once_and_a_revoked_key_is_not_rotated(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        old = await make(manager)
        await manager.ask(admin.RotateKey(key_id=old.key_id, overlap_s=0.0))
        kept = await stored_key(bus, old.secret)
        assert kept is not None
        assert kept.revoked
        with pytest.raises(Conflict):
            await manager.ask(admin.RotateKey(key_id=old.key_id))


@pytest.mark.parametrize("overlap_s", [-1.0, 1e9])
async def test_an_absurd_overlap_is_refused_by_name(bus: Bus, overlap_s: float) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        made = await make(manager)
        with pytest.raises(InvalidRequest) as caught:
            await manager.ask(admin.RotateKey(key_id=made.key_id, overlap_s=overlap_s))
        assert caught.value.fields["field"] == "overlap_s"


async def test_a_tenant_sees_and_changes_only_keys_that_are_its_alone(bus: Bus) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        for name in ("sales", "cs"):
            await manager.tenant(name)
        own = await make(manager)
        other = await make(manager, tenants=("cs",))
        gateway = await make(manager, tenants=("sales", "cs"), gateway=True)
        alone = await make(manager, gateway=True)

        listed = msgspec.convert(await manager.ask(admin.ListKeys(tenant="sales", own=True)), list[admin.KeyView])
        assert [(key.key_id, key.prefix, key.secret) for key in listed] == [(own.key_id, own.secret[:10], "")]
        messages: set[str] = set()
        for key_id in (other.key_id, gateway.key_id, alone.key_id, "key_" + "a" * 16):
            for request in (admin.RevokeKey(key_id=key_id, tenant="sales"), admin.RotateKey(key_id=key_id, tenant="sales")):
                with pytest.raises(NotFound) as caught:
                    await manager.ask(request)
                messages.add(caught.value.message.replace(key_id, "KEY"))
        assert messages == {"there is no key KEY"}
        for each in (other, gateway, alone):
            kept = await stored_key(bus, each.secret)
            assert kept is not None
            assert (kept.revoked, kept.expires_at) == (False, "")
        assert (await manager.ask(admin.RevokeKey(key_id=own.key_id, tenant="sales")))["revoked"]
