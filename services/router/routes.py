"""The route table: what stands in the STATE bucket, as plain dicts that a mirror's changes keep current.

Holds and indexes only; who may use what is decided in resolve.py.
"""

import asyncio
from typing import TypeVar

import msgspec
import structlog

from services.router.clock import ClusterClock
from shared.bus import Entry
from shared.contracts.adapters import Canary, Mount, PoolEntry, decode_pool
from shared.contracts.inference import Handle
from shared.contracts.state import (
    HEARTBEAT_KEY,
    KEY_PREFIX,
    POOL_PREFIX,
    ROUTING_KEY,
    TENANT_PREFIX,
    ApiKey,
    Routing,
    Tenant,
    decode_key,
    decode_routing,
    decode_tenant,
)
from shared.contracts.tenancy import SHARES_PREFIX
from shared.policy.lifecycle import AdapterState

log = structlog.get_logger()

T = TypeVar("T")


class PoolRoutes:
    """One pool's entry, indexed by tenant. Made anew from each change of the entry; handles once they are asked for."""

    def __init__(self, entry: PoolEntry) -> None:
        self.entry = entry
        self.base_label = entry.base.rsplit("@", 1)[0]
        self.mounts: dict[str, dict[str, list[Mount]]] = {}  # tenant -> name -> versions mounted
        self.trials: dict[tuple[str, str], tuple[Canary, Mount]] = {}  # by (tenant, alias): those that may get requests
        self._handles: dict[str, Handle] = {}  # by adapter_id
        for mount in entry.mounts.values():
            self.mounts.setdefault(mount.tenant, {}).setdefault(mount.name, []).append(mount)
        for tenant, trials in entry.canaries.items():
            for alias, canary in trials.items():
                mount = entry.mounts.get(canary.adapter_id)
                if mount is not None and mount.state is AdapterState.READY and not canary.stopped:
                    self.trials[tenant, alias] = (canary, mount)

    def handle(self, mount: Mount) -> Handle:
        found = self._handles.get(mount.adapter_id)
        if found is None:
            found = self._handles[mount.adapter_id] = Handle(
                tenant_id=mount.tenant_id,
                tenant=mount.tenant,
                pool_id=self.entry.pool_id,
                base=self.entry.base,
                adapter_id=mount.adapter_id,
                alias=mount.name,
                version=mount.version,
                digest=mount.digest,
            )
        return found


class RouteTable:
    """`apply` takes a mirror's changes. `version` grows with every change that can alter a resolution.

    `clock` says when a key's time is over.
    """

    def __init__(self) -> None:
        self.keys: dict[str, ApiKey] = {}  # by SHA-256 of the secret
        self.speaks: dict[str, frozenset[str]] = {}  # tenants by key_id: a gateway may have thousands
        self.tenants: dict[str, Tenant] = {}
        self.pools: dict[str, PoolRoutes] = {}
        self.routing = Routing()
        self.version = 0
        self.clock = ClusterClock()
        self._changed = asyncio.Event()

    def apply(self, key: str, entry: Entry | None) -> None:
        """One change. An entry that cannot be read is taken out: never serve from what may be wrong."""
        if key == HEARTBEAT_KEY:
            if entry is not None:
                self.clock.heard(entry.stamp_s)
            return
        if key.startswith(SHARES_PREFIX):
            return  # workers' matter
        try:
            self._store(key, entry)
        except msgspec.MsgspecError as error:
            log.error("routes.entry_unreadable", key=_shown(key), error=str(error))
            self._store(key, None)
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _store(self, key: str, entry: Entry | None) -> None:
        if key.startswith(KEY_PREFIX):
            self._store_key(key[len(KEY_PREFIX) :], None if entry is None else decode_key(entry.value))
        elif key.startswith(TENANT_PREFIX):
            _set(self.tenants, key[len(TENANT_PREFIX) :], None if entry is None else decode_tenant(entry.value))
        elif key.startswith(POOL_PREFIX):
            _set(self.pools, key[len(POOL_PREFIX) :], None if entry is None else PoolRoutes(decode_pool(entry.value)))
        elif key == ROUTING_KEY:
            self.routing = Routing() if entry is None else decode_routing(entry.value)

    def _store_key(self, sha256: str, key: ApiKey | None) -> None:
        before = self.keys.get(sha256)
        if before is not None:
            self.speaks.pop(before.key_id, None)
        if key is not None:
            self.speaks[key.key_id] = frozenset(key.tenants)
        _set(self.keys, sha256, key)

    async def wait_key(self, sha256: str, timeout_s: float) -> bool:
        """Whether the key of this hash is known within timeout_s: a key is usable at the router that handed it out."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while sha256 not in self.keys:
            version, left_s = self.version, until_s - loop.time()
            if left_s <= 0 or not await self.wait_changed(version, left_s):
                return sha256 in self.keys
        return True

    async def wait_changed(self, since_version: int, timeout_s: float) -> bool:
        """Whether the table moved past `since_version` within timeout_s."""
        if self.version != since_version:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return self.version != since_version
        return True


def _set(table: dict[str, T], key: str, value: T | None) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _shown(key: str) -> str:
    """A secret's hash is not for logs."""
    return key[: len(KEY_PREFIX) + 8] if key.startswith(KEY_PREFIX) else key
