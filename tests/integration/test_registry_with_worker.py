"""The real registry and a real worker process (with the scripted engine) on the demo's own base and adapters."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from shared.bus import Bus
from shared.bus.embedded import EmbeddedNats
from shared.contracts import admin
from shared.errors import BaseMismatch
from tests.integration.registry_rig import Admin, running_registry
from tests.waiting import until_async

DEMO = Path(__file__).parents[2] / "examples" / "demo"
QUOTA = 1 << 40


class WorkerProcess:
    def __init__(self, server: EmbeddedNats, folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TENANTRY_")}
        settings = {
            "WORKER_ID": "w1",
            "ENGINE": "scripted",
            "MODEL": str(DEMO / "base"),
            "LABEL": "qwen3-moe-demo",
            "MAX_LORAS": "4",
            "CACHE_DIR": str(folder / "cache"),
        }
        self._env = {**kept, **{f"TENANTRY_WORKER_{name}": value for name, value in settings.items()}, "TENANTRY_NATS_URL": server.url}
        self._log = folder / "worker.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "services.worker", env=self._env, stdout=log, stderr=log
            )

    async def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await asyncio.wait_for(self.process.wait(), 40)


@asynccontextmanager
async def demo_pool(server: EmbeddedNats, bus: Bus, folder: Path) -> AsyncIterator[tuple[Admin, WorkerProcess]]:
    worker = WorkerProcess(server, folder)
    async with running_registry(bus):
        manager = Admin(bus)
        manager.patience_s = 40.0
        await worker.start()
        try:

            async def here() -> bool:
                return bool(await manager.ask(admin.ListPools()))

            await until_async(here, timeout_s=60, what="the worker says hello")
            (pool,) = await manager.ask(admin.ListPools())
            await manager.ask(admin.SetLabel(label="tenantry/qwen3-moe-demo@v1", base=pool["base"]))
            yield manager, worker
        finally:
            await worker.end(signal.SIGKILL)


@pytest.mark.timeout(180)
async def test_the_demos_adapters_are_mounted_upgraded_drained_and_survive_their_workers_death(
    nats_server: EmbeddedNats, bus: Bus, tmp_path: Path
) -> None:
    async with demo_pool(nats_server, bus, tmp_path) as (manager, worker):
        for tenant in ("sales", "cs", "finance"):
            await manager.tenant(tenant, quota=QUOTA)
            view = await manager.add(tenant, f"lora_{tenant}", DEMO / "adapters" / f"lora_{tenant}", tmp_path, wait_s=30.0)
            assert (view.state, view.serving, view.provenance) == ("ready", True, "alias"), view
        with pytest.raises(BaseMismatch):
            await manager.ask(admin.SetLabel(label="tenantry/qwen3-moe-demo@v0", base="qwen3-moe-demo@" + "0" * 64))
            await manager.add("sales", "other", DEMO / "other" / "lora_sales_v0", tmp_path)

        upgraded = await manager.add("sales", "lora_sales", DEMO / "adapters" / "lora_cs", tmp_path, wait_s=30.0)
        assert upgraded.version == 2
        await manager.in_state("sales", "lora_sales", "unloaded", version=1)

        await worker.end(signal.SIGKILL)
        await worker.start()
        before = upgraded.history

        async def back() -> bool:
            shown = await manager.show("sales", "lora_sales")
            return shown.state == "ready" and len(shown.history) > len(before)

        await until_async(back, timeout_s=60, what="the adapters are loaded by the new incarnation")
        for tenant in ("cs", "finance"):
            await manager.in_state(tenant, f"lora_{tenant}", "ready")

        for tenant in ("sales", "cs", "finance"):
            (view,) = msgspec.convert(
                await manager.ask(admin.UnloadAdapter(tenant=tenant, name=f"lora_{tenant}", wait_s=30.0)), list[admin.AdapterView]
            )
            assert view.state == "unloaded"
            assert await manager.held(tenant) == 0
        again = msgspec.convert(await manager.ask(admin.AddAdapter(tenant="cs", name="lora_cs", wait_s=30.0)), admin.AdapterView)
        assert (again.state, again.version) == ("ready", 1)
