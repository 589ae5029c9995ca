"""What `apply` decides to do: only what differs, and the same file twice is nothing."""

from pathlib import Path
from typing import Any

import msgspec

from services.cli.manifest import MB, Manifest, parse
from services.cli.plan import AddTenant, ChangeRouting, ChangeTenant, LeftAlone, Local, Missing, Mount, Step, Unchanged, Upload, plan
from shared.contracts.admin import AdapterView, TenantView
from shared.contracts.state import Routing, RoutingDefault
from shared.contracts.tenancy import TenantLimits

TEXT = """\
adapters:
  - {name: one, tenant: sales, vram_quota_mb: 100, default: true}
  - {name: two, tenant: sales, vram_quota_mb: 50}
tenants:
  - {name: sales, upgrade_headroom_mb: 20}
routing: {header: x-tenant, default: base_only}
"""
ROUTING = Routing(header="x-tenant", default=RoutingDefault.BASE_ONLY)


def adapter(name: str, **changes: Any) -> AdapterView:
    fields: dict[str, Any] = {
        "tenant": "sales", "name": name, "version": 1, "adapter_id": f"ad_{name}", "digest": f"sha256:{name}", "state": "ready",
        "serving": True, "pool_id": "main", "base": "b@1", "base_label": "b", "provenance": "alias", "worker_id": "w", "rank": 8,
        "rank_class": 8, "slot_bytes": 1, "true_bytes": 1, "size_bytes": 1, "modules": 1,
    }  # fmt: skip
    return AdapterView(**(fields | changes))


def tenant(**changes: Any) -> TenantView:
    fields: dict[str, Any] = {
        "tenant_id": "t_1", "name": "sales", "vram_quota_bytes": 150 * MB, "vram_held_bytes": 0, "upgrade_headroom_bytes": 20 * MB,
        "adapters": 2, "base_allowed": True, "default_adapter": "one", "adapter_ceilings": {"one": 100 * MB, "two": 50 * MB},
    }  # fmt: skip
    return TenantView(**(fields | changes))


def steps(
    *,
    manifest: Manifest | None = None,
    tenants: list[TenantView] | None = None,
    adapters: list[AdapterView] | None = None,
    uploaded: list[AdapterView] | None = None,
    routing: Routing = ROUTING,
    local: dict[str, Local] | None = None,
) -> list[Step]:
    manifest = manifest or parse(TEXT, "t")
    places = local if local is not None else {entry.name: here(entry.name) for entry in manifest.adapters}
    return plan(
        manifest,
        tenants=[tenant()] if tenants is None else tenants,
        adapters=[adapter("one"), adapter("two")] if adapters is None else adapters,
        uploaded=uploaded or [],
        routing=routing,
        local={("sales", name): place for name, place in places.items()},
    )


def here(name: str, digest: str | None = None) -> Local:
    return Local(path=Path(f"adapters/{name}"), present=True, digest=f"sha256:{name}" if digest is None else digest)


def gone(name: str) -> Local:
    return Local(path=Path(f"adapters/{name}"), present=False)


def test_what_stands_already_makes_no_step() -> None:
    assert all(isinstance(step, Unchanged) for step in steps())


def test_on_an_empty_registry_tenants_come_first_then_routing_adapters_and_the_default() -> None:
    made = steps(tenants=[], adapters=[], routing=Routing())
    assert [type(step) for step in made] == [AddTenant, ChangeTenant, ChangeRouting, Upload, Upload, ChangeTenant]
    add, ceilings, _, _, _, default = made
    assert isinstance(add, AddTenant)
    assert (add.vram_quota_mb, add.upgrade_headroom_mb) == (150, 20)
    assert isinstance(ceilings, ChangeTenant)
    assert ceilings.changes == {"adapter_ceilings": {"one": 100 * MB, "two": 50 * MB}}
    assert isinstance(default, ChangeTenant)
    assert default.changes == {"default_adapter": "one"}


def test_only_the_field_that_differs_is_changed_and_it_is_said() -> None:
    made = [step for step in steps(tenants=[tenant(vram_quota_bytes=1 * MB)]) if isinstance(step, ChangeTenant)]
    assert [step.changes for step in made] == [{"vram_quota_bytes": 150 * MB}]
    assert "1 -> 150 MB" in made[0].said


def test_other_adapters_ceilings_of_the_same_tenant_are_kept() -> None:
    known = {"one": 100 * MB, "two": 7 * MB, "other": 9 * MB}
    made = [step for step in steps(tenants=[tenant(adapter_ceilings=known)]) if isinstance(step, ChangeTenant)]
    assert made[0].changes == {"adapter_ceilings": {"one": 100 * MB, "two": 50 * MB, "other": 9 * MB}}


def test_other_files_under_the_same_name_are_uploaded() -> None:
    made = steps(local={"one": here("one", "sha256:new"), "two": here("two")})
    assert [type(step) for step in made] == [Upload, Unchanged]


def test_files_that_are_on_trial_already_are_left_to_their_trial() -> None:
    trial = adapter("one", version=2, digest="sha256:new", serving=False, on_trial=True)
    made = steps(adapters=[adapter("one"), trial, adapter("two")], local={"one": here("one", "sha256:new"), "two": here("two")})
    assert [(type(step), step.view.version) for step in made if isinstance(step, Unchanged)] == [(Unchanged, 1), (Unchanged, 1)]
    assert len(made) == 2


def test_an_archive_whose_digest_is_not_known_here_is_uploaded() -> None:
    assert [type(step) for step in steps(local={"one": here("one", ""), "two": here("two")})] == [Upload, Unchanged]


def test_the_same_files_that_are_no_longer_mounted_are_uploaded_again() -> None:
    made = steps(adapters=[adapter("two")], uploaded=[adapter("one", state="unloaded", serving=False)])
    assert [type(step) for step in made] == [Upload, Unchanged]


def test_without_a_folder_what_was_uploaded_before_is_mounted() -> None:
    made = steps(
        adapters=[adapter("two")],
        uploaded=[adapter("one", state="unloaded", serving=False)],
        local={"one": gone("one"), "two": here("two")},
    )
    assert [type(step) for step in made] == [Mount, Unchanged]


def test_without_a_folder_what_serves_stays() -> None:
    assert [type(step) for step in steps(local={"one": gone("one"), "two": gone("two")})] == [Unchanged, Unchanged]


def test_neither_a_folder_nor_an_upload_is_missing_and_names_the_folder() -> None:
    made = steps(adapters=[adapter("two")], local={"one": gone("one"), "two": here("two")})
    missing = made[0]
    assert isinstance(missing, Missing)
    assert missing.tried == Path("adapters/one")


def test_another_tenant_s_upload_of_the_same_name_does_not_count() -> None:
    made = steps(adapters=[adapter("two")], uploaded=[adapter("one", tenant="cs")], local={"one": gone("one"), "two": here("two")})
    assert isinstance(made[0], Missing)


def test_another_base_in_the_file_brings_the_adapter_again() -> None:
    manifest = parse(TEXT.replace("name: two,", "name: two, base: c@2,"), "t")
    assert [type(step) for step in steps(manifest=manifest)] == [Unchanged, Upload]


def test_adapters_that_the_file_does_not_name_are_left_alone_and_said() -> None:
    made = steps(adapters=[adapter("one"), adapter("two"), adapter("three")])
    assert made[-1] == LeftAlone(tenant="sales", name="three")


LIMITED = TEXT.replace("upgrade_headroom_mb: 20", "upgrade_headroom_mb: 20, max_concurrent: 4, kv_quota_mb: 10, weight: 2")


def test_limits_that_differ_are_changed_and_said_and_those_not_written_stay() -> None:
    manifest = parse(LIMITED, "t")
    held = TenantLimits(max_concurrent=8, weight=2, requests_per_minute=60)
    (change,) = [step for step in steps(manifest=manifest, tenants=[tenant(limits=held)]) if isinstance(step, ChangeTenant)]
    assert change.changes == {"limits": {"max_concurrent": 4, "kv_quota_bytes": 10 * MB}}
    assert change.said == "kv_quota_mb None -> 10, max_concurrent 8 -> 4"
    after = msgspec.structs.replace(held, max_concurrent=4, kv_quota_bytes=10 * MB)
    assert not [step for step in steps(manifest=manifest, tenants=[tenant(limits=after)]) if isinstance(step, ChangeTenant)]


def test_a_new_tenant_is_added_with_its_limits_in_one_step() -> None:
    found = steps(manifest=parse(LIMITED, "t"), tenants=[])
    (add,) = [step for step in found if isinstance(step, AddTenant)]
    assert add.limits == {"max_concurrent": 4, "kv_quota_bytes": 10 * MB, "weight": 2}
    assert all("limits" not in step.changes for step in found if isinstance(step, ChangeTenant))
