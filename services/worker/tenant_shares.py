"""Keeps admission at what the registry says of this pool's tenants: a watch over their shares, this worker's part taken out."""

import asyncio

import msgspec
import structlog

from services.worker.admission import Admission
from services.worker.identity import Identity
from shared.bus import Bucket, Bus, Entry, Mirror
from shared.contracts.tenancy import SHARES_PREFIX, decode_shares, shares_key

log = structlog.get_logger()


class TenantShares:
    """Made before anything is served; admission waits for the first snapshot. A part that was given to an earlier incarnation of this
    worker is not this one's: the registry gives it a new one.
    """

    def __init__(self, bus: Bus, bucket: Bucket, admission: Admission, me: Identity) -> None:
        self._admission = admission
        self._me = me
        self._prefix_length = len(shares_key(me.pool_id, ""))
        self._mirror = Mirror(bus, bucket, self._changed, keys=f"{SHARES_PREFIX}{me.pool_id}.*")
        admission.tenants.expect_shares()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror.run())
            await self._mirror.synced.wait()
            self._admission.tenants.shares_synced()

    def _changed(self, key: str, entry: Entry | None) -> None:
        tenant_id = key[self._prefix_length :]
        if entry is None:
            self._admission.forget_tenant(tenant_id)
            return
        try:
            shares = decode_shares(entry.value)
        except msgspec.MsgspecError as error:
            log.error("shares.unreadable", key=key, error=type(error).__name__)
            self._admission.tenants.forget(tenant_id)
            return
        share = shares.workers.get(self._me.worker_id)
        if share is not None and share.incarnation != self._me.incarnation:
            share = None
        self._admission.set_tenant(tenant_id, shares.limits, share)
        self._admission.shares_revision = max(self._admission.shares_revision, entry.revision)
