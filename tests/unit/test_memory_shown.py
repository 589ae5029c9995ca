"""A worker's memory report as operators see it: `tenantry top` and the router's /metrics."""

from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily
from rich.console import Console

from services.cli import output, top
from services.router.fleet import Fleet
from services.router.memory_metrics import families, names_of
from services.router.metrics import Metrics
from services.router.routes import RouteTable
from shared.bus import Entry
from shared.contracts.adapters import encode as encode_pool
from shared.contracts.state import POOL_PREFIX, TENANT_PREFIX
from shared.contracts.state import encode as encode_state
from shared.contracts.workers import AdapterUse, MemoryReport, SlotMemory, WorkerReport
from tests.router_fakes import mount, pool_entry, tenants

GB, MB = 10**9, 10**6
MEMORY = MemoryReport(
    weights_bytes=13 * GB,
    slots_bytes=6 * GB,
    kv_cache_bytes=10 * GB,
    other_bytes=3 * GB,
    free_bytes=100 * GB,
    total_bytes=140 * GB,
    graphs_bytes=500 * MB,
    workspace_bytes=2 * GB,
    context_bytes=500 * MB,
    foreign_bytes=8 * GB,
    used_bytes=40 * GB,
    slots=(
        SlotMemory(index=0, adapter_id="ad_sales_tone_1", reserved_bytes=3 * GB, true_bytes=700 * MB),
        SlotMemory(index=1, reserved_bytes=3 * GB),
    ),
    kv_in_use={"t_sales": 40 * MB, "t_gone": 10 * MB},
    host_tier_bytes=6 * GB,
    host_tier_held_bytes=700 * MB,
)


def report(incarnation: str = "01A", worker_id: str = "w0") -> WorkerReport:
    return WorkerReport(
        worker_id=worker_id, incarnation=incarnation, pool_id="main", generation=1, state="ready", in_flight=1, waiting=0, capacity=32,
        base=AdapterUse(adapter_id="", residency="device"), memory=MEMORY,
    )  # fmt: skip


def values(found: list[GaugeMetricFamily]) -> dict[tuple[str, ...], float]:
    return {(family.name, *sample.labels.values()): sample.value for family in found for sample in family.samples}


def known_routes() -> RouteTable:
    table = RouteTable()
    entry = pool_entry(mount("tone", "sales"))
    table.apply(POOL_PREFIX + "main", Entry(value=encode_pool(entry), revision=1))
    for tenant in tenants("sales").values():
        table.apply(TENANT_PREFIX + tenant.name, Entry(value=encode_state(tenant), revision=2))
    return table


def test_every_part_of_the_report_is_a_gauge_under_the_names_people_know() -> None:
    found = values(list(families([report()], names_of(known_routes()))))
    assert found["tenantry_worker_memory_bytes", "w0", "weights"] == 13 * GB
    assert found["tenantry_worker_memory_bytes", "w0", "activations"] == 2 * GB
    assert found["tenantry_worker_memory_bytes", "w0", "other"] == 0, "graphs, activations and context are told apart"
    parts = ("weights", "slots", "kv_cache", "graphs", "activations", "context", "other", "other_processes", "free")
    assert sum(found["tenantry_worker_memory_bytes", "w0", part] for part in parts) == MEMORY.total_bytes
    assert found["tenantry_worker_slot_bytes", "w0", "0", "sales/tone@1", "true"] == 700 * MB
    assert found["tenantry_worker_slot_bytes", "w0", "1", "", "reserved"] == 3 * GB
    assert found["tenantry_worker_kv_bytes", "w0", "sales"] == 40 * MB
    assert found["tenantry_worker_kv_bytes", "w0", "t_gone"] == 10 * MB, "a tenant that is no longer known is not left out"
    assert found["tenantry_worker_host_tier_bytes", "w0", "held"] == 700 * MB


def test_only_workers_that_stand_in_a_pool_are_in_the_metrics() -> None:
    fleet = Fleet()
    for each in (report("01A"), report("01A", "w1"), report("01A", "w2")):
        fleet.reported(each, 0.0)
    fleet.registered = {"w0": "01A", "w1": "01B", "w3": "01A"}
    assert [each.worker_id for each in fleet.reports()] == ["w0"], "w1 has been replaced, w2 has left, w3 has said nothing"
    metrics = Metrics()
    metrics.workers = lambda: families(fleet.reports(), {})
    text = metrics.text().decode()
    assert 'tenantry_worker_memory_bytes{part="kv_cache",worker="w0"} 1e+10' in text
    assert "w1" not in text


def view(memory: MemoryReport) -> dict[str, Any]:
    shown = msgspec.to_builtins(msgspec.structs.replace(report(), memory=memory))
    worker = {"worker_id": "w0", "limits": {"slots": 2}, "report": shown}
    return {"pools": [{"base": "demo@" + "ab" * 32, "workers": [worker], "mounts": [msgspec.to_builtins(mount("tone", "sales"))]}]}


def printed(view: dict[str, Any], monkeypatch: Any, width: int = 160) -> list[list[str]]:
    console = Console(width=width, record=True, quiet=True, force_terminal=False)
    monkeypatch.setattr(output, "console", console)
    with console.capture() as capture:
        console.quiet = False
        console.print(top.picture(view, {}))
    return [line.split() for line in capture.get().splitlines()]


def test_top_shows_where_a_workers_memory_is_and_whose_requests_fill_the_cache(monkeypatch: Any) -> None:
    lines = printed(view(MEMORY), monkeypatch)
    head = next(line for line in lines if line[:2] == ["memory,", "MB"])
    assert " ".join(head) == "memory, MB weights slots KV cache graphs activations context others host tier free"
    row = lines[lines.index(head) + 1]
    assert row[0] == "w0"
    cache_and_slots = ["668/5,722", "48/9,537"]
    assert row[1:] == ["12,398", *cache_and_slots, "477", "1,907", "477", "7,629", "668/5,722", "95,367/133,514"]
    assert [line[0] for line in lines[lines.index(head) + 2 : lines.index(head) + 4]] == ["sales", "t_gone"]
    assert next(line for line in lines if line[:2] == ["w0", "ready"])[6:9] == ["1", "/", "2"]


def test_on_a_cpu_what_is_not_told_apart_is_shown_as_activations(monkeypatch: Any) -> None:
    memory = MemoryReport(weights_bytes=GB, other_bytes=2 * GB, free_bytes=GB, total_bytes=4 * GB)
    lines = printed(view(memory), monkeypatch)
    head = next(number for number, line in enumerate(lines) if line[:2] == ["memory,", "MB"])
    assert lines[head + 1][5] == "1,907"


def test_a_narrow_terminal_keeps_weights_slots_cache_and_what_is_free(monkeypatch: Any) -> None:
    lines = printed(view(MEMORY), monkeypatch, width=60)
    head = " ".join(next(line for line in lines if line[:2] == ["memory,", "MB"]))
    assert head == "memory, MB weights slots KV cache free"
