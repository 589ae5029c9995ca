"""The host tier packs in a process of its own, into memory that others can open; old images give way to new ones. Without vLLM."""

import asyncio
import json
import mmap
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.worker.engine_host_tier import HostTier
from services.worker.engine_image import Form, Part, SlotLayout, pack, place
from shared.errors import LoadFailed

Q = "model.layers.0.self_attn.q_proj"
LAYOUT = place(
    "float32",
    4,
    [Part(module="q", side=s, form=Form.PLAIN, shape=shape, sources=(Q,)) for s, shape in (("A", (1, 4, 8)), ("B", (1, 6, 4)))],
)


def adapter(folder: Path, value: float, rank: int = 2) -> Path:
    folder.mkdir()
    a, b = np.full((rank, 8), value, np.float32), np.full((6, rank), value, np.float32)
    save_file({f"base_model.model.{Q}.lora_A.weight": a, f"base_model.model.{Q}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    return folder


@pytest.fixture
async def tier() -> AsyncIterator[HostTier]:
    tier = HostTier(LAYOUT, 2)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def memory(tier: HostTier) -> Any:
    """As the engine's process sees it."""
    descriptor = os.open(tier.path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(descriptor, LAYOUT.image_bytes * tier.images), np.uint8).reshape(tier.images, -1)
    finally:
        os.close(descriptor)


def image_of(folder: Path, layout: SlotLayout = LAYOUT) -> Any:
    image = np.zeros(layout.image_bytes, np.uint8)
    pack(folder, layout, image)
    return image


async def test_what_is_staged_lies_in_memory_that_another_process_can_open(tier: HostTier, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", 1.5)
    image = await tier.stage(folder)
    assert (memory(tier)[image.number] == image_of(folder)).all()
    assert image.packed.modules == ("q",)
    assert await tier.stage(folder) is image


async def test_the_least_recently_used_image_gives_way(tier: HostTier, tmp_path: Path) -> None:
    one, two, three = (adapter(tmp_path / name, value) for name, value in (("one", 1.0), ("two", 2.0), ("three", 3.0)))
    first, second = await tier.stage(one), await tier.stage(two)
    await tier.stage(one)
    third = await tier.stage(three)
    assert third.number == second.number
    assert tier.find(one) is first and tier.find(two) is None
    assert (memory(tier)[first.number] == image_of(one)).all()
    assert (memory(tier)[third.number] == image_of(three)).all()


async def test_a_folder_named_by_a_digest_is_known_without_its_files_and_any_other_by_what_is_in_it(tier: HostTier, tmp_path: Path) -> None:
    named, plain = adapter(tmp_path / ("0f" * 32), 1.0), adapter(tmp_path / "plain", 2.0)
    image = await tier.stage(named)
    await tier.stage(plain)
    shutil.rmtree(named)
    shutil.rmtree(plain)
    adapter(tmp_path / "plain", 4.0)
    assert tier.find(named) is image
    assert tier.find(plain) is None


async def test_an_adapter_that_does_not_fit_is_refused_and_the_next_is_packed(tier: HostTier, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="rank 5") as failed:
        await tier.stage(adapter(tmp_path / "big", 1.0, rank=5))
    assert failed.value.fields["reason"] == "refused_by_engine"
    assert (await tier.stage(adapter(tmp_path / "good", 1.0))).packed.rank == 2


async def test_the_packing_process_is_started_again_after_it_died(tier: HostTier, tmp_path: Path) -> None:
    process = tier._process
    assert process is not None
    process.kill()
    await process.wait()
    assert (await tier.stage(adapter(tmp_path / "one", 1.0))).packed.rank == 2


async def test_staging_that_is_given_up_leaves_nothing_that_writes_later(tier: HostTier, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "one", 1.0)
    config = folder / "adapter_config.json"
    config.unlink()
    os.mkfifo(config)
    old = tier._process
    assert old is not None
    async with asyncio.TaskGroup() as group:
        staging = group.create_task(tier.stage(folder))
        writer = await asyncio.to_thread(os.open, config, os.O_WRONLY)  # returns when the packing process reads it
        staging.cancel()
    os.close(writer)
    assert old.returncode is not None
    assert tier.find(folder) is None


async def test_closing_ends_the_packing_process() -> None:
    tier = HostTier(LAYOUT, 1)
    await tier.start()
    process = tier._process
    assert process is not None
    await tier.close()
    await tier.close()
    assert process.returncode is not None


async def test_its_memory_is_told_as_set_aside_and_as_filled_by_images(tier: HostTier, tmp_path: Path) -> None:
    whole = 2 * LAYOUT.image_bytes
    assert tier.bytes == (whole, 0)
    folders = [adapter(tmp_path / name, float(number + 1)) for number, name in enumerate("abc")]
    for folder in folders:
        await tier.stage(folder)
    assert tier.bytes == (whole, whole), "the third took the first one's place"
    tier.drop(folders[2])
    assert tier.bytes == (whole, LAYOUT.image_bytes)
