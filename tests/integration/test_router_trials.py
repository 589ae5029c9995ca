"""A router's split on the wire: what answers, what is counted of it, and what the registries are told."""

import asyncio
import math

import httpx
import msgspec
import pytest

from shared.bus import BusSettings, Message, connect
from shared.bus.embedded import EmbeddedNats
from shared.contracts import canary as contract
from shared.contracts.adapters import Canary, CanaryBy, PoolEntry
from shared.contracts.inference import FrameKind
from shared.policy.canary_stop import Counts, plus
from tests.router_fakes import SALES_KEY, Attempt, Cluster, cluster, mount, pool_entry
from tests.waiting import until

STABLE, TRIAL = mount("tone", "sales"), msgspec.structs.replace(mount("tone", "sales", version=2), on_trial=True)


def entry(share_ppm: int, by: CanaryBy = CanaryBy.REQUEST) -> PoolEntry:
    made = pool_entry(STABLE, TRIAL, aliases={"sales": {"tone": STABLE.adapter_id}})
    return msgspec.structs.replace(made, canaries={"sales": {"tone": Canary(adapter_id=TRIAL.adapter_id, share_ppm=share_ppm, by=by)}})


class Heard:
    """The newest row of each version, as a registry keeps it."""

    def __init__(self) -> None:
        self.rows: dict[str, contract.VersionCounts] = {}
        self.numbers: dict[str, list[int]] = {}

    def __call__(self, message: Message) -> None:
        for row in contract.decode_counts(message.data).versions:
            assert row.trial == TRIAL.adapter_id
            self.rows[row.adapter_id] = row
            self.numbers.setdefault(row.adapter_id, []).append(row.number)

    def counts(self, adapter_id: str) -> Counts:
        row = self.rows.get(adapter_id)
        if row is None:
            return Counts()
        return Counts(requests=row.requests, errors=row.errors, refused=row.refused, first_byte=row.first_byte)

    @property
    def total(self) -> int:
        return plus(self.counts(STABLE.adapter_id), self.counts(TRIAL.adapter_id)).requests


async def asked(running: Cluster, many: int, *, stream: bool = False) -> list[str]:
    found = [await running.ask(stream=stream) for _ in range(many)]
    return [answer.headers.get("x-tenantry-adapter", "") for answer in found]


async def test_a_share_of_requests_is_answered_by_the_trial_and_counted_for_the_registries(nats_server: EmbeddedNats) -> None:
    heard = Heard()
    async with cluster(nats_server, entry=entry(300_000)) as running:
        bus = await connect(BusSettings(url=nats_server.url, name="registry"))
        await bus.subscribe(contract.COUNTS_SUBJECTS, heard)
        await bus.flush()
        went = await asked(running, 200)
        on_trial = went.count("tone@2")
        assert abs(on_trial - 60) <= 4 * math.sqrt(200 * 0.3 * 0.7)
        await until(lambda: heard.total == 200, what="all are told")
        assert heard.counts(TRIAL.adapter_id).requests == on_trial
        assert (heard.counts(TRIAL.adapter_id).errors, heard.counts(STABLE.adapter_id).errors) == (0, 0)
        assert sum(heard.counts(TRIAL.adapter_id).first_byte.values()) == on_trial
        for numbers in heard.numbers.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        await bus.close()


async def test_failed_answers_and_broken_streams_are_errors_and_what_a_client_did_itself_is_not_counted(nats_server: EmbeddedNats) -> None:
    heard = Heard()
    async with cluster(nats_server, entry=entry(1_000_000, CanaryBy.HEADER)) as running:
        begun = asyncio.Event()

        async def trial_breaks(attempt: Attempt) -> None:
            """The version on trial fails every answer: before its head, or in mid-stream."""
            if attempt.request.handle.version == 1:
                await attempt.answer()
                return
            await attempt.accept()
            if attempt.request.stream:
                await attempt.head()
                await attempt.token("one")
                await begun.wait()
            await attempt.error("engine_error")

        running.worker.behaviour = trial_breaks
        bus = await connect(BusSettings(url=nats_server.url, name="registry"))
        await bus.subscribe(contract.COUNTS_SUBJECTS, heard)
        await bus.flush()
        on_trial = {"headers": {"x-tenantry-canary": "1"}}
        whole = await running.ask(**on_trial)
        assert whole.status_code == 500
        headers = {"authorization": f"Bearer {SALES_KEY}", "x-tenantry-canary": "1"}
        body = {"model": "tone", "stream": True}
        with pytest.raises(httpx.RemoteProtocolError):
            async with running.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as broken:
                assert broken.headers["x-tenantry-adapter"] == "tone@2"
                begun.set()
                await broken.aread()
        assert (await running.ask()).headers["x-tenantry-adapter"] == "tone@1"
        running.worker.behaviour = refuses
        assert (await running.ask(**on_trial)).status_code == 429
        running.worker.behaviour = finds_a_mistake
        assert (await running.ask(**on_trial)).status_code == 400
        await until(lambda: heard.counts(TRIAL.adapter_id).refused == 1, what="what the engine refused is counted apart")
        await until(lambda: heard.total == 3, what="two failures and the stable answer")
        trial = heard.counts(TRIAL.adapter_id)
        assert (trial.requests, trial.errors, trial.refused) == (2, 2, 1)
        assert heard.counts(STABLE.adapter_id).errors == 0
        await bus.close()


async def finds_a_mistake(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.head(400, "application/json")
    await attempt.say(FrameKind.BODY, b'{"error":{}}')
    await attempt.end()


async def refuses(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.error("concurrency_exceeded")


async def test_a_request_that_is_tried_again_stays_with_its_version(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, entry=entry(500_000)) as running:

        async def bounces_once(attempt: Attempt) -> None:
            await (attempt.answer() if attempt.request.attempt > 1 else attempt.bounce("full"))

        running.worker.behaviour = bounces_once
        for _ in range(20):
            assert (await running.ask()).status_code == 200
        versions: dict[str, set[int]] = {}
        for attempt in running.worker.attempts:
            versions.setdefault(attempt.request.request_id, set()).add(attempt.request.handle.version)
        assert len(versions) == 20
        assert all(len(each) == 1 for each in versions.values())
        assert {version for each in versions.values() for version in each} == {1, 2}


async def test_the_split_changes_while_requests_run_and_an_alias_without_a_trial_has_none(nats_server: EmbeddedNats) -> None:
    async with cluster(nats_server, entry=entry(0)) as running:
        assert set(await asked(running, 10)) == {"tone@1"}
        await running.registry.put_pool(entry(1_000_000))
        await until(lambda: bool(running.router.table.pools["main"].entry.canaries["sales"]["tone"].share_ppm))
        assert set(await asked(running, 10)) == {"tone@2"}
        await running.registry.put_pool(pool_entry(STABLE, TRIAL, aliases={"sales": {"tone": STABLE.adapter_id}}))
        await until(lambda: not running.router.table.pools["main"].entry.canaries)
        assert set(await asked(running, 10)) == {"tone@1"}
