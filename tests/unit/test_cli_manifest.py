"""The YAML form: what is accepted, and that every refusal names file, line and key."""

import itertools
from pathlib import Path

import pytest

from services.cli import limits
from services.cli.manifest import MB, parse, read
from services.cli.up_options import DEMO
from shared.contracts.state import Routing, RoutingDefault
from shared.errors import ConfigInvalid

AS_ASKED = """\
adapters:
  - name: lora_sales
    tenant: sales
    vram_quota_mb: 1200
  - name: lora_cs
    tenant: cs
    vram_quota_mb: 1200
routing:
  header: x-tenant
  default: base_only
"""


def test_the_form_that_was_asked_for_is_accepted_as_it_is() -> None:
    manifest = parse(AS_ASKED, "t.yaml")
    assert [(entry.name, entry.tenant, entry.vram_quota_mb) for entry in manifest.adapters] == [
        ("lora_sales", "sales", 1200),
        ("lora_cs", "cs", 1200),
    ]
    assert manifest.routing == Routing(header="x-tenant", default=RoutingDefault.BASE_ONLY)
    assert manifest.tenant_names == ("sales", "cs")


def test_the_demo_s_file_names_three_tenants() -> None:
    manifest = parse((DEMO / "tenantry.yaml").read_text(), "tenantry.yaml")
    assert set(manifest.tenant_names) == {"sales", "cs", "finance"}


def test_a_tenant_s_quota_is_the_sum_of_its_entries_and_each_is_its_adapter_s_ceiling() -> None:
    manifest = parse(
        AS_ASKED.replace("tenant: cs", "tenant: sales").replace("vram_quota_mb: 1200\nrouting", "vram_quota_mb: 300\nrouting"), "t"
    )
    assert manifest.quota_bytes("sales") == 1500 * MB
    assert manifest.ceilings("sales") == {"lora_sales": 1200 * MB, "lora_cs": 300 * MB}


def test_a_file_without_routing_leaves_the_routing_as_it_is() -> None:
    assert parse(AS_ASKED.split("routing:")[0], "t").routing is None


LIMITED = (
    AS_ASKED
    + """\
tenants:
  - name: sales
    kv_quota_mb: 512
    max_concurrent: 8
    tokens_per_minute: null
    burst: true
    queue_deadline_s: 2.5
    cache_group: family
"""
)


def test_a_tenant_s_limits_stand_beside_its_name_and_what_is_not_written_stays() -> None:
    (entry,) = parse(LIMITED, "t").tenants
    assert entry.limits == {
        "kv_quota_bytes": 512 * MB,
        "max_concurrent": 8,
        "tokens_per_minute": None,
        "burst": True,
        "queue_deadline_s": 2.5,
        "cache_group": "family",
    }


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        *itertools.product(sorted(set(limits.NAMES) - {"cache_group"}), ["-1", "many", "1000000000000000000000000000000", "[]", ".nan"]),
        *itertools.product(["cache_group"], ["-1", "Many", "two words", "[]", "7"]),
    ],
)
def test_a_wrong_limit_in_the_file_is_refused_by_its_line_and_name(limit: str, value: str) -> None:
    text = f"tenants:\n  - name: sales\n    {limit}: {value}\n"
    with pytest.raises(ConfigInvalid, match=rf"t.yaml:[23]: tenants\[0\]\.{limit} is ") as caught:
        parse(text, "t.yaml")
    assert len(caught.value.message) < 300


REFUSED = [
    ("adapters:\n  - name: a\n    tenant: t\n    vram_quota_mb: 1\n    vram_quota_gb: 2\n", "t.yaml:5", "vram_quota_gb"),
    ("adapters: []\nadaptors: []\n", "t.yaml:2", "adaptors"),
    ("adapters:\n  - name: a\n    vram_quota_mb: 1\n", "t.yaml:2", "tenant"),
    ("adapters:\n  - name: a\n    tenant: t\n    vram_quota_mb: lots\n", "t.yaml:4", "vram_quota_mb"),
    ("adapters:\n  - name: a\n    tenant: t\n    vram_quota_mb: 0\n", "t.yaml:2", "above 0"),
    ("adapters:\n  - name: a\n    tenant: t\n    vram_quota_mb: 1\n    name: b\n", "t.yaml:5", "twice"),
    ("adapters:\n  - name: ../a\n    tenant: t\n    vram_quota_mb: 1\n", "t.yaml:2", "../a"),
    ("adapters:\n  - {name: a, tenant: t, vram_quota_mb: 1}\n  - {name: a, tenant: t, vram_quota_mb: 1}\n", "t.yaml:3", "stands twice"),
    (
        "adapters:\n  - {name: a, tenant: t, vram_quota_mb: 1, default: true}\n  - {name: b, tenant: t, vram_quota_mb: 1, default: true}\n",
        "t.yaml:3",
        "two adapters",
    ),
    ("routing:\n  default: base\n", "t.yaml:2", "routing.default"),
    ("routing:\n  header: 'x tenant'\n", "t.yaml:2", "header"),
    ("tenants:\n  - name: t\n    upgrade_headroom_mb: -1\n", "t.yaml:2", "0 or more"),
    ("tenants:\n  - name: t\n    base_allowed: perhaps\n", "t.yaml:3", "base_allowed"),
    ("adapters: {name: a}\n", "t.yaml:1", "list"),
    ("- a\n- b\n", "t.yaml:1", "keys"),
    ("adapters: [\n", "t.yaml:2", "not YAML"),
    ("", "t.yaml:1", "empty"),
]


@pytest.mark.parametrize(("text", "where", "word"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_does_not_have_the_form_is_refused_with_its_line(text: str, where: str, word: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse(text, "t.yaml")
    assert caught.value.message.startswith(where)
    assert word in caught.value.message


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"none\.yaml: cannot be read"):
        read(tmp_path / "none.yaml")
