"""Whose requests a worker serves: not those of a tenant whose limits it does not know, or cannot keep."""

import pytest

from services.worker.admission import Admission
from shared.contracts.base import EngineLimits
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
