"""What registries add to the usage stream and take from it, on a real server: residency, ends of engines, snapshots, room."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from services.registry import usage_book
from services.registry.reports import Reports
from services.registry.settings import RegistrySettings
from services.registry.store import open_store, stamp_ms
from services.registry.usage_book import UsageBook
from services.registry.usage_keeper import UsageKeeper
from services.registry.usage_tables import get_number
from shared.bus import Bus, Entry, Mirror, follow, forget_before, open_bucket, open_objects, publish_durable, stream_state
from shared.contracts import adapters, admin, state, usage
from shared.contracts.adapters import PoolEntry
from shared.contracts.usage import USAGE_STREAM, EngineEnded, Residency, Usage, decode
from shared.contracts.usage_query import UsageReply
from shared.contracts.workers import AdapterUse, WorkerReport, report_subject
from shared.contracts.workers import encode as encode_report
from shared.errors import NotFound
from shared.policy.usage_rollup import DAY_MS
from shared.runtime import end
from tests.integration.registry_rig import POOL, QUICK, Admin, running_registry, small_cluster
from tests.integration.test_registry_adapters import adapter
from tests.integration.test_usage_projection import EVERYTHING, Projection, mixed, projecting, publish
from tests.unit.pool_values import admit, ask, pool, tenant
from tests.usage_records import attempt, outcome
from tests.waiting import until, until_async

KEEN = msgspec.structs.replace(QUICK, usage_round_s=0.05, usage_ended_s=0.3, usage_silence_s=1.0, usage_residency_s=0.2)


async def records(bus: Bus, kind: type[Usage]) -> list[Usage]:
    """All of the kind that the stream holds now."""
    last = (await stream_state(bus, USAGE_STREAM)).last
    found: list[Usage] = []
    if last:
        async with aclosing(follow(bus, USAGE_STREAM, 0)) as following:
            async for batch in following:
                found += [record for message in batch for record in decode(message.data) if isinstance(record, kind)]
                if batch[-1].sequence >= last:
                    break
    return found


async def usage_of(manager: Admin) -> UsageReply:
    return msgspec.convert(await manager.ask(EVERYTHING), UsageReply)


class Ledger:
    """Every revision of the pool's entry with the server's stamp: an account of its own of what was charged."""

    def __init__(self) -> None:
        self.revisions: list[tuple[int, PoolEntry]] = []

    def note(self, _key: str, entry: Entry | None) -> None:
        assert entry is not None
        self.revisions.append((round(entry.stamp_s * 1_000_000) // 1000, adapters.decode_pool(entry.value)))

    def charged(self) -> int:
        """Byte-milliseconds of mounts that have left by the last revision."""
        stamps = [stamp for stamp, _ in self.revisions]
        return sum(
            sum(mount.slot_bytes for mount in entry.mounts.values()) * (end - begin)
            for (begin, entry), end in zip(self.revisions, stamps[1:], strict=False)
        )


async def test_an_adapters_residency_is_what_the_ledger_held_by_the_servers_stamps(bus: Bus, tmp_path: Path) -> None:
    ledger = Ledger()
    async with small_cluster(bus, KEEN) as (manager, _), asyncio.TaskGroup() as group:
        watching = group.create_task(Mirror(bus, await open_bucket(bus, state.STATE_BUCKET), ledger.note, f"{state.POOL_PREFIX}*").run())
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await manager.add("sales", "tone", adapter(tmp_path, seed=2), tmp_path)
        await manager.in_state("sales", "tone", "unloaded", version=1)

        async def told() -> bool:
            return any(record.version == 1 and record.final for record in await records(bus, Residency)) and not (await manager.pool()).left  # type: ignore[union-attr]

        await until_async(told, what="the first version's residency is told and out of the entry")
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))

        async def all_told() -> bool:
            pool = await manager.pool()
            finals = {record.version for record in await records(bus, Residency) if record.final}  # type: ignore[union-attr]
            return finals == {1, 2} and not pool.left and not pool.charges

        await until_async(all_told, what="everything is told and out of the entry")
        rows = (await usage_of(manager)).rows
        assert {(row.tenant, row.alias, row.version) for row in rows} == {("sales", "tone", 1), ("sales", "tone", 2)}
        await until(lambda: bool(ledger.revisions) and not ledger.revisions[-1][1].left, what="the watch has seen the last revision")
        assert sum(row.amounts.adapter_byte_ms for row in rows) == ledger.charged() > 0
        await end([watching])


async def test_what_is_mounted_counts_while_it_is_and_over_a_registrys_absence(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, KEEN) as (manager, _):
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)

        async def counts() -> bool:
            return sum(row.amounts.adapter_byte_ms for row in (await usage_of(manager)).rows) > 0

        await until_async(counts, what="a checkpoint of what is held")
    before = [record.until_ms for record in await records(bus, Residency)]  # type: ignore[union-attr]
    async with running_registry(bus, KEEN):

        async def goes_on() -> bool:
            told = await records(bus, Residency)
            return max(record.until_ms for record in told) > max(before)  # type: ignore[union-attr]

        await until_async(goes_on, what="the next registry tells the same charge further")
        assert len({record.since_ms for record in await records(bus, Residency)}) == 1  # type: ignore[union-attr]


async def test_a_registry_that_dies_between_telling_and_taking_out_tells_again_and_it_counts_once(bus: Bus, tmp_path: Path) -> None:
    slow = msgspec.structs.replace(KEEN, usage_round_s=1000.0)  # the registry's own keeper tells nothing
    async with small_cluster(bus, slow) as (manager, _), projecting(bus, tmp_path / "usage.sqlite") as projection:
        await manager.tenant("sales")
        await manager.add("sales", "tone", adapter(tmp_path), tmp_path)
        await manager.ask(admin.UnloadAdapter(tenant="sales", name="tone", wait_s=10.0))
        assert len((await manager.pool()).left) == 1
        async with projection.store.mirrored():
            for step in ("residency published", "residency taken out"):
                keeper = keeper_of(projection, failpoint=dies_at(step))
                with pytest.raises(Died):
                    await keeper.tell_residency()
        finals = [record for record in await records(bus, Residency) if record.final]  # type: ignore[union-attr]
        assert len(finals) == 2
        assert finals[0] == finals[1]
        (row,) = (await projection.answer()).rows
        (told, _) = finals
        assert row.amounts.adapter_byte_ms == told.bytes * (told.until_ms - told.since_ms)  # type: ignore[union-attr]
        assert not (await manager.pool()).left


async def test_attempts_of_an_engine_that_was_replaced_are_closed_and_billed_partial(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, KEEN) as (manager, worker):
        await publish(bus, attempt("a", checkpoint=3, final=False, worker_id="w1", incarnation=worker.incarnation))
        await worker.restart()

        async def closed() -> bool:
            return sum(row.amounts.partial for row in (await usage_of(manager)).rows) == 1

        await until_async(closed, what="the attempt is closed")
        (row,) = (await usage_of(manager)).rows
        assert (row.amounts.attempts, row.amounts.completion_tokens, row.amounts.gpu_us) == (1, 12, 2100)
        assert {record.reason for record in await records(bus, EngineEnded)} == {"replaced"}  # type: ignore[union-attr]


async def test_attempts_of_an_engine_that_reports_stay_open_and_of_one_that_fell_silent_are_closed(bus: Bus, tmp_path: Path) -> None:
    async with small_cluster(bus, KEEN) as (manager, worker):
        await publish(bus, attempt("a", checkpoint=1, final=False, worker_id="w1", incarnation=worker.incarnation))
        report = WorkerReport(
            worker_id="w1", incarnation=worker.incarnation, pool_id=POOL, generation=0, state="ready", in_flight=1, waiting=0,
            capacity=4, base=AdapterUse(adapter_id="", residency="device"),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 2.5 * KEEN.usage_silence_s
        while loop.time() < until_s:
            await bus.publish(report_subject("w1"), encode_report(report))
            await asyncio.sleep(0.1)
        assert not await records(bus, EngineEnded)

        async def closed() -> bool:
            return sum(row.amounts.partial for row in (await usage_of(manager)).rows) == 1

        await until_async(closed, what="the silent engine's attempt is closed")


class Died(BaseException):
    pass


def dies_at(step: str) -> Callable[[str], None]:
    def failpoint(name: str) -> None:
        if name == step:
            raise Died

    return failpoint


def keeper_of(projection: Projection, failpoint: Callable[[str], None] = lambda _name: None, **settings: object) -> UsageKeeper:
    made = RegistrySettings(**{"usage_keep_days": 1, **settings})  # type: ignore[arg-type]
    return UsageKeeper(projection.store, projection.service, projection.snapshots, Reports(), made, "registry-1", failpoint)


class Days:
    """Moves the day that the server's stamps are taken for; without the hour of grace, so that the time of day does not matter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0
        monkeypatch.setattr(usage_book, "open_day_at", lambda stamp_ms: stamp_ms // DAY_MS + self.ahead)


@pytest.fixture
def days(monkeypatch: pytest.MonkeyPatch) -> Days:
    return Days(monkeypatch)


async def a_day(bus: Bus, days: Days, number: int, *readers: Projection) -> None:
    """Some use, and then the next day's first message."""
    await mixed(bus, 8, start=100 * number)
    for reader in readers:
        await reader.answer()
    days.ahead += 1
    await publish(bus, outcome(f"next{number}"))
    for reader in readers:
        await reader.answer()


async def test_closed_days_are_stored_once_and_cut_from_the_stream_and_a_rebuild_gives_the_same_answers(
    bus: Bus, tmp_path: Path, days: Days
) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(4):
            await a_day(bus, days, number, one)
        before = await one.answer()
        by_day = await one.answer(msgspec.structs.replace(EVERYTHING, group_by=("day", "key"), from_ms=before.to_ms - DAY_MS * 7))
        await keeper_of(one).keep_snapshots()
        stream = await stream_state(bus, USAGE_STREAM)
        assert stream.first > 1
        await mixed(bus, 3, start=900)
        after = await one.answer()
        names = await (await open_objects(bus, usage.SNAPSHOTS_BUCKET)).names()
        assert len([name for name in names if name.startswith("day.")]) == 4
        assert len([name for name in names if name.startswith("state.")]) == 1
    async with projecting(bus, tmp_path / "rebuilt.sqlite") as rebuilt:
        assert await rebuilt.answer() == after
        again = await rebuilt.answer(msgspec.structs.replace(EVERYTHING, group_by=("day", "key"), from_ms=before.to_ms - DAY_MS * 7))
        assert [row.amounts for row in by_day.rows] == [row.amounts for row in again.rows]
        days.ahead += 1
        await publish(bus, outcome("later"))
        await rebuilt.answer()
        await keeper_of(rebuilt).keep_snapshots()
    async with projecting(bus, tmp_path / "a.sqlite") as one:  # its own place was cut off meanwhile, or not: the same answers
        expected = await one.answer()
        await keeper_of(one).keep_snapshots()  # finds its own days' bytes there already
        assert await one.service.with_book(lambda book: book.pending()) == []
    async with projecting(bus, tmp_path / "third.sqlite") as third:
        assert await third.answer() == expected


@pytest.mark.parametrize("step", ["snapshot due", "snapshot stored", "snapshot marked", "stream cut"])
async def test_a_registry_that_dies_at_any_step_of_a_snapshot_loses_and_doubles_nothing(
    bus: Bus, tmp_path: Path, days: Days, step: str
) -> None:
    def failpoint(name: str) -> None:
        if name == step and armed:
            raise Died

    armed = False
    async with projecting(bus, tmp_path / "whole.sqlite") as whole:
        async with projecting(bus, tmp_path / "dying.sqlite", failpoint) as dying:
            for number in range(3):
                await a_day(bus, days, number, whole, dying)
            expected = await whole.answer()
            armed = True
            with pytest.raises(Died):
                await keeper_of(dying, failpoint).keep_snapshots()
        async with projecting(bus, tmp_path / "dying.sqlite") as again:
            await again.answer()
            await keeper_of(again).keep_snapshots()
            assert (await stream_state(bus, USAGE_STREAM)).first > 1
            assert await again.answer() == expected
        async with projecting(bus, tmp_path / "rebuilt.sqlite") as rebuilt:
            assert await rebuilt.answer() == expected


async def test_a_snapshot_that_differs_from_anothers_is_not_written_over_and_nothing_is_cut(bus: Bus, tmp_path: Path, days: Days) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(3):
            await a_day(bus, days, number, one)
        (first, *_) = await one.service.with_book(lambda book: book.pending()) or []
        bucket = await open_objects(bus, usage.SNAPSHOTS_BUCKET)
        (tmp_path / "other").write_bytes(b"what another registry closed")
        await bucket.put_file(first.name, tmp_path / "other")
        theirs = await bucket.digest(first.name)
        await keeper_of(one).keep_snapshots()
        assert await bucket.digest(first.name) == theirs
        assert (await stream_state(bus, USAGE_STREAM)).first == 1


async def test_a_registry_that_was_away_while_the_stream_was_cut_goes_on_from_the_snapshot(bus: Bus, tmp_path: Path, days: Days) -> None:
    async with projecting(bus, tmp_path / "away.sqlite") as away:
        await mixed(bus, 2, start=5000)
        await away.answer()
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(4):
            await a_day(bus, days, number, one)
        await keeper_of(one).keep_snapshots()
        expected = await one.answer()
    async with projecting(bus, tmp_path / "away.sqlite") as away:
        assert await away.answer() == expected
        assert await away.service.with_book(lambda book: get_number(book.connection, "missing")) == 0


async def test_messages_that_are_gone_and_in_no_snapshot_are_told_in_every_answer(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await mixed(bus, 1)
        await one.answer()
    await mixed(bus, 4, start=10)
    last = (await stream_state(bus, USAGE_STREAM)).last
    await forget_before(bus, USAGE_STREAM, last)
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        assert (await one.answer()).missing > 0


async def test_a_fence_leaves_charges_the_stamps_from_which_they_count(bus: Bus) -> None:
    store = await open_store(bus)
    empty = pool()
    key = state.POOL_PREFIX + empty.pool_id

    async def reserved(_: Entry | None) -> bytes:
        return adapters.encode(admit(empty, tenant(), ask()))

    await store.change(store.live, key, reserved)
    first = await store.live.stamped(key)
    assert first is not None
    assert [charge.since_ms for charge in adapters.decode_pool(first.value).charges.values()] == [0]
    await store.fence_pool(empty.pool_id)
    fenced = await store.live.stamped(key)
    assert fenced is not None
    assert fenced.revision > first.revision
    assert [charge.since_ms for charge in adapters.decode_pool(fenced.value).charges.values()] == [stamp_ms(first.stamp_s)]


async def test_a_stream_made_anew_begins_a_new_book_and_the_old_one_is_kept_aside(bus: Bus, tmp_path: Path) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await mixed(bus, 5)
        assert (await one.sums())["requests"] == 5
    await bus.js.delete_stream(USAGE_STREAM)
    await open_store(bus)
    await mixed(bus, 2, start=10)
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        assert (await one.sums())["requests"] == 2
    kept = UsageBook(tmp_path / "a.sqlite.earlier")
    assert kept.sequence > 5
    kept.close()


async def test_snapshots_of_an_earlier_stream_are_not_taken_for_those_of_one_made_anew(bus: Bus, tmp_path: Path, days: Days) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        for number in range(2):
            await a_day(bus, days, number, one)
        await keeper_of(one).keep_snapshots()
        earlier = (await stream_state(bus, USAGE_STREAM)).last
    await bus.js.delete_stream(USAGE_STREAM)
    await open_store(bus)
    await mixed(bus, earlier, start=5000)
    assert (await stream_state(bus, USAGE_STREAM)).last > earlier
    for file in ("a.sqlite", "fresh.sqlite"):
        async with projecting(bus, tmp_path / file) as reading:
            assert (await reading.sums())["requests"] == earlier
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await a_day(bus, days, 9, one)
        assert await one.service.with_book(lambda book: book.pending())
        await keeper_of(one).keep_snapshots()
        assert not await one.service.with_book(lambda book: book.pending())


async def test_a_tenant_deleted_in_mid_month_keeps_its_usage_and_its_successor_of_the_name_sees_none_of_it(
    bus: Bus, tmp_path: Path
) -> None:
    async with running_registry(bus, KEEN):
        manager = Admin(bus)
        first = await manager.tenant("hr")
        await publish(bus, attempt("a", tenant_id=first.tenant_id, tenant="hr"), attempt("b", tenant_id=first.tenant_id, tenant="hr"))
        await manager.ask(admin.DeleteTenant(name="hr"))

        async def rows(**asked: object) -> list[tuple[str, str, int]]:
            request = msgspec.structs.replace(EVERYTHING, group_by=("tenant",), **asked)
            reply = msgspec.convert(await manager.ask(request), UsageReply)
            return [(row.tenant_id, row.tenant, row.amounts.attempts) for row in reply.rows]

        assert await rows(tenant="hr") == await rows(tenant=first.tenant_id) == await rows() == [(first.tenant_id, "hr", 2)]
        with pytest.raises(NotFound):
            await rows(tenant="hr", own=True)
        second = await manager.tenant("hr")
        assert await rows(tenant="hr", own=True) == []
        await publish(bus, attempt("c", tenant_id=second.tenant_id, tenant="hr"))
        assert await rows(tenant="hr", own=True) == [(second.tenant_id, "hr", 1)]
        assert sorted(await rows(tenant="hr")) == sorted([(first.tenant_id, "hr", 2), (second.tenant_id, "hr", 1)])


async def test_two_registries_of_one_cluster_answer_alike(bus: Bus, tmp_path: Path) -> None:
    """Whoever is asked: requests go to either by turns."""
    async with small_cluster(bus, KEEN) as (manager, worker), running_registry(bus, KEEN):
        await mixed(bus, 20)
        await publish(bus, attempt("open", checkpoint=1, final=False, worker_id="w1", incarnation=worker.incarnation))
        answers = {msgspec.json.encode((await usage_of(manager)).rows) for _ in range(20)}
        assert len(answers) == 1


async def test_a_stream_larger_than_it_should_be_is_warned_of(bus: Bus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with projecting(bus, tmp_path / "a.sqlite") as one:
        await publish_durable(bus, "tenantry.v1.usage.worker.w0", b"x" * 4096)
        await one.answer()
        await keeper_of(one, usage_warn_bytes=1 << 20).keep_snapshots()
        assert "usage.stream_large" not in capsys.readouterr().out
        await keeper_of(one, usage_warn_bytes=1024).keep_snapshots()
        assert "usage.stream_large" in capsys.readouterr().out
