"""Usage as managers and tenants see it: over HTTP through a real router, and from the command line, answered by a real projection."""

import asyncio
import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from services.cli.__main__ import app
from services.cli.client import Client
from shared.bus import Message
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin, state
from shared.contracts.errors import to_info
from shared.contracts.usage_query import GetUsage
from shared.errors import TenantryError
from tests.integration.test_usage_projection import Projection, projecting, publish
from tests.router_fakes import ADMIN_KEY, Cluster, cluster, until
from tests.usage_records import GIB, attempt, engine, outcome, residency

SALES_ADMIN = "sk-sales-admin"
PRICES = """
currency: EUR
periods:
  - from: 2020-01-01
    prompt_per_1k: 0.5
    cached_per_1k: 0.1
    output_per_1k: 1.5
    gpu_per_s: 2
    kv_per_gb_hour: 0
    adapter_per_gb_hour: 12
"""


SINCE = (datetime.now(UTC) - timedelta(days=3)).date().isoformat()


class Rig:
    def __init__(self, running: Cluster, projection: Projection) -> None:
        self.running = running
        self.projection = projection
        self.url = f"http://127.0.0.1:{running.port}"

    async def hear(self, message: Message) -> None:
        request = admin.decode_asked(message.data).request
        service = self.projection.service
        try:
            result = await (service.usage(request) if isinstance(request, GetUsage) else service.engines(request))  # type: ignore[arg-type]
            reply = admin.Reply(result=msgspec.to_builtins(result))
        except TenantryError as error:
            reply = admin.Reply(error=to_info(error))
        await self.running.registry.bus.publish(message.reply, admin.encode(reply))

    async def get(self, path: str, key: str = ADMIN_KEY) -> tuple[int, Any]:
        response = await self.running.client.get(f"/admin/v1{path}", headers={"authorization": f"Bearer {key}"})
        return response.status_code, response.json()

    async def tenantry(self, *arguments: str, key: str = ADMIN_KEY) -> Result:
        env = {"TENANTRY_ADMIN_KEY": key, "TENANTRY_URL": self.url, "COLUMNS": "200"}
        return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=env)


@pytest.fixture
async def rig(nats_server: EmbeddedNats, tmp_path: Path) -> AsyncIterator[Rig]:
    async with cluster(nats_server) as running:
        bus = running.registry.bus
        scopes = (state.Scope.ADMIN,)
        await running.registry.put_key(SALES_ADMIN, state.ApiKey(key_id="k9", label="", tenants=("sales",), scopes=scopes))
        async with projecting(bus, tmp_path / "usage.sqlite") as projection:
            made = Rig(running, projection)
            await bus.subscribe(admin.ADMIN_SUBJECT, made.hear)
            await publish(bus, attempt("a"), attempt("b", alias="tone", version=2, digest="sha256:bb", key_id="k2"))
            await publish(bus, outcome("a"), outcome("b", version=2, digest="sha256:bb", key_id="k2", outcome="client_gone"))
            await publish(bus, attempt("c", tenant_id="t_cs", tenant="cs", alias="=help"), engine(2))
            await publish(bus, outcome("c", tenant_id="t_cs", tenant="cs", alias="=help"))
            await publish(bus, outcome("d", tenant_id="t_gone", tenant="gone", outcome="error:queue_full"))
            now_ms = round(running.router.table.clock.unix_s() * 1000)
            await publish(bus, residency(now_ms - 7_200_000, now_ms - 3_600_000, bytes=GIB))

            async def knows_key() -> bool:
                return (await made.get("/usage", SALES_ADMIN))[0] == 200

            await until(knows_key)
            yield made


async def test_usage_is_summed_by_what_is_asked_for(rig: Rig) -> None:
    status, found = await rig.get(f"/usage?group_by=tenant&from={SINCE}")
    assert status == 200
    shown = {row["tenant"]: row["shown"] for row in found["rows"]}
    assert {name: row["requests"] for name, row in shown.items()} == {"cs": 1, "gone": 1, "sales": 2}
    assert shown["sales"]["output_tokens"] == 8
    assert (shown["sales"]["adapter_gb_hours"], shown["sales"]["queue_ms_mean"]) == (1.0, 1.5)
    assert {row["tenant"]: row["outcomes"] for row in found["rows"]}["gone"] == {"error:queue_full": 1}
    _, by_version = await rig.get(f"/usage?group_by=version&tenant=sales&from={SINCE}")
    assert [(row["alias"], row["version"], row["amounts"].get("attempts")) for row in by_version["rows"]] == [
        ("tone", 1, 1),
        ("tone", 2, 1),
    ]
    _, by_key = await rig.get(f"/usage?group_by=key,day&from={SINCE}")
    assert {(row["key_id"], row["amounts"].get("requests", 0)) for row in by_key["rows"]} == {("k1", 3), ("k2", 1), ("", 0)}
    assert len({row["day"] for row in by_key["rows"]}) in (1, 2)


async def test_a_tenants_own_key_sees_its_own_and_nothing_else(rig: Rig) -> None:
    for path in ("/usage?group_by=tenant,key", "/usage?group_by=tenant&tenant=sales"):
        status, found = await rig.get(path, SALES_ADMIN)
        assert status == 200
        assert {row["tenant"] for row in found["rows"]} == {"sales"}
    assert (await rig.get("/usage?tenant=cs", SALES_ADMIN))[0] == 404
    assert (await rig.get("/usage?tenant=t_cs", SALES_ADMIN))[0] == 404
    assert (await rig.get("/usage/engines", SALES_ADMIN))[0] == 401
    assert (await rig.get("/usage", "sk-sales"))[0] == 403  # the scope infer alone
    assert (await rig.get("/usage", "sk-gateway"))[0] in (403, 404)


async def test_a_new_tenant_of_an_old_name_does_not_see_what_was_used_under_it_before(rig: Rig) -> None:
    await publish(rig.running.registry.bus, outcome("e", tenant_id="t_sales_before", tenant="sales"))
    _, found = await rig.get("/usage?group_by=tenant", SALES_ADMIN)
    assert [row["tenant_id"] for row in found["rows"]] == ["t_sales"]
    _, all_of_it = await rig.get("/usage?group_by=tenant&tenant=sales")
    assert {row["tenant_id"] for row in all_of_it["rows"]} == {"t_sales", "t_sales_before"}


async def test_a_deleted_tenant_is_asked_for_by_its_last_name_or_its_id(rig: Rig) -> None:
    for name in ("gone", "t_gone"):
        _, found = await rig.get(f"/usage?tenant={name}")
        assert [(row["tenant_id"], row["tenant"]) for row in found["rows"]] == [("t_gone", "gone")]
    assert (await rig.get("/usage?tenant=never"))[0] == 404


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("from=yesterday", "neither a date"),
        ("from=2026-11-30T12:00:00", "no offset"),
        ("from=2026-11-30T12:01:00Z", "quarters of an hour"),
        ("from=2026-11-30&to=2026-11-30", "ends before it begins"),
        ("group_by=colour", "is not one of"),
        ("zone=Mars/Olympus", "no time zone"),
        ("group_by=day&from=1980-01-01", "at most 800 days"),
    ],
)
async def test_a_question_that_means_nothing_is_a_400_that_says_why(rig: Rig, query: str, problem: str) -> None:
    status, found = await rig.get(f"/usage?{query}")
    assert status == 400
    assert problem in found["error"]["message"]


async def test_engines_time_is_shown_in_its_parts(rig: Rig) -> None:
    _, found = await rig.get("/usage/engines")
    (row,) = found["rows"]
    assert (row["shown"]["busy_percent"], row["shown"]["idle_percent"], row["shown"]["unaccounted_percent"]) == (60.0, 30.0, 0.1)
    printed = await rig.tenantry("usage", "engines")
    assert printed.exit_code == 0, printed.output
    assert "60.00%" in printed.stdout
    assert "overhead of w0: schedule 198 ms" in printed.stdout


async def test_the_command_prints_tables_csv_and_json(rig: Rig) -> None:
    printed = await rig.tenantry("usage", "--group-by", "adapter")
    assert printed.exit_code == 0, printed.output
    assert "total" in printed.stdout
    assert "not complete: client_gone 1, error:queue_full 1" in printed.stdout
    rows = list(csv.DictReader(io.StringIO((await rig.tenantry("usage", "--group-by", "adapter", "--format", "csv")).stdout)))
    assert {row["adapter"] for row in rows} == {"tone", "'=help"}
    await publish(rig.running.registry.bus, outcome("nothing", alias="", base="", version=0, adapter_id="", digest=""))
    await publish(rig.running.registry.bus, outcome("base", alias="", version=0, adapter_id="", digest="", outcome="error:queue_full"))
    rows = list(csv.DictReader(io.StringIO((await rig.tenantry("usage", "--group-by", "adapter", "--format", "csv")).stdout)))
    assert {row["adapter"] for row in rows if row["tenant"] == "sales"} == {"tone", "(base)", "(none)"}
    as_json = msgspec.json.decode((await rig.tenantry("usage", "--format", "json")).stdout)
    assert {row["tenant"] for row in as_json["rows"]} == {"cs", "gone", "sales"}
    own = await rig.tenantry("usage", "--format", "csv", key=SALES_ADMIN)
    assert "sales" in own.stdout
    assert "cs" not in own.stdout
    refused = await rig.tenantry("usage", "--from", "tomorrow")
    assert (refused.exit_code, "neither a date" in str(refused.exception)) == (1, True)


async def test_prices_make_the_same_bill_by_whatever_it_is_told_apart(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    totals: set[str] = set()
    options = ("--prices", str(tmp_path / "prices.yaml"), "--from", SINCE)
    for group_by in ("tenant", "key", "day", "version,key"):
        printed = await rig.tenantry("usage", *options, "--group-by", group_by, "--format", "json")
        assert printed.exit_code == 0, printed.output
        bill = msgspec.json.decode(printed.stdout)
        assert sum(Decimal(amount) for amount in bill["amounts"]) == Decimal(bill["total"])
        totals.add(bill["total"])
    assert totals == {"12.03"}  # 12 for one GB-hour; sales 0.01 for its prompts and 0.01 for its output, cs 0.01 for its output
    table = await rig.tenantry("usage", *options)
    assert "12.03 EUR" in table.stdout


async def test_a_statement_is_a_page_and_a_csv_whose_lines_add_up(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    await publish(rig.running.registry.bus, attempt("x", alias="<script>alert(1)</script>"), attempt("y", key_id="<b>"))
    with Client(rig.url, ADMIN_KEY) as client:
        reply = await asyncio.to_thread(lambda: client.usage(group_by=("day",)))
    month = reply.rows[-1].day[:7]
    options = ("--month", month, "--prices", str(tmp_path / "prices.yaml"), "--out", str(tmp_path / "out"))
    printed = await rig.tenantry("statement", "sales", *options, key=SALES_ADMIN)
    assert printed.exit_code == 0, printed.output
    page = (tmp_path / "out" / f"statement-sales-{month}.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<b>" not in page
    assert not any(asset in page for asset in ("http://", "https://", "<link", "<img", "url("))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / f"statement-sales-{month}.csv").read_text())))
    total = sum(Decimal(row["amount"]) for row in rows)
    assert f"{total} EUR" in printed.stdout
    assert f"{total} EUR" in page
    refused = await rig.tenantry("statement", "cs", *options, key=SALES_ADMIN)
    assert refused.exit_code == 1
    assert (await rig.tenantry("statement", "sales", "--month", "2026-13", *options[2:])).exit_code == 1


async def test_one_name_that_several_tenants_have_had_needs_the_id_for_a_statement(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    await publish(rig.running.registry.bus, attempt("z", tenant_id="t_sales_before", tenant="sales"))
    with Client(rig.url, ADMIN_KEY) as client:
        month = (await asyncio.to_thread(lambda: client.usage(group_by=("day",)))).rows[-1].day[:7]
    options = ("--month", month, "--prices", str(tmp_path / "prices.yaml"), "--out", str(tmp_path))
    refused = await rig.tenantry("statement", "sales", *options)
    assert "several tenants have been called sales" in str(refused.exception)
    assert (await rig.tenantry("statement", "t_sales_before", *options)).exit_code == 0
