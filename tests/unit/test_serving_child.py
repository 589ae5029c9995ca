"""How the serving benchmark holds a system's process: at the gate until the card is free, asked, and ended with all that it started."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.child import Child, SystemFailed
from benchmarks.serving.engines import Plan
from tests.waiting import until

PLAN = Plan(model="tiny", folder="f", adapters="a", seed=7)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    child = Child("c", PLAN, tmp_path, module="tests.serving_stub")
    try:
        yield child
    finally:
        child.end()


def test_a_system_waits_at_its_gate_and_is_ready_once_it_is_open(child: Child) -> None:
    with pytest.raises(SystemFailed, match="did not answer in 0 s"):
        child.wait_ready(0.3)
    child.open_gate()
    about = child.wait_ready(20.0)["about"]
    assert (about["name"], about["seed"]) == ("c", "7")


def test_orders_are_answered_and_a_failure_says_what_the_log_says(child: Child) -> None:
    child.open_gate()
    child.wait_ready(20.0)
    assert child.ask("measure", 10.0, batch=8) == {"got": {"do": "measure", "batch": 8}}
    with pytest.raises(SystemFailed, match=r"no such batch\n.*this is its log"):
        child.ask("fail", 10.0)
    with pytest.raises(SystemFailed, match=r"has ended:\n(.*\n)*out of memory"):
        child.ask("die", 10.0)
    with pytest.raises(SystemFailed, match="has ended"):
        child.ask("measure", 10.0)


def test_a_system_that_hangs_is_not_waited_for_longer_than_its_limit(child: Child) -> None:
    child.open_gate()
    child.wait_ready(20.0)
    with pytest.raises(SystemFailed, match="did not answer"):
        child.ask("hang", 0.2)


async def test_its_end_is_the_end_of_what_it_started(child: Child) -> None:
    child.open_gate()
    helper = psutil.Process(child.wait_ready(20.0)["about"]["helper"])
    assert helper.is_running()
    child.end()
    await until(lambda: not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE)
