"""What the issue of tenancy promises, on the scripted engine in virtual time: the benchmark's scenarios, shorter."""

import pytest

from benchmarks.tenancy import scripted
from benchmarks.tenancy.scenarios import percentile

SHORT = {"warm_up_s": 15.0, "measure_s": 25.0}


def test_beside_a_flood_of_long_requests_a_quiet_tenants_prompt_is_read_within_two_steps() -> None:
    flooded, waits = scripted.quiet(200, fair=True, **SHORT)
    held, _ = scripted.quiet(scripted.SEATS - 1, fair=True, **SHORT)
    assert len(waits) >= 25
    assert percentile([float(wait) for wait in waits], 95) <= 2
    ratio = percentile([asked.ttft_ms for asked in flooded.quiet], 95) / percentile([asked.ttft_ms for asked in held.quiet], 95)
    assert ratio <= 1.3
    _, unfair = scripted.quiet(200, fair=False, **SHORT)
    assert min(unfair) > 100, "otherwise the scenario shows nothing"


def test_fair_order_costs_no_more_than_a_twentieth_of_the_tokens() -> None:
    fair, _ = scripted.quiet(200, fair=True, **SHORT)
    plain, _ = scripted.quiet(200, fair=False, **SHORT)
    assert fair.rate >= 0.95 * plain.rate


def test_what_one_tenant_leaves_another_uses() -> None:
    """Whoever has work has the whole engine while nobody else wants it, whatever its weight and whatever others may not use."""
    alone = scripted.only_those_that_ask(("one",), **SHORT)
    heavy = scripted.only_those_that_ask(("four",), **SHORT)
    assert alone == pytest.approx(heavy, rel=0.02)
    beside = scripted.only_those_that_ask(("one", "four"), limited={"four": 1}, **SHORT)
    assert beside >= 0.95 * alone


def test_prompts_of_maximum_length_do_not_double_the_time_between_a_running_streams_tokens() -> None:
    without = percentile(scripted.stream(fair=True, decoding=20, prompts=0, stream_tokens=400), 99)
    beside = percentile(scripted.stream(fair=True, decoding=20, prompts=8, stream_tokens=400), 99)
    alone = percentile(scripted.stream(fair=True, decoding=0, prompts=0, stream_tokens=400), 99)
    only_prompts = percentile(scripted.stream(fair=True, decoding=0, prompts=8, stream_tokens=400), 99)
    assert beside <= 2 * without
    assert only_prompts <= 2 * alone
    samples = percentile(scripted.stream(fair=True, decoding=20, prompts=2, stream_tokens=400, samples=8), 99)
    assert samples <= 2 * without, "eight samples of a prompt are eight prompts to the engine"


def test_backlogged_tenants_get_tokens_by_their_weights() -> None:
    assert scripted.weights_error(scripted.weights(**SHORT)) <= 0.05


def test_what_is_reserved_covers_what_the_engine_uses() -> None:
    """Never a block more in the engine than in the ledger."""
    assert scripted.most_over_reserved(seconds=20.0) <= 0
