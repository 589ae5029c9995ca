"""Commands that come again, on the real registry and engine: old loads and drains, after later ones and after a restart, change nothing."""

import asyncio

import pytest

from shared.bus import BusSettings, connect, publish_durable
from shared.contracts import adapters
from shared.contracts.adapters import DrainAdapter, LoadAdapter
from tests.e2e.ask import Asker, ask
from tests.e2e.stack import DEMO, POOL, Stack, wait_for


async def deliver_again(stack: Stack, adapter_ids: list[str], generations: list[int]) -> None:
    """Loads and drains as a registry once sent them, to the worker's own command subjects."""
    settings = BusSettings(
        url=f"nats://127.0.0.1:{stack.nats_port}", name="registry", user="registry", password=stack.nats_passwords["registry"]
    )
    bus = await connect(settings)
    try:
        for generation in generations:
            for adapter_id in adapter_ids:
                load = LoadAdapter(pool_id=POOL, adapter_id=adapter_id, generation=generation)
                drain = DrainAdapter(pool_id=POOL, adapter_id=adapter_id, generation=generation)
                await publish_durable(bus, adapters.load_subject("w0"), adapters.encode(load))
                await publish_durable(bus, adapters.drain_subject("w0"), adapters.encode(drain))
    finally:
        await bus.close()


def mounted(stack: Stack) -> set[str]:
    return {view.adapter_id for view in stack.admin.adapters()}


def resident(stack: Stack) -> set[str]:
    """What the present incarnation of the worker says it holds."""
    return {use["adapter_id"] for report in stack.reports() for use in report["adapters"] if use["residency"] == "device"}


async def three_answer(asker: Asker) -> None:
    async with asker.clients() as clients:
        for name, tenant in (("lora_sales", "sales"), ("lora_cs", "cs"), ("lora_finance", "finance")):
            pair = asker.goldens[name][0]
            assert (await ask(clients[tenant], name, pair["question"], stream=False)).text == pair["answer"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("restart", [False, True], ids=["after_later_ones", "after_a_restart"])
async def test_every_command_delivered_again_changes_nothing(stack: Stack, asker: Asker, restart: bool) -> None:
    before = mounted(stack)
    gone = stack.admin.upload("sales", "again", DEMO / "adapters" / "lora_cs")
    stack.admin.unload("again", "sales", wait=True)
    assert mounted(stack) == before
    newest = stack.admin.pools()[0]["generation"]
    if restart:
        stack.worker.kill()
    await deliver_again(stack, [*sorted(before), gone.adapter_id], [1, newest - 1, newest])
    if restart:
        stack.worker.start()
        await asyncio.to_thread(
            wait_for, lambda: all(view.state == "ready" for view in stack.admin.adapters()), 120, "adapters ready again"
        )
    later = stack.admin.upload("cs", "later", DEMO / "adapters" / "lora_sales")  # its command comes after all of them
    try:
        await asyncio.to_thread(wait_for, lambda: resident(stack) == before | {later.adapter_id}, 10, "exactly what is mounted")
        assert mounted(stack) == before | {later.adapter_id}
        await three_answer(asker)
    finally:
        stack.admin.unload("later", "cs", wait=True)
