"""Registries killed with kill -9 in the middle of trials: the entry stays whole, records follow it, and every step is told."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from shared.contracts import admin
from shared.contracts.adapters import AdapterState, CanaryTerms
from shared.errors import TenantryError
from tests import adapters_factory as factory
from tests.integration.registry_rig import SLOT_BYTES, Admin, obeying
from tests.integration.test_registry_adapters import adapter
from tests.integration.test_registry_audit import all_is_told, records_of
from tests.integration.test_registry_kills import RegistryProcess, SlowWorker, answers, cluster, quiet
from tests.waiting import until_async

assert cluster
NAMES = ("one", "two")


async def entry_is_whole(manager: Admin) -> None:
    pool = await manager.pool()
    records = {record.adapter_id: record for record in await records_of(manager.bus)}
    trials = pool.canaries.get("sales", {})
    for name, trial in trials.items():
        mount = pool.mounts[trial.adapter_id]
        assert (mount.name, mount.on_trial, mount.state) == (name, True, AdapterState.READY)
    on_trial = {trial.adapter_id for trial in trials.values()}
    serving = set(pool.aliases.get("sales", {}).values())
    assert serving | on_trial == set(pool.mounts), "whatever is mounted serves or is on trial"
    assert not serving & on_trial
    for adapter_id, mount in pool.mounts.items():
        record = records[adapter_id]
        assert (record.state, record.version) == (mount.state, mount.version)
    assert {record.adapter_id for record in records.values() if record.state is AdapterState.READY} == set(pool.mounts)
    assert await manager.held("sales") == sum(mount.slot_bytes for mount in pool.mounts.values()) <= 3 * SLOT_BYTES


@pytest.mark.timeout(180)
async def test_a_registry_killed_in_the_middle_of_trials_leaves_nothing_half_done(
    cluster: tuple[Admin, list[RegistryProcess]], tmp_path: Path
) -> None:
    manager, (registry, _) = cluster
    moments = random.Random(3)
    await manager.tenant("sales", quota=2 * SLOT_BYTES, upgrade_headroom_bytes=SLOT_BYTES)
    archives = [factory.pack(adapter(tmp_path, n), "tar.gz") for n in range(6)]
    done: list[str] = []

    async def meddle() -> None:
        name = moments.choice(NAMES)
        what: dict[str, Any] = {
            "start": None,
            "change": admin.ChangeCanary(tenant="sales", name=name, share_ppm=moments.randrange(1_000_000)),
            "promote": admin.PromoteCanary(tenant="sales", name=name),
            "roll_back": admin.RollBackCanary(tenant="sales", name=name),
        }
        chosen = moments.choice(["start", "start", *what])
        try:
            if chosen == "start":
                terms = CanaryTerms(share_ppm=100_000)
                await manager.add("sales", name, moments.choice(archives), tmp_path, trial=terms, wait_s=moments.choice([0.0, 2.0]))
            else:
                await manager.ask(what[chosen])
        except TenantryError:
            return  # refused, or its registry died: either is legitimate, what counts is what is left
        done.append(chosen)

    async with obeying(SlowWorker(manager.bus, moments)):
        for number, name in enumerate(NAMES):
            await manager.add("sales", name, archives[number], tmp_path)
        manager.patience_s = 3.0  # a killed registry answers nobody
        for _ in range(5):
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(meddle())
                await asyncio.sleep(moments.uniform(0.02, 0.6))
                await registry.end()
                await registry.start()
                await until_async(lambda: answers(manager), timeout_s=30, what="the registry answers again")
            for _ in range(4):
                await meddle()
        manager.patience_s = 20.0
        await quiet(manager)
        await entry_is_whole(manager)
        await all_is_told(manager)
        assert "start" in done
        assert set(done) - {"start"}, "trials were under way"
