"""Splitting a step's time, and fitting what it is split by."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.usage import CostModel
from shared.policy.cost_model import MIB, CostFit, Load, features, non_negative_least_squares, split, weights

TRUE = CostModel(prefill_token_us=20.0, decode_row_us=300.0, context_mib_us=5.0, adapter_mib_us=100.0)
loads = st.builds(
    Load,
    st.integers(0, 8192),
    st.integers(0, 4),
    st.integers(0, 1 << 34),
    st.sampled_from(["", "a", "b"]),
    st.integers(0, 1 << 30),
)


@given(st.integers(0, 10**12), st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e9)), min_size=1, max_size=300))
def test_parts_are_whole_add_up_and_none_is_a_microsecond_off_its_share(total_us: int, by: list[float]) -> None:
    parts = split(total_us, by)
    assert sum(parts) == total_us
    whole = sum(by)
    for part, weight in zip(parts, by, strict=True):
        exact = total_us * weight / whole if whole else total_us / len(by)
        assert part >= 0
        assert abs(part - exact) <= 1 + exact * 1e-12


@given(st.lists(loads, min_size=1, max_size=40), st.integers(0, 10**7))
def test_a_step_is_split_without_rest_whatever_is_in_it(step: list[Load], took_us: int) -> None:
    assert sum(split(took_us, weights(TRUE, step))) == took_us


def test_an_adapter_is_read_once_and_paid_by_all_who_use_it() -> None:
    step = [Load(0, 1, 0, "a", 4 * MIB), Load(0, 1, 0, "a", 4 * MIB), Load(0, 1, 0, "b", MIB), Load(0, 1, 0)]
    assert weights(TRUE, step) == [500.0, 500.0, 400.0, 300.0]
    assert features(step) == (0.0, 4.0, 0.0, 5.0)
    assert sum(weights(TRUE, step)) == 4 * 300 + 5 * 100


def test_by_weights_a_long_prompt_does_not_pay_as_if_its_tokens_were_decoded_ones() -> None:
    prompt, decoding = split(10_000, weights(TRUE, [Load(100, 0, 0), Load(0, 1, 0)]))
    assert (prompt, decoding) == (8696, 1304)


def random_step(random: Random) -> list[Load]:
    prompts = [Load(random.randint(1, 500), 0, random.randint(1, 50) * MIB) for _ in range(random.randint(0, 2))]
    adapters = {"": 0, "a": 3 * MIB, "b": 7 * MIB}
    rows = [
        Load(0, 1, random.randint(1, 80) * MIB, name, adapters[name]) for name in random.choices(list(adapters), k=random.randint(1, 16))
    ]
    return prompts + rows


def test_coefficients_are_found_again_from_noisy_steps() -> None:
    random, fit = Random(3), CostFit()
    for _ in range(6):
        for _ in range(400):
            step = random_step(random)
            fit.add(features(step), sum(weights(TRUE, step)) * random.uniform(0.95, 1.05))
        fit.refit()
    model = fit.model
    assert model.fitted_steps == 2400
    assert model.prefill_token_us == pytest.approx(TRUE.prefill_token_us, rel=0.05)
    assert model.decode_row_us == pytest.approx(TRUE.decode_row_us, rel=0.05)
    assert model.context_mib_us == pytest.approx(TRUE.context_mib_us, rel=0.1)
    assert model.adapter_mib_us == pytest.approx(TRUE.adapter_mib_us, rel=0.1)


def test_what_no_step_had_keeps_its_proportion_and_too_few_steps_change_nothing() -> None:
    fit = CostFit(TRUE)
    for _ in range(31):
        fit.add((0.0, 2.0, 0.0, 0.0), 1000.0)
    assert fit.refit() is TRUE
    for _ in range(300):
        fit.add((0.0, 2.0, 0.0, 0.0), 1000.0)
    fitted = fit.refit()
    assert fitted.decode_row_us == pytest.approx(500.0, rel=0.01)
    for name in ("prefill_token_us", "context_mib_us", "adapter_mib_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name) * 500.0 / TRUE.decode_row_us, rel=0.01)


def test_what_steps_do_not_tell_apart_is_not_taken_for_the_costlier() -> None:
    """Short contexts come with every decoded row: were their bytes to cost what the rows do, a long context would cost a fortune."""
    fit, random = CostFit(), Random(5)
    for _ in range(40):
        for _ in range(100):
            rows = random.randint(1, 16)
            fit.add((0.0, float(rows), rows * 0.1, 0.0), 800.0 * rows * random.uniform(0.8, 1.2))
        fit.refit()
    assert fit.model.decode_row_us == pytest.approx(800.0, rel=0.1)
    assert fit.model.context_mib_us < 800.0


def test_an_engine_that_becomes_faster_is_followed() -> None:
    fit = CostFit(TRUE)
    for row_us in (300.0, 150.0):
        for _ in range(60):
            for rows in range(1, 17):
                fit.add((0.0, float(rows), 0.0, 0.0), row_us * rows)
            fit.refit()
    assert fit.model.decode_row_us == pytest.approx(150.0, rel=0.01)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=5, max_size=5), min_size=1, max_size=8))
def test_the_fit_is_the_least_of_all_non_negative_ones(rows: list[list[float]]) -> None:
    """By the conditions of Karush, Kuhn and Tucker: no slope down, none along what is positive."""
    gram = [[sum(row[i] * row[j] for row in rows) + (0.5 if i == j else 0.0) for j in range(4)] for i in range(4)]
    product = [sum(row[i] * row[4] for row in rows) for i in range(4)]
    found = non_negative_least_squares(gram, product)
    for index, value in enumerate(found):
        slope = sum(gram[index][other] * found[other] for other in range(4)) - product[index]
        assert value >= 0
        assert slope >= -1e-6
        assert abs(slope * value) <= 1e-6
