"""What a registry refuses: with a reason that names the figure or field, before any worker hears of it, and with nothing left reserved."""

from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus, open_objects
from shared.contracts import adapters, admin
from shared.errors import (
    AdapterRejected,
    BaseMismatch,
    BaseUnknown,
    BodyTooLarge,
    IncompatiblePair,
    InvalidRequest,
    NoFreeSlot,
    NotFound,
    QuotaExceeded,
    TenantryError,
)
from tests import adapters_factory as factory
from tests.integration.registry_rig import BASE, LIMITS, QUICK, SLOT_BYTES, Admin, FakeWorker, base_of, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter


async def refused(manager: Admin, worker: FakeWorker, archive: Path | bytes, folder: Path, **fields: object) -> TenantryError:
    """The refusal of adding sales/tone; checks that it cost nobody anything and is in the record and the events."""
    before, commands = await manager.pool(), list(worker.commands)
    with pytest.raises(TenantryError) as caught:
        await manager.add("sales", "tone", archive, folder, **fields)
    assert await manager.pool() == before
    assert worker.commands == commands
    assert await (await open_objects(manager.bus, adapters.STAGING_BUCKET)).names() == []
    last = (await manager.events("sales", "tone"))[-1]
    assert last.state == "rejected"
    assert last.error is not None
    assert (last.error.code, last.error.message) == (caught.value.code, caught.value.message)
    view = await manager.show("sales", "tone")
    assert (view.state, view.error) == ("rejected", last.error)
    return caught.value


def spoiled(kind: str, folder: Path) -> Path | bytes:
    """What a tenant sends; a folder that only links spoil travels as it is packed."""
    made = factory.BAD_KINDS[kind].make(msgspec.structs.replace(BASE, label="tiny"), folder)
    return made.read_bytes() if made.is_file() else made


NEEDS_A_FOLDER = {"symlink in a folder"}  # packing follows the link; sent as an archive it is another kind


async def test_every_bad_kind_of_upload_is_rejected_with_its_reason_and_costs_nobody_anything(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.ask(admin.SetLabel(label="tiny-v1", base=BASE.identity))
        for kind, bad in factory.BAD_KINDS.items():
            if kind in NEEDS_A_FOLDER:
                continue
            folder = tmp_path / kind.replace(" ", "-")
            folder.mkdir()
            error = await refused(manager, worker, spoiled(kind, folder / "made"), folder, base=BASE.identity)
            assert isinstance(error, AdapterRejected), (kind, error)
            assert error.fields["reason"] == bad.reason, kind


async def test_an_adapter_of_another_base_of_the_same_shapes_is_refused_by_its_label_alone(bus: Bus, tmp_path: Path) -> None:
    other = base_of("tiny", "9")
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.ask(admin.SetLabel(label="tiny@v2", base=other.identity))
        error = await refused(manager, worker, adapter(tmp_path, revision="v2"), tmp_path)
        assert isinstance(error, BaseMismatch)
        assert (error.fields["expected"], error.fields["got"], error.fields["source"]) == (BASE.identity, other.identity, "alias")


async def test_an_unknown_label_is_refused_with_the_command_that_would_name_it(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        folder = factory.make_adapter(tmp_path / "a", BASE, base_model_name_or_path="acme/other")
        error = await refused(manager, worker, folder, tmp_path)
        assert isinstance(error, BaseUnknown)
        assert error.fields["command"] == "tenantry matrix alias acme/other IDENTITY"
        await manager.ask(admin.SetLabel(label="acme/other", base=BASE.identity))
        view = await manager.add("sales", "tone", folder, tmp_path)
        assert (view.state, view.base_label, view.version) == ("ready", "acme/other", 1)


async def test_a_label_of_several_bases_is_refused_with_the_candidates_until_the_uploader_says_which(bus: Bus, tmp_path: Path) -> None:
    other = base_of("tiny", "9")
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.ask(admin.SetLabel(label="tiny", base=other.identity))
        error = await refused(manager, worker, adapter(tmp_path), tmp_path)
        assert isinstance(error, BaseUnknown)
        assert sorted(error.fields["candidates"]) == sorted([BASE.identity, other.identity])
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path, base=BASE.identity)
        assert (view.state, view.provenance) == ("ready", "declared")
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        again = await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0))
        assert again["state"] == "ready", "what was declared once still holds for the stored artifact"


async def test_a_declared_base_that_contradicts_the_label_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        error = await refused(manager, worker, adapter(tmp_path), tmp_path, base=base_of("tiny", "9").identity)
        assert isinstance(error, BaseMismatch)


async def test_the_matrix_can_forbid_a_pair_and_is_looked_up_before_the_weights(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        await manager.ask(admin.SetPair(adapter_digest="tiny", base=BASE.identity, allowed=False, note="recalled"))
        folder = factory.BAD_KINDS["weights cut off"].make(BASE, tmp_path / "cut")
        config = (folder / factory.CONFIG).read_bytes()
        (folder / factory.CONFIG).write_bytes(msgspec.json.encode(msgspec.json.decode(config) | {"base_model_name_or_path": "tiny"}))
        error = await refused(manager, worker, folder, tmp_path)
        assert isinstance(error, IncompatiblePair)
        assert "recalled" in error.message


async def test_a_pair_that_was_forbidden_later_is_not_mounted_again(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _worker):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        await manager.ask(admin.SetPair(adapter_digest=view.digest, base=BASE.identity, allowed=False))
        with pytest.raises(IncompatiblePair):
            await manager.ask(admin.AddAdapter(tenant="sales", name="tone"))
        await manager.ask(admin.RemovePair(adapter_digest=view.digest, base=BASE.identity))
        again = await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0))
        assert again["state"] == "ready"


async def test_over_the_tenants_quota_is_refused_with_asked_held_and_allowed(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales", quota=2 * SLOT_BYTES - 1)
        await manager.add("sales", "first", adapter(tmp_path, 1), tmp_path)
        error = await refused(manager, worker, adapter(tmp_path, 2), tmp_path)
        assert isinstance(error, QuotaExceeded)
        figures = {field: error.fields[field] for field in ("scope", "asked_bytes", "held_bytes", "limit_bytes")}
        assert figures == {"scope": "tenant", "asked_bytes": SLOT_BYTES, "held_bytes": SLOT_BYTES, "limit_bytes": 2 * SLOT_BYTES - 1}
        await manager.ask(admin.UpdateTenant(name="sales", vram_quota_bytes=2 * SLOT_BYTES))
        again = await manager.ask(admin.AddAdapter(tenant="sales", name="tone", wait_s=10.0))
        assert again["state"] == "ready", "what was refused for want of room is kept, and mounted when there is some"


async def test_over_the_adapters_own_ceiling_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, worker):
        await manager.tenant("sales")
        error = await refused(manager, worker, adapter(tmp_path), tmp_path, ceiling_bytes=SLOT_BYTES - 1)
        assert isinstance(error, QuotaExceeded)
        assert (error.fields["scope"], error.fields["limit_bytes"]) == ("adapter", SLOT_BYTES - 1)


async def test_no_free_slot_is_refused_with_the_figures(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, limits=msgspec.structs.replace(LIMITS, slots=1)) as (manager, worker):
        await manager.tenant("sales")
        await manager.tenant("cs")
        await manager.add("cs", "help", adapter(tmp_path, 1), tmp_path)
        error = await refused(manager, worker, adapter(tmp_path, 2), tmp_path)
        assert isinstance(error, NoFreeSlot)
        assert (error.fields["asked_slots"], error.fields["held_slots"], error.fields["limit_slots"]) == (1, 1, 1)


async def test_an_upload_over_the_limit_is_refused_with_its_size_and_the_limit(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, msgspec.structs.replace(QUICK, upload_limit_bytes=1000)) as (manager, worker):
        await manager.tenant("sales")
        error = await refused(manager, worker, adapter(tmp_path), tmp_path)
        assert isinstance(error, BodyTooLarge)
        assert error.fields["limit_bytes"] == 1000
        assert error.fields["asked_bytes"] > 1000


async def test_an_upload_that_is_not_there_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        with pytest.raises(NotFound, match="nothing-here"):
            await manager.ask(admin.AddAdapter(tenant="sales", name="tone", object="nothing-here"))


@pytest.mark.parametrize("name", ["", "../x", "a b", "A", "x" * 64, "ünï", "a.b", "a\n", "-a", "a/b", "*"])
async def test_names_with_strange_characters_are_refused_and_the_upload_is_dropped(bus: Bus, tmp_path: Path, name: str) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        with pytest.raises(InvalidRequest) as caught:
            await manager.add("sales", name, adapter(tmp_path), tmp_path)
        assert caught.value.fields["field"] == "adapter"
        with pytest.raises(InvalidRequest) as caught:
            await manager.ask(admin.CreateTenant(name=name))
        assert caught.value.fields["field"] == "tenant"
        assert await (await open_objects(bus, adapters.STAGING_BUCKET)).names() == []


async def test_unknown_tenants_and_pools_are_refused_by_name(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        with pytest.raises(NotFound, match="there is no tenant nobody"):
            await manager.add("nobody", "tone", adapter(tmp_path), tmp_path)
        await manager.tenant("sales")
        with pytest.raises(NotFound, match="there is no pool other"):
            await manager.add("sales", "tone", adapter(tmp_path), tmp_path, pool_id="other")
        with pytest.raises(NotFound, match="has no tone mounted"):
            await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone"))
        assert await (await open_objects(bus, adapters.STAGING_BUCKET)).names() == []


async def test_before_any_worker_has_come_an_upload_is_refused(bus: Bus, tmp_path: Path) -> None:
    async with running_registry(bus):
        manager = Admin(bus)
        await manager.tenant("sales")
        with pytest.raises(NotFound, match="no worker has said hello"):
            await manager.add("sales", "tone", adapter(tmp_path), tmp_path)


async def test_what_is_no_operation_is_refused_and_the_registry_lives_on(bus: Bus) -> None:
    async with running_registry(bus):
        for junk in (b"", b"{}", b'{"type": "drop_tables"}', b"\xff\xfe", b'{"type": "create_tenant", "name": 7}'):
            reply = admin.decode_reply(await bus.request(admin.ADMIN_SUBJECT, junk, 5.0))
            assert reply.error is not None
            assert reply.error.code == "invalid_request"
        assert await Admin(bus).ask(admin.ListTenants()) == []
