"""What admission knows of a request before its first generation starts."""

from typing import Any

import pytest

from services.worker.request_plan import RequestPlan, plan_of


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, RequestPlan()),
        ({"prompt": "one"}, RequestPlan()),
        ({"prompt": [1, 2, 3]}, RequestPlan()),
        ({"prompt": ["one", "two"]}, RequestPlan(prompts=2)),
        ({"prompt": [[1], [2], [3]]}, RequestPlan(prompts=3)),
        ({"prompt": []}, RequestPlan()),
        ({"input": ["one", "two"]}, RequestPlan(prompts=2)),
        ({"input": [{"role": "user", "content": "a conversation"}, {"role": "assistant", "content": "is one"}]}, RequestPlan()),
        ({"max_tokens": 7}, RequestPlan(max_tokens=7)),
        ({"max_tokens": 7, "max_completion_tokens": 5}, RequestPlan(max_tokens=5)),
        ({"max_output_tokens": 9}, RequestPlan(max_tokens=9)),
        ({"max_tokens": None}, RequestPlan()),
        ({"use_beam_search": True, "n": 4}, RequestPlan(beams=4)),
        ({"use_beam_search": True}, RequestPlan(beams=1)),
        ({"use_beam_search": False, "n": 4}, RequestPlan()),
        ({"service_tier": "priority"}, RequestPlan(rank=0)),
        ({"service_tier": "flex"}, RequestPlan(rank=2)),
        ({"service_tier": "auto"}, RequestPlan()),
        ({"service_tier": ["odd"], "max_tokens": "odd", "n": True}, RequestPlan()),
    ],
)
def test_a_body_is_counted(fields: dict[str, Any], expected: RequestPlan) -> None:
    assert plan_of(fields) == expected
