"""The end of the real engine: by itself, and with its front. Last by name of the files that share an engine, which is dead afterwards."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.errors import LoadFailed
from tests.integration.in_process import CHAT, DEMO, Desk
from tests.integration.test_vllm_engine import unfinished, until

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
FRONT = """
import asyncio, json, sys
from services.worker.governor import Governor
from services.worker.vllm_engine import VllmEngine
from services.worker.vllm_setup import VllmSettings

async def main():
    engine = VllmEngine(VllmSettings(model=sys.argv[1], cluster_secret=b"secret", max_loras=1, max_lora_rank=8), Governor())
    await engine.start()
    print("engine", json.dumps([process.pid for process in engine._processes]), flush=True)
    await engine.wait_dead()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.asyncio(loop_scope="package")
async def test_a_dead_engine_is_noticed_and_says_so(desk: Desk) -> None:
    worker = desk.engine._processes[-1]  # type: ignore[attr-defined]
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(desk.engine.wait_dead())
        asking = group.create_task(
            desk.ask(
                CHAT,
                {"messages": [{"role": "user", "content": "What about refund?"}], "max_tokens": 900, "ignore_eos": True, "stream": True},
                desk.handle(),
            )
        )
        await until(lambda: unfinished(desk) == 1)
        assert not watching.done()
        worker.kill()
        async with asyncio.timeout(10):
            reason = await watching
            answer = await asking
    assert "ended" in reason
    assert answer.raised is not None or b"error" in answer.body
    with pytest.raises(LoadFailed) as failed:
        await desk.engine.add_adapter("ad_late", DEMO / "adapters" / "lora_cs", 4)
    assert failed.value.fields["reason"] == "engine_dead"


def test_the_engines_processes_are_gone_within_five_seconds_of_their_fronts_kill(tmp_path: Path) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    with (tmp_path / "log").open("wb") as log:
        front = subprocess.Popen(
            [sys.executable, str(script), str(DEMO / "base")],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )
    try:
        assert front.stdout is not None
        pids = next(json.loads(line.split(" ", 1)[1]) for line in front.stdout if line.startswith("engine "))
        processes = [psutil.Process(pid) for pid in pids]
        assert len(processes) >= 2
        assert all(process.is_running() for process in processes)
        front.kill()
        give_up_at = time.monotonic() + 5.0
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
    finally:
        front.kill()
        front.wait(10)
        if front.stdout is not None:
            front.stdout.close()
