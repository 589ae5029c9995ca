"""Whose limits this worker knows, and how long a request waits for those of a tenant that it does not."""

import asyncio

from shared.contracts.tenancy import TenantLimits
from shared.errors import WorkerUnavailable

_PATIENCE_S = 1.0
_DEFAULTS = TenantLimits()


class KnownTenants:
    """While no tenant of the pool has shares (no registry has written any), everybody has the defaults: no quota of its own, equal
    weight, the engine's room in fair order. Once one has, a tenant without is not served until its own are known.
    """

    def __init__(self) -> None:
        self._limits: dict[str, TenantLimits] = {}
        self._why: dict[str, str] = {}  # tenants that are not served whatever comes to be known
        self._synced = True
        self._has_shares = False
        self._changed = asyncio.Event()

    def expect_shares(self) -> None:
        """Shares are on their way: nobody is known before `shares_synced`."""
        self._synced = False

    def shares_synced(self) -> None:
        self._synced = True
        self._tell()

    def add(self, tenant_id: str, limits: TenantLimits) -> None:
        self._has_shares = True
        self._limits[tenant_id] = limits
        self._why.pop(tenant_id, None)
        self._tell()

    def forget(self, tenant_id: str, why: str = "") -> None:
        """What it has runs to its end; nothing new is let in until it is known again. `why`: waiting for that is of no use."""
        self._has_shares = True
        self._limits.pop(tenant_id, None)
        self._why.pop(tenant_id, None)
        if why:
            self._why[tenant_id] = why
            self._tell()

    def find(self, tenant_id: str) -> TenantLimits | None:
        if self._synced:
            return self._limits.get(tenant_id) if self._has_shares else _DEFAULTS
        return None

    async def wait_for(self, tenant_id: str) -> TenantLimits:
        """:raises WorkerUnavailable: what the tenant may use is not known here in time."""
        give_up_s = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            limits = self.find(tenant_id)
            if limits is not None:
                return limits
            if tenant_id in self._why:
                raise WorkerUnavailable(f"this worker cannot serve the tenant: {self._why[tenant_id]}", retry_after_s=30.0)
            try:
                async with asyncio.timeout_at(give_up_s):
                    await self._changed.wait()
            except TimeoutError:
                raise WorkerUnavailable(
                    "this worker has not been told yet what the tenant may use; nothing was started", retry_after_s=1.0
                ) from None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
