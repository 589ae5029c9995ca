"""Tenants: made, changed, shown, deleted; and the routing that all of them share."""

import re
import secrets
from typing import Any

import anyio.to_thread
import bcrypt
import msgspec
import structlog

from services.registry.fence import fence
from services.registry.guarantees import GuaranteeService
from services.registry.keys import KeyService, random_id
from services.registry.reports import Reports
from services.registry.shares import SharesService
from services.registry.store import Store
from services.registry.stored import StoredLedger
from services.registry.views import figures_of, tenant_view
from shared.bus import Entry, counted
from shared.contracts import adapters, admin, rates, state
from shared.contracts.state import Routing, RoutingDefault, Tenant
from shared.contracts.tenancy import TenantLimits
from shared.errors import Conflict, InvalidRequest
from shared.policy.limits import MAX_BYTES, changed

log = structlog.get_logger()

_NAME = re.compile(state.NAME_PATTERN)
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_BCRYPT_COST = 10


def checked_name(name: str, what: str) -> str:
    """:raises InvalidRequest: not a name."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{what} {name[:80]!r}: a name is 1 to 63 of a-z, 0-9, - and _, beginning with a letter or digit",
            field=what,
            got=name[:80],
            expected=state.NAME_PATTERN,
        )
    return name


def checked_adapter_name(name: str, base: str) -> str:
    """:raises InvalidRequest: not a name, or one that requests have for something else: the pool's base, the tenant's default."""
    if name in ("default", base.rsplit("@", 1)[0]):
        raise InvalidRequest(f"adapter {name!r}: requests mean something else by that name; choose another", field="adapter", got=name)
    return checked_name(name, "adapter")


class TenantService:
    """A tenant's shares and guarantees stand before it does, and before a larger limit is in its record."""

    def __init__(
        self,
        store: Store,
        keys: KeyService,
        shares: SharesService,
        guarantees: GuaranteeService,
        stored: StoredLedger,
        reports: Reports,
        uploads_limit_bytes: int,
    ) -> None:
        self._store = store
        self._keys = keys
        self._shares = shares
        self._guarantees = guarantees
        self._stored = stored
        self._reports = reports
        self._uploads_limit_bytes = uploads_limit_bytes

    async def create(self, request: admin.CreateTenant) -> admin.TenantView:
        """:raises Conflict: the name is taken. :raises QuotaExceeded: a pool cannot guarantee its KV cache."""
        checked_name(request.name, "tenant")
        _checked_bytes("vram_quota_bytes", request.vram_quota_bytes)
        _checked_bytes("upgrade_headroom_bytes", request.upgrade_headroom_bytes)
        tenant = Tenant(
            tenant_id="tn_" + random_id(20),
            name=request.name,
            vram_quota_bytes=request.vram_quota_bytes,
            upgrade_headroom_bytes=request.upgrade_headroom_bytes,
            base_allowed=request.base_allowed,
            limits=_checked_limits(TenantLimits(), request.limits),
        )
        if await self._store.live.get(state.TENANT_PREFIX + tenant.name) is not None:
            raise Conflict(f"tenant {request.name} exists already", tenant=request.name)
        await self._guarantees.raise_to(tenant.tenant_id, tenant.limits.kv_quota_bytes)
        password = ""
        if request.nats_password:
            password, hashed = await self._nats_user(tenant.tenant_id)
            tenant = msgspec.structs.replace(tenant, nats_password_bcrypt=hashed)
        await self._shares.settle(tenant, await self._store.pools())
        try:
            await self._store.live.create(state.TENANT_PREFIX + tenant.name, state.encode(tenant))
        except Conflict as error:
            await self._guarantees.lower_to(tenant.tenant_id, None)
            await self._shares.forget(tenant.tenant_id)
            raise Conflict(f"tenant {request.name} exists already", tenant=request.name) from error
        log.info("tenant.created", tenant=tenant.name, tenant_id=tenant.tenant_id)
        return await self._view(tenant, password)

    async def update(self, request: admin.UpdateTenant) -> admin.TenantView:
        """A quota below what is held is accepted, told as over quota, and lets nothing new in.

        :raises QuotaExceeded: a pool cannot guarantee that much KV cache.
        """
        tenant = await self._store.tenant(request.name)
        changes = {
            field: value
            for field in ("vram_quota_bytes", "upgrade_headroom_bytes", "adapter_ceilings", "default_adapter", "base_allowed")
            if (value := getattr(request, field)) is not None
        }
        for field in ("vram_quota_bytes", "upgrade_headroom_bytes"):
            _checked_bytes(field, changes.get(field, 0))
        for name, ceiling_bytes in (request.adapter_ceilings or {}).items():
            _checked_bytes("adapter_ceilings." + checked_name(name, "adapter"), ceiling_bytes)
        if request.default_adapter:
            checked_name(request.default_adapter, "default_adapter")
        limits = _checked_limits(tenant.limits, request.limits)
        await self._guarantees.raise_to(tenant.tenant_id, limits.kv_quota_bytes)
        password = ""
        if request.nats_password:
            password, changes["nats_password_bcrypt"] = await self._nats_user(tenant.tenant_id)

        def change(present: Tenant) -> Tenant:
            return msgspec.structs.replace(present, limits=_checked_limits(present.limits, request.limits), **changes)

        after = await self._store.change_tenant(request.name, change)
        await self._fence(tenant, after)
        if request.limits:
            await self._shares.settle(after, await self._store.pools())
            await self._guarantees.lower_to(after.tenant_id, after.limits.kv_quota_bytes)
        log.info("tenant.updated", tenant=request.name, fields=sorted(changes), limits=sorted(request.limits))
        return await self._view(after, password)

    async def _fence(self, before: Tenant, after: Tenant) -> None:
        """No admission that was decided by a limit that is lower now is written any more."""
        limits, old = after.limits, before.limits
        if _is_lower(limits.artifact_bytes, old.artifact_bytes):
            await fence(self._store.catalog, state.STORED_PREFIX + after.tenant_id, state.encode(state.StoredFiles()))
        if (
            after.vram_quota_bytes < before.vram_quota_bytes
            or after.upgrade_headroom_bytes < before.upgrade_headroom_bytes
            or after.adapter_ceilings != before.adapter_ceilings
            or _is_lower(limits.host_cache_bytes, old.host_cache_bytes)
        ):
            for pool_id in await self._store.pools():
                await self._store.fence_pool(pool_id)

    async def show(self, request: admin.ShowTenant) -> admin.TenantView:
        """With what it asks for, holds and may hold of everything.

        :raises NotFound: no such tenant.
        """
        return await self._view(await self._store.tenant(request.name))

    async def _view(self, tenant: Tenant, nats_password: str = "") -> admin.TenantView:
        pools = [pool for pool, _ in (await self._store.pools()).values()]
        stored_bytes = await self._stored.held_bytes(tenant.tenant_id)
        leased = await self._leased(tenant)
        return tenant_view(tenant, pools, nats_password, figures_of(tenant, pools, self._reports.uses, stored_bytes, leased))

    async def _leased(self, tenant: Tenant) -> tuple[int, int]:
        """Requests and tokens of this minute that routers have taken."""
        beat = self._store.live_mirror.entries.get(state.HEARTBEAT_KEY)
        minute = int((beat.stamp_s if beat is not None else 0.0) // 60)
        limits = tenant.limits
        requests, tokens = 0, 0
        if limits.requests_per_minute is not None:
            requests = await counted(self._store.bus, rates.RATES_STREAM, rates.rate_subject(tenant.tenant_id, rates.REQUESTS, minute))
        if limits.tokens_per_minute is not None:
            tokens = await counted(self._store.bus, rates.RATES_STREAM, rates.rate_subject(tenant.tenant_id, rates.TOKENS, minute))
        return requests, tokens

    async def listed(self, _request: admin.ListTenants) -> list[admin.TenantView]:
        pools = [pool for pool, _ in (await self._store.pools()).values()]
        return [tenant_view(tenant, pools) for tenant in self._store.tenants()]

    async def delete(self, request: admin.DeleteTenant) -> None:
        """:raises Conflict: it holds adapters."""
        tenant = await self._store.tenant(request.name)
        for pool_id, (pool, _) in (await self._store.pools()).items():
            mounted = sorted({mount.name for mount in pool.mounts.values() if mount.tenant_id == tenant.tenant_id})
            if mounted:
                raise Conflict(
                    f"tenant {tenant.name} holds {', '.join(mounted)} in pool {pool_id}; unload them first",
                    tenant=tenant.name,
                    adapters=mounted,
                )
        await self._keys.revoke_all(tenant.name)
        await self._store.live.delete(state.TENANT_PREFIX + tenant.name)
        await self._keys.revoke_all(tenant.name)  # one made in between would speak for the next tenant of this name
        await self._forget(tenant)
        await self._shares.forget(tenant.tenant_id)
        await self._stored.forget(tenant.tenant_id)
        await self._store.delete_uploads(tenant.tenant_id)
        log.info("tenant.deleted", tenant=tenant.name, tenant_id=tenant.tenant_id)

    async def _forget(self, tenant: Tenant) -> None:
        """Its records and claims; the artifacts then belong to nobody, and housekeeping takes them."""
        for record in self._store.records():
            if record.tenant_id == tenant.tenant_id:
                await self._store.catalog.delete(state.ADAPTER_PREFIX + record.adapter_id)
        for key in await self._store.catalog.keys(f"{state.UPLOAD_PREFIX}{tenant.tenant_id}."):
            await self._store.catalog.delete(key)
        for pool_id in await self._store.pools():

            async def without(entry: Entry | None) -> bytes | None:
                if entry is None:
                    return None
                pool = adapters.decode_pool(entry.value)
                versions = {name: known for name, known in pool.versions.items() if name != tenant.name}
                aliases = {name: known for name, known in pool.aliases.items() if name != tenant.name}
                canaries = {name: known for name, known in pool.canaries.items() if name != tenant.name}
                guaranteed = {known: size for known, size in pool.guaranteed.items() if known != tenant.tenant_id}
                after = msgspec.structs.replace(pool, versions=versions, aliases=aliases, guaranteed=guaranteed, canaries=canaries)
                return adapters.encode(after)

            await self._store.change(self._store.live, state.POOL_PREFIX + pool_id, without)

    async def _nats_user(self, tenant_id: str) -> tuple[str, str]:
        """A new NATS password, plain and hashed; the tenant's upload bucket is there."""
        await self._store.make_uploads(tenant_id, self._uploads_limit_bytes)
        password = secrets.token_urlsafe(24)
        hashed = await anyio.to_thread.run_sync(lambda: bcrypt.hashpw(password.encode(), bcrypt.gensalt(_BCRYPT_COST)))
        return password, hashed.decode()

    async def set_routing(self, request: admin.SetRouting) -> Routing:
        if not _HEADER.fullmatch(request.header):
            raise InvalidRequest(f"{request.header!r} is no header name", field="header", got=request.header)
        if request.default not in list(RoutingDefault):
            known = ", ".join(RoutingDefault)
            raise InvalidRequest(f"default: {request.default!r} is not one of {known}", field="default", got=request.default)
        routing = Routing(header=request.header.lower(), default=RoutingDefault(request.default))
        await self._store.live.put(state.ROUTING_KEY, state.encode(routing))
        return routing


def _is_lower(limit: int | None, than: int | None) -> bool:
    return limit is not None and (than is None or limit < than)


def _checked_bytes(field: str, value: int) -> None:
    if not 0 <= value <= MAX_BYTES:
        raise InvalidRequest(f"{field} is {value}; expected 0 to {MAX_BYTES}", field=field, got=value)


def _checked_limits(limits: TenantLimits, changes: dict[str, Any]) -> TenantLimits:
    """:raises InvalidRequest: which limit is wrong."""
    decided = changed(limits, changes)
    if isinstance(decided, InvalidRequest):
        raise decided
    return decided
