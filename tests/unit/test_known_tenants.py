"""Whose requests a worker serves: not those of a tenant whose limits it does not know, or cannot keep."""

import gc
import tracemalloc

import pytest

from services.worker.admission import Admission
from services.worker.governor import Attempt, Governor
from shared.contracts.base import EngineLimits
from shared.contracts.inference import Handle
from shared.contracts.tenancy import Share, TenantLimits
from shared.errors import WorkerUnavailable

SILENT = EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=100)
SHARE = Share(incarnation="i", kv_bytes=1000, assured_kv_bytes=1000)


async def test_an_engine_that_does_not_say_how_large_a_block_is_serves_no_tenant_with_a_kv_quota() -> None:
    admission = Admission()
    admission.use(SILENT)
    admission.set_tenant("tn_a", TenantLimits(kv_quota_bytes=1000), SHARE)
    admission.set_tenant("tn_b", TenantLimits(), None)
    assert admission.tenants.find("tn_b") is not None
    with pytest.raises(WorkerUnavailable, match="has not said how its KV cache is laid out"):
        await admission.tenants.wait_for("tn_a")
    admission.set_tenant("tn_a", TenantLimits(), None)
    assert admission.tenants.find("tn_a") is not None, "once the quota is taken away"


async def test_a_worker_draws_on_no_more_than_is_assured_beside_others() -> None:
    admission = Admission()
    admission.use(EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=100, kv_block_bytes=10, kv_block_tokens=16))
    for name in ("tn_a", "tn_b"):
        admission.set_tenant(name, TenantLimits(kv_quota_bytes=1000), Share(incarnation="i", kv_bytes=1000, assured_kv_bytes=500))
    assert admission.queue.ledger.guaranteed == 100


async def test_tenants_that_have_come_and_gone_leave_nothing_behind() -> None:
    governor = Governor()
    governor.admission.use(EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=1000, kv_block_bytes=10, kv_block_tokens=16))

    async def come_and_go(first: int, count: int) -> int:
        for number in range(first, first + count):
            handle = Handle(tenant_id=f"tn_{number:06}", tenant="t", pool_id="p", base="b@1")
            attempt = Attempt(f"r{number}", 1, "router", handle, "/v1/completions")
            governor.begin(attempt)
            call = await governor.admit(attempt, 16, 16, 1, 0.0)
            governor.leave(call)
            governor.end(attempt)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        await come_and_go(0, 5_000)
        before = await come_and_go(5_000, 2_500)
        after = await come_and_go(7_500, 10_000)
    finally:
        tracemalloc.stop()
    assert len(governor.admission.queue.lines) <= 2048
    assert after - before < 10_000 * 30, "bytes: less than one small object for each"


async def test_ten_thousand_tenants_with_limits_are_no_lines_until_they_ask() -> None:
    admission = Admission()
    admission.use(EngineLimits(slots=1, max_rank=8, bytes_per_rank=1, kv_blocks=1000, kv_block_bytes=10, kv_block_tokens=16))
    for number in range(10_000):
        admission.set_tenant(f"tn_{number}", TenantLimits(max_concurrent=4), Share(incarnation="i", concurrent=4))
    assert admission.queue.lines == {}
    assert admission.queue.line("tn_7").terms.concurrent == 4
    for number in range(10_000):
        admission.forget_tenant(f"tn_{number}")
    assert admission.queue.line("tn_7").terms.concurrent is None
