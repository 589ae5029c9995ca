"""The scripted engine's steps: what is read and made in which, and how long each takes. In virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from benchmarks.tenancy import virtual_time
from services.worker.scripted_steps import Sequence, StepModel, Stepper

MODEL = StepModel(base_ms=10.0, sequence_us=1000.0, prefill_token_us=100.0, step_tokens=100)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        virtual_time.run(test())

    run.__name__ = test.__name__
    return run


async def made(stepper: Stepper, sequence: Sequence) -> list[float]:
    """When each of its tokens was there, in ms."""
    times: list[float] = []
    for _ in range(sequence.count):
        await stepper.token(sequence)
        times.append(round(asyncio.get_running_loop().time() * 1000.0, 3))
    return times


async def run(stepper: Stepper, *sequences: Sequence) -> list[list[float]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made(stepper, sequence)) for sequence in sequences]
        for sequence in sequences:
            stepper.submit(sequence)
    return [task.result() for task in tasks]


@virtual
async def test_a_step_takes_its_base_its_prompt_tokens_and_its_sequences() -> None:
    (times,) = await run(Stepper(MODEL, 8, 16), Sequence("r", "a", 50, 3))
    assert times == [10 + 5 + 1, 16 + 11, 27 + 11]


@virtual
async def test_a_prompt_longer_than_a_step_is_read_in_parts_and_keeps_those_behind_it_waiting() -> None:
    stepper = Stepper(MODEL, 8, 16)
    long, short = Sequence("long", "a", 250, 1), Sequence("short", "a", 10, 1)
    await run(stepper, long, short)
    assert (long.first_step, short.first_step) == (1, 3)


@virtual
async def test_beside_another_tenant_each_ones_prompts_keep_to_the_shared_budget() -> None:
    model = StepModel(step_tokens=100, shared_prefill_tokens=20)
    stepper = Stepper(model, 8, 16)
    mine = [Sequence(f"a{number}", "a", 40, 1) for number in range(2)]
    other = Sequence("b", "b", 10, 5)
    await run(stepper, *mine, other)
    assert (mine[0].first_step, other.first_step, mine[1].first_step) == (1, 1, 3)


@virtual
async def test_no_more_run_than_there_are_seats_and_what_is_removed_gives_its_own_back() -> None:
    stepper = Stepper(MODEL, 1, 16)
    first, second = Sequence("first", "a", 1, 100), Sequence("second", "a", 1, 1)
    async with asyncio.TaskGroup() as group:
        stepper.submit(first)
        stepper.submit(second)
        waiting = group.create_task(made(stepper, second))
        await asyncio.sleep(0.1)
        assert second.first_step is None
        stepper.remove(first)
        stepper.remove(first)
        await waiting
    assert second.first_step is not None
