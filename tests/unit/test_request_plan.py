"""What admission knows of a request before its first generation starts."""

from typing import Any

import msgspec
import pytest

from services.worker.request_plan import RequestPlan, of_default_length, plan_of


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


BEAM = b'{"use_beam_search":true,"n":2,"prompt":"one"}'


def test_a_beam_search_that_does_not_say_how_long_is_as_long_as_its_tenants_default() -> None:
    body, plan = of_default_length(BEAM, RequestPlan(beams=2), (50, 1024))
    assert msgspec.json.decode(body) == {"use_beam_search": True, "n": 2, "prompt": "one", "max_tokens": 50}
    assert plan == RequestPlan(beams=2, max_tokens=50)


@pytest.mark.parametrize(
    ("plan", "default"),
    [
        (RequestPlan(beams=2, max_tokens=7), (50, 1024)),
        (RequestPlan(), (50, 1024)),
        (RequestPlan(beams=2), None),
        (RequestPlan(beams=2), (1024, 1024)),
    ],
)
def test_what_says_how_long_or_may_not_have_as_much_left_stays_as_it_is(plan: RequestPlan, default: tuple[int, int] | None) -> None:
    assert of_default_length(BEAM, plan, default) == (BEAM, plan)
