"""Log lines are JSON with level, time and context; an exception keeps its traceback."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import os, structlog
from shared import log
log.configure("router", os.environ)
structlog.contextvars.bind_contextvars(request_id="r1")
logger = structlog.get_logger()
logger.debug("quiet")
logger.info("request.done", status=200, odd=object)
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("it.broke")
"""


def lines(**env: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stderr.strip().splitlines()


def test_a_line_carries_level_time_context_and_fields() -> None:
    done, broke = (json.loads(line) for line in lines())
    assert {name: done[name] for name in ("event", "level", "service", "request_id", "status")} == {
        "event": "request.done", "level": "info", "service": "router", "request_id": "r1", "status": 200,
    }  # fmt: skip
    assert done["timestamp"].endswith("Z")
    assert "object" in done["odd"]
    assert broke["level"] == "error"
    assert "ZeroDivisionError" in broke["exception"]


@pytest.mark.parametrize(("level", "events"), [("debug", 3), ("info", 2), ("error", 1)])
def test_the_level_is_a_setting(level: str, events: int) -> None:
    assert len(lines(TENANTRY_LOG_LEVEL=level)) == events


def test_people_may_have_plain_lines() -> None:
    assert any("request.done" in line and not line.startswith("{") for line in lines(TENANTRY_LOG_FORMAT="console"))
