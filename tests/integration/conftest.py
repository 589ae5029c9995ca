"""One real engine for the tests of this folder, with two of the demo's adapters mounted."""

import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.worker.governor import Governor
from services.worker.vllm_engine import VllmEngine
from services.worker.vllm_setup import VllmSettings
from tests.integration.in_process import DEMO, Desk, internal_name

RANKS = {"lora_sales": 8, "lora_cs": 4}


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def desk() -> AsyncIterator[Desk]:
    governor = Governor()
    engine = VllmEngine(
        VllmSettings(
            model=str(DEMO / "base"), label="qwen3-moe-demo", cluster_secret=b"secret", max_loras=4, max_lora_rank=8, max_model_len=1024
        ),
        governor,
    )
    await engine.start()
    try:
        for name, rank in RANKS.items():
            await engine.add_adapter(internal_name(name), DEMO / "adapters" / name, rank)
        yield Desk(engine, governor)
    finally:
        await engine.stop()
        gc.collect()


@pytest.fixture
def sales() -> str:
    return internal_name("lora_sales")
