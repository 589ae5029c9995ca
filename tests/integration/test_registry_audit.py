"""What was done is told: before it is done and when it has ended, by whom, from where, without secrets, in a stream that only grows."""

from pathlib import Path
from typing import Any

import msgspec
import nats.js.errors
import pytest

from services.registry.mounting import stepped
from shared.bus import Bus, BusUnavailable, open_bucket, read_page
from shared.contracts import adapters, admin, audit, state
from shared.contracts.adapters import AdapterState, CanaryTerms, OnboardAdapter
from shared.contracts.audit import AuditLine, AuditPage, AuditRecord, ListAudit, Phase
from shared.contracts.errors import to_error
from shared.contracts.state import AdapterRecord
from shared.errors import Conflict, InvalidRequest, NotFound, TenantryError
from tests.integration.registry_rig import QUICK, SLOT_BYTES, Admin, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.integration.test_registry_recovers import rewrite_record
from tests.waiting import until_async

OPERATOR = {"who": "operator", "address": "10.0.0.7"}


async def ask(manager: Admin, request: Any, **by: str) -> Any:
    """As a router asks: with who asks for it."""
    asked = admin.encode(admin.OnBehalf(request=request, **(by or OPERATOR)))
    reply = admin.decode_reply(await manager.bus.request(admin.ADMIN_SUBJECT, asked, manager.patience_s))
    if reply.error is not None:
        raise to_error(reply.error)
    return reply.result


async def page(manager: Admin, **fields: Any) -> AuditPage:
    return msgspec.convert(await ask(manager, ListAudit(**fields)), AuditPage)


async def lines(manager: Admin, **fields: Any) -> list[AuditRecord]:
    return [line.record for line in (await page(manager, limit=1000, **fields)).lines]


async def raw(bus: Bus) -> list[bytes]:
    """Every message of the stream."""
    found, after, waiting = [], 0, True
    while waiting:
        stored, waiting = await read_page(bus, audit.AUDIT_STREAM, audit.AUDIT_SUBJECTS[0], after=after, count=1000)
        found += [message.data for message in stored]
        after = stored[-1].sequence if stored else after
    return found


async def records_of(bus: Bus) -> list[AdapterRecord]:
    catalog = await open_bucket(bus, state.CATALOG_BUCKET)
    return [state.decode_record(entry.value) for key in await catalog.keys(state.ADAPTER_PREFIX) if (entry := await catalog.get(key))]


async def all_is_told(manager: Admin) -> None:
    """Every step that any record has taken is in the audit; waits for what a registry that died left to the next."""

    async def is_told() -> bool:
        told = {record.id for record in map(audit.decode_record, await raw(manager.bus))}
        taken = {
            f"{record.adapter_id}:{step.state}:{step.at}"
            for record in await records_of(manager.bus)
            for step in record.history[len(record.history) - min(record.steps, len(record.history)) :]
        }
        return taken <= told

    await until_async(is_told, timeout_s=20, what="every step is told")


async def test_an_operation_is_told_with_who_asked_from_where_and_what_came_of_it(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        made = await ask(manager, admin.CreateTenant(name="sales", vram_quota_bytes=5))
        (line,) = (await page(manager, action="create_tenant")).lines
        record = line.record
        assert (record.action, record.phase, record.who, record.address) == ("create_tenant", Phase.DONE, "operator", "10.0.0.7")
        assert (record.tenant, record.what) == ("sales", {"name": "sales", "vram_quota_bytes": 5})
        assert record.result == {"tenant_id": made["tenant_id"]}
        assert line.at.endswith("Z")
        stored = [audit.decode_record(data) for data in await raw(bus)]
        both = [each for each in stored if each.id == record.id]
        assert [each.phase for each in both] == [Phase.ASKED, Phase.DONE], "it was told before it was done"


async def test_a_refusal_is_told_with_its_code_and_looking_leaves_nothing(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await ask(manager, admin.CreateTenant(name="sales"))
        with pytest.raises(Conflict):
            await ask(manager, admin.CreateTenant(name="sales"), who="key tk_abc", address="10.0.0.9")
        refused = (await lines(manager, action="create_tenant"))[-1]
        assert (refused.phase, refused.error, refused.who) == (Phase.REFUSED, "conflict", "key tk_abc")
        before = len(await raw(bus))
        for looks in (admin.ListTenants(), admin.ShowTenant(name="sales"), admin.ListKeys(), admin.GetMatrix(), ListAudit()):
            await ask(manager, looks)
        assert len(await raw(bus)) == before


async def test_an_operation_asked_for_by_nobody_in_particular_is_told_as_that(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        assert [(each.who, each.address) for each in await lines(manager, action="create_tenant")] == [("unknown", "")]


async def test_no_secret_is_told(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        secrets = [(await ask(manager, admin.CreateTenant(name="sales", nats_password=True)))["nats_password"]]
        key = await ask(manager, admin.CreateKey(tenants=("sales",), label="ci"))
        rotated = await ask(manager, admin.RotateKey(key_id=key["key_id"]))
        secrets += [key["secret"], rotated["secret"]]
        await ask(manager, admin.RevokeKey(key_id=key["key_id"]))
        whole = b"\n".join(await raw(bus)).decode()
        assert all(secrets)
        assert [secret for secret in secrets if secret in whole] == []
        made = (await lines(manager, action="create_key"))[0]
        assert (made.result["key_id"], made.result["prefix"]) == (key["key_id"], key["prefix"])
        assert made.tenant == "sales"


async def test_every_step_of_an_adapters_life_and_of_a_trial_is_told_once(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales", upgrade_headroom_bytes=SLOT_BYTES)
        first = await manager.add("sales", "tone", adapter(tmp_path, 1), tmp_path)
        trial = await manager.add("sales", "tone", adapter(tmp_path, 2), tmp_path, trial=CanaryTerms(share_ppm=1000))
        await manager.ask(admin.ChangeCanary(tenant="sales", name="tone", share_ppm=2000))
        await manager.ask(admin.PromoteCanary(tenant="sales", name="tone"))
        await manager.in_state("sales", "tone", "unloaded", version=1)
        await all_is_told(manager)
        told = await lines(manager, tenant="sales")
        of_first = [each.action for each in told if each.what.get("adapter_id") == first.adapter_id and each.phase is Phase.HAPPENED]
        states = ["uploaded", "validating", "admitted", "loading", "ready", "draining", "unloaded"]
        assert sorted(of_first) == sorted(f"adapter.{each}" for each in states)
        assert of_first[:5] == [f"adapter.{each}" for each in states[:5]]
        of_trial = [each.action for each in told if each.what.get("adapter_id") == trial.adapter_id and each.phase is Phase.HAPPENED]
        assert of_trial[5:] == ["canary.changed", "canary.promoted"]
        assert all(each.who == "registry" for each in told if each.phase is Phase.HAPPENED)
        promoted = next(each for each in told if each.action == "promote_canary")
        assert (promoted.phase, promoted.result["version"]) == (Phase.DONE, 2)
        assert {each.action for each in await lines(manager, action="canary.*")} == {"canary.changed", "canary.promoted"}


async def test_a_step_that_a_registry_died_before_telling_is_told_by_the_next(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        view = await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await all_is_told(manager)
        note = "a step nobody told"
        await rewrite_record(bus, view.adapter_id, lambda record: stepped(record, AdapterState.READY, note, "canary.stopped"))

        async def is_told() -> bool:
            return [each.note for each in await lines(manager, action="canary.stopped")] == [note]

        await until_async(is_told, what="the step is told")
        notes = [event.note for event in await manager.events("sales", "tone")]
        assert notes.count(note) == 1


async def test_an_operation_whose_registry_died_stands_as_asked_for(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        left = AuditRecord(id="a1", action="delete_tenant", phase=Phase.ASKED, who="operator", tenant="sales")
        await bus.js.publish(audit.audit_subject(""), audit.encode(left))
        assert await lines(manager, action="delete_tenant") == [left]


async def test_what_cannot_be_told_is_not_done(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await bus.js.delete_stream(audit.AUDIT_STREAM)
        with pytest.raises(BusUnavailable):
            await ask(manager, admin.CreateTenant(name="sales"))
        assert await ask(manager, admin.ListTenants()) == []


async def test_nothing_is_taken_out_of_the_stream(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        with pytest.raises(nats.js.errors.APIError):
            await bus.js.purge_stream(audit.AUDIT_STREAM)
        with pytest.raises(nats.js.errors.APIError):
            await bus.js.delete_msg(audit.AUDIT_STREAM, 1)
        assert len(await raw(bus)) == 2
    for days in (QUICK.audit_kept_days, 7, 0):  # and a registry that starts again does not mind, whatever it is told to keep
        async with running_registry(bus, msgspec.structs.replace(QUICK, audit_kept_days=days)):
            pass
        with pytest.raises(nats.js.errors.APIError):
            await bus.js.purge_stream(audit.AUDIT_STREAM)
    async with running_registry(bus, QUICK):
        assert len(await lines(Admin(bus), action="create_tenant")) == 1


async def test_pages_follow_each_other_without_a_gap_or_a_double(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        for number in range(23):
            await manager.tenant(f"t{number}")
        seen: list[AuditLine] = []
        sizes: list[int] = []
        after = 0
        while True:
            found = await page(manager, limit=10, after=after, action="create_tenant")
            seen += found.lines
            sizes.append(len(found.lines))
            after = found.next
            if not after:
                break
        assert {line.record.phase for line in seen} == {Phase.DONE}, "what ended is shown once, where it ended"
        assert [line.record.tenant for line in seen] == [f"t{number}" for number in range(23)]
        assert max(sizes) <= 10
        assert len(sizes) >= 3
        assert [line.at for line in seen] == sorted(line.at for line in seen)


async def test_a_time_bounds_what_is_shown(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("one")
        first = (await page(manager)).lines[-1].at
        await manager.tenant("two")
        assert {each.tenant for each in await lines(manager, since="2000-01-01T00:00:00Z", action="create_tenant")} == {"one", "two"}
        assert await lines(manager, since="2100-01-01T00:00:00+02:00") == []
        assert await lines(manager, until="2000-01-01") == []
        later = await page(manager, since=(await page(manager)).lines[-1].at)
        assert {line.record.tenant for line in later.lines} == {"two"}
        assert all(line.at >= first for line in later.lines)


@pytest.mark.parametrize(
    ("fields", "field"), [({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"since": "yesterday"}, "since"), ({"until": "x"}, "until")]
)
async def test_what_no_page_can_be_is_refused_by_name(bus: Bus, fields: dict[str, Any], field: str) -> None:
    async with small_cluster(bus) as (manager, _):
        with pytest.raises(InvalidRequest) as refused:
            await page(manager, **fields)
        assert refused.value.fields["field"] == field


async def test_a_tenant_sees_its_own_and_not_from_where_its_operator_works(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        for name in ("sales", "cs"):
            await ask(manager, admin.CreateTenant(name=name))
            await ask(manager, admin.UpdateTenant(name=name, base_allowed=False))
        await ask(manager, admin.CreateKey(tenants=("sales",), label="x"), who="key tk_sales", address="10.1.1.1")
        await ask(manager, admin.SetRouting(header="x-team", default="reject"))
        own = await lines(manager, tenant="sales", own=True)
        assert {each.tenant for each in own} == {"sales"}
        assert {each.action for each in own} == {"create_tenant", "update_tenant", "create_key"}
        assert {(each.who, each.address) for each in own} == {("operator", ""), ("key tk_sales", "10.1.1.1")}
        assert "set_routing" in {each.action for each in await lines(manager)}
        with pytest.raises(NotFound):
            await lines(manager, tenant="nobody", own=True)


async def test_a_new_tenant_of_an_old_name_sees_nothing_of_the_old_one(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        await manager.ask(admin.UpdateTenant(name="sales", base_allowed=False))
        await manager.ask(admin.DeleteTenant(name="sales"))
        await manager.tenant("sales")
        assert [each.action for each in await lines(manager, tenant="sales", own=True)] == ["create_tenant"]
        everything = [each.action for each in await lines(manager, tenant="sales")]
        assert everything == ["create_tenant", "update_tenant", "delete_tenant", "create_tenant"]


async def test_onboarding_by_event_is_told_as_its_tenants(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus) as (manager, _):
        tenant = await manager.tenant("sales", nats_password=True)
        staged = await manager.stage(adapter(tmp_path), tmp_path, bucket=adapters.uploads_bucket(tenant.tenant_id))
        for name in ("tone", "Not A Name"):
            request = OnboardAdapter(name=name, object=staged, request=name)
            await bus.js.publish(adapters.onboard_subject(tenant.tenant_id), adapters.encode(request))

        async def both_are_told() -> bool:
            told = await lines(manager, tenant="sales", own=True, action="onboard_adapter")
            return sorted(each.phase for each in told) == [Phase.DONE, Phase.REFUSED]

        await until_async(both_are_told, what="both outcomes are told")
        told = await lines(manager, action="onboard_adapter")
        assert {each.who for each in told} == {"tenant user sales"}
        assert {each.error for each in told} == {"", "invalid_request"}


async def test_a_flood_of_onboardings_that_come_to_nothing_is_told_to_a_measure(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        tenant = await manager.tenant("sales", nats_password=True)
        for number in range(150):
            request = OnboardAdapter(name="Not A Name", object="x", request=f"r{number}")
            await bus.js.publish(adapters.onboard_subject(tenant.tenant_id), adapters.encode(request))

        async def all_are_refused() -> bool:
            return len(await manager.events("sales", "Not A Name")) >= 100 and any(
                event.request == "r149" for event in await manager.events("sales", "Not A Name")
            )

        await until_async(all_are_refused, timeout_s=30, what="the last one is refused")
        assert len(await lines(manager, action="onboard_adapter")) == 120


async def test_long_requests_are_told_short(bus: Bus) -> None:
    async with small_cluster(bus) as (manager, _):
        await manager.tenant("sales")
        ceilings = {f"adapter{number}": number + 1 for number in range(5000)}
        await ask(manager, admin.UpdateTenant(name="sales", adapter_ceilings=ceilings))
        told = (await lines(manager, action="update_tenant"))[0]
        assert told.what == {"name": "sales", "adapter_ceilings": "5000 entries"}
        assert max(len(data) for data in await raw(bus)) < 4096 + 1024
        with pytest.raises(TenantryError):
            await ask(manager, admin.SetLabel(label="x" * 100_000, base="y"))
        assert max(len(data) for data in await raw(bus)) < 4096 + 1024
