"""Processes that an engine leaves behind when its front is killed, with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

FRONT = """
import asyncio, subprocess, sys, time
from services.worker.engine_guard import EngineGuard

before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
guard = EngineGuard()
guard.start()

async def start():
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(guard.watch_children_until(done, interval_s=0.02))
        child = subprocess.Popen([sys.executable, "-c",
            "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
            "print(p.pid, flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
        grandchild = await asyncio.to_thread(child.stdout.readline)
        done.set()
    print(before.pid, child.pid, int(grandchild), flush=True)

asyncio.run(start())
{end}
"""


def front(end: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    process = subprocess.Popen([sys.executable, "-c", FRONT.format(end=end)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.01)
    return True


def test_what_a_killed_front_had_started_is_killed_and_nothing_else() -> None:
    process, (before, child, grandchild) = front("time.sleep(600)")
    try:
        assert not gone(child)
        process.kill()
        process.wait(5)
        assert wait_for(lambda: gone(child) and gone(grandchild))
        assert not gone(before)
    finally:
        process.stdout.close()  # type: ignore[union-attr]
        for each in (before, child, grandchild):
            if each.is_running():
                each.kill()


def test_a_guard_ends_with_its_front_and_outlives_a_terminals_signals() -> None:
    process, (before, child, _) = front("print(guard._process.pid, flush=True); time.sleep(600)")
    assert process.stdout is not None
    guard = psutil.Process(int(process.stdout.readline()))
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard.pid, number)
        process.kill()
        process.wait(5)
        assert wait_for(lambda: gone(child) and gone(guard))
    finally:
        process.stdout.close()
        before.kill()


def test_an_orderly_end_kills_what_is_left_at_once() -> None:
    process, (before, child, grandchild) = front("guard.end_all(); guard.end_all(); print(child_is_there := 1, flush=True)")
    try:
        assert process.wait(10) == 0
        assert wait_for(lambda: gone(child) and gone(grandchild))
        assert not gone(before)
    finally:
        process.stdout.close()  # type: ignore[union-attr]
        before.kill()
