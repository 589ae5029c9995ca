"""Tenants and API keys: made, changed, listed, revoked. Secrets are shown once, and stored as hashes only."""

import base64
import hashlib
import re
import secrets
from collections.abc import Callable

import anyio.to_thread
import bcrypt
import msgspec
import structlog

from services.registry.mounting import now
from services.registry.store import Store
from services.registry.views import key_view, tenant_view
from shared.bus import Entry
from shared.contracts import adapters, admin, state
from shared.contracts.state import ApiKey, Routing, RoutingDefault, Tenant
from shared.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from shared.policy.admission import held_bytes

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
    def __init__(self, store: Store, uploads_limit_bytes: int) -> None:
        self._store = store
        self._uploads_limit_bytes = uploads_limit_bytes

    async def create(self, request: admin.CreateTenant) -> admin.TenantView:
        """:raises Conflict: the name is taken."""
        checked_name(request.name, "tenant")
        _not_negative("vram_quota_bytes", request.vram_quota_bytes)
        _not_negative("upgrade_headroom_bytes", request.upgrade_headroom_bytes)
        tenant = Tenant(
            tenant_id="tn_" + _random(20),
            name=request.name,
            vram_quota_bytes=request.vram_quota_bytes,
            upgrade_headroom_bytes=request.upgrade_headroom_bytes,
            base_allowed=request.base_allowed,
        )
        password = ""
        if request.nats_password:
            password, hashed = await self._nats_user(tenant.tenant_id)
            tenant = msgspec.structs.replace(tenant, nats_password_bcrypt=hashed)
        try:
            await self._store.live.create(state.TENANT_PREFIX + tenant.name, state.encode(tenant))
        except Conflict as error:
            raise Conflict(f"tenant {request.name} exists already", tenant=request.name) from error
        log.info("tenant.created", tenant=tenant.name, tenant_id=tenant.tenant_id)
        return tenant_view(tenant, [], password)

    async def update(self, request: admin.UpdateTenant) -> admin.TenantView:
        """:raises QuotaExceeded: the new quota is less than what is held."""
        tenant = await self._store.tenant(request.name)
        changes = {
            field: value
            for field in ("vram_quota_bytes", "upgrade_headroom_bytes", "adapter_ceilings", "default_adapter", "base_allowed")
            if (value := getattr(request, field)) is not None
        }
        for field in ("vram_quota_bytes", "upgrade_headroom_bytes"):
            _not_negative(field, changes.get(field, 0))
        for name, ceiling_bytes in (request.adapter_ceilings or {}).items():
            _not_negative("adapter_ceilings." + checked_name(name, "adapter"), ceiling_bytes)
        pools = [pool for pool, _ in (await self._store.pools()).values()]
        _not_below_held(msgspec.structs.replace(tenant, **changes), pools)
        password = ""
        if request.nats_password:
            password, changes["nats_password_bcrypt"] = await self._nats_user(tenant.tenant_id)
        changed = await self._store.change_tenant(request.name, lambda present: msgspec.structs.replace(present, **changes))
        log.info("tenant.updated", tenant=request.name, fields=sorted(changes))
        return tenant_view(changed, pools, password)

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
        await self._revoke_keys(tenant.name)
        await self._store.live.delete(state.TENANT_PREFIX + tenant.name)
        await self._revoke_keys(tenant.name)  # one made in between would speak for the next tenant of this name
        await self._forget(tenant)
        await self._store.delete_uploads(tenant.tenant_id)
        log.info("tenant.deleted", tenant=tenant.name, tenant_id=tenant.tenant_id)

    async def _revoke_keys(self, tenant: str) -> None:
        """Of the bucket itself: the mirror may not show the newest yet."""
        for key_name in await self._store.live.keys(state.KEY_PREFIX):
            await self._change_key(key_name, lambda key: _without_tenant(key, tenant) if tenant in key.tenants else key)

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
                return adapters.encode(msgspec.structs.replace(pool, versions=versions, aliases=aliases))

            await self._store.change(self._store.live, state.POOL_PREFIX + pool_id, without)

    async def _nats_user(self, tenant_id: str) -> tuple[str, str]:
        """A new NATS password, plain and hashed; the tenant's upload bucket is there."""
        await self._store.make_uploads(tenant_id, self._uploads_limit_bytes)
        password = secrets.token_urlsafe(24)
        hashed = await anyio.to_thread.run_sync(lambda: bcrypt.hashpw(password.encode(), bcrypt.gensalt(_BCRYPT_COST)))
        return password, hashed.decode()

    async def create_key(self, request: admin.CreateKey) -> admin.KeyView:
        """The view with the secret, which is not kept.

        :raises NotFound: no such tenant.
        """
        if not request.tenants or (len(request.tenants) > 1 and not request.gateway):
            raise InvalidRequest("a key speaks for one tenant, a gateway's key for one or more", field="tenants", got=list(request.tenants))
        for tenant in request.tenants:
            await self._store.tenant(tenant)
        secret = "tk_" + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id="key_" + _random(16),
            label=request.label,
            tenants=tuple(dict.fromkeys(request.tenants)),
            gateway=request.gateway,
            created_at=now(),
        )
        name = state.KEY_PREFIX + hashlib.sha256(secret.encode()).hexdigest()
        await self._store.live.create(name, state.encode(key))
        try:
            for tenant in key.tenants:
                await self._store.tenant(tenant)  # it may have been deleted meanwhile, and its keys with it
        except NotFound:
            await self._store.live.delete(name)
            raise
        log.info("key.created", key_id=key.key_id, tenants=key.tenants, gateway=key.gateway)
        return key_view(key, secret)

    async def list_keys(self, request: admin.ListKeys) -> list[admin.KeyView]:
        return [key_view(key) for _, key in self._store.api_keys() if request.tenant in ("", *key.tenants)]

    async def revoke_key(self, request: admin.RevokeKey) -> admin.KeyView:
        """Idempotent.

        :raises NotFound: no such key.
        """
        name = next((name for name, key in self._store.api_keys() if key.key_id == request.key_id), "")
        for candidate in [] if name else await self._store.live.keys(state.KEY_PREFIX):
            found = await self._store.live.get(candidate)
            if found is not None and state.decode_key(found.value).key_id == request.key_id:
                name = candidate
        if not name:
            raise NotFound(f"there is no key {request.key_id}", key_id=request.key_id)
        await self._change_key(name, lambda key: msgspec.structs.replace(key, revoked=True))
        found = await self._store.live.get(name)
        assert found is not None
        log.info("key.revoked", key_id=request.key_id)
        return key_view(state.decode_key(found.value))

    async def _change_key(self, name: str, decide: Callable[[ApiKey], ApiKey]) -> None:
        async def encode(entry: Entry | None) -> bytes | None:
            return state.encode(decide(state.decode_key(entry.value))) if entry else None

        await self._store.change(self._store.live, name, encode)

    async def set_routing(self, request: admin.SetRouting) -> Routing:
        if not _HEADER.fullmatch(request.header):
            raise InvalidRequest(f"{request.header!r} is no header name", field="header", got=request.header)
        if request.default not in list(RoutingDefault):
            known = ", ".join(RoutingDefault)
            raise InvalidRequest(f"default: {request.default!r} is not one of {known}", field="default", got=request.default)
        routing = Routing(header=request.header.lower(), default=RoutingDefault(request.default))
        await self._store.live.put(state.ROUTING_KEY, state.encode(routing))
        return routing


def _without_tenant(key: ApiKey, tenant: str) -> ApiKey:
    """A key that speaks for nobody else is revoked."""
    left = tuple(name for name in key.tenants if name != tenant)
    return msgspec.structs.replace(key, tenants=left) if left else msgspec.structs.replace(key, revoked=True)


def _random(length: int) -> str:
    return base64.b32encode(secrets.token_bytes(length)).decode().lower()[:length]


def _not_negative(field: str, value: int) -> None:
    if value < 0:
        raise InvalidRequest(f"{field} is {value}; expected 0 or more", field=field, got=value)


def _not_below_held(tenant: Tenant, pools: list[adapters.PoolEntry]) -> None:
    limit = tenant.vram_quota_bytes + tenant.upgrade_headroom_bytes
    for pool in pools:
        held = held_bytes(pool, tenant.tenant_id)
        if held > limit:
            raise QuotaExceeded(
                f"tenant {tenant.name} holds {held} bytes in pool {pool.pool_id}, more than {limit}; unload adapters first",
                scope="tenant",
                asked_bytes=0,
                held_bytes=held,
                limit_bytes=limit,
            )
