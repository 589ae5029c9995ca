"""API keys: made, listed, rotated, revoked. Secrets are 256 random bits, shown once, and stored as hashes only."""

import base64
import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import structlog

from services.registry.mounting import now
from services.registry.store import Store
from services.registry.views import key_view
from shared.bus import Entry
from shared.contracts import admin, state
from shared.contracts.state import ApiKey, Scope
from shared.errors import Conflict, InvalidRequest, NotFound

log = structlog.get_logger()

_PREFIX_CHARS = 10  # of the secret, 42 bits of it: enough to tell keys apart, nothing to guess the rest from
_LABEL_CHARS = 200
_MAX_OVERLAP_S = 30 * 86_400.0
_SEEN_WITHIN_S = 0.5  # for a key that another registry made a moment ago to show in the mirror


def random_id(length: int) -> str:
    return base64.b32encode(secrets.token_bytes(length)).decode().lower()[:length]


class KeyService:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def create(self, request: admin.CreateKey) -> admin.KeyView:
        """The view with the secret, which is not kept.

        :raises NotFound: no such tenant.
        """
        if not request.tenants or (len(request.tenants) > 1 and not request.gateway):
            raise InvalidRequest(
                "a key speaks for one tenant, a gateway's key for one or more", field="tenants", got=list(request.tenants)[:20]
            )
        if len(request.label) > _LABEL_CHARS:
            raise InvalidRequest(f"label is longer than {_LABEL_CHARS} characters", field="label", got=request.label[:40])
        for tenant in request.tenants:
            await self._store.tenant(tenant)
        return await self._make(
            ApiKey(
                key_id="",
                label=request.label,
                tenants=tuple(dict.fromkeys(request.tenants)),
                gateway=request.gateway,
                scopes=_scopes(request.scopes),
            )
        )

    async def _make(self, like: ApiKey, replaces: str = "") -> admin.KeyView:
        secret = "tk_" + secrets.token_urlsafe(32)
        key = msgspec.structs.replace(
            like, key_id="key_" + random_id(16), created_at=now(), prefix=secret[:_PREFIX_CHARS], revoked=False, expires_at=""
        )
        name = state.KEY_PREFIX + hashlib.sha256(secret.encode()).hexdigest()
        await self._store.live.create(name, state.encode(key))
        try:
            for tenant in key.tenants:
                await self._store.tenant(tenant)  # it may have been deleted meanwhile, and its keys with it
        except NotFound:
            await self._store.live.delete(name)
            raise
        log.info("key.created", key_id=key.key_id, tenants=key.tenants, gateway=key.gateway, scopes=key.scopes, replaces=replaces)
        return key_view(key, secret, replaces)

    async def listed(self, request: admin.ListKeys) -> list[admin.KeyView]:
        keys = [key for _, key in self._store.api_keys() if request.tenant in ("", *key.tenants)]
        return [key_view(key) for key in keys if not request.own or _is_own(key, request.tenant)]

    async def revoke(self, request: admin.RevokeKey) -> admin.KeyView:
        """Idempotent.

        :raises NotFound: no such key, or not of this tenant alone.
        """
        name, _ = await self._found(request.key_id, request.tenant)
        changed = await self.change(name, lambda key: msgspec.structs.replace(key, revoked=True))
        log.info("key.revoked", key_id=request.key_id)
        return key_view(changed)

    async def rotate(self, request: admin.RotateKey) -> admin.KeyView:
        """The new key with its secret. The new one comes first: whatever breaks in between, one of them works.

        :raises NotFound: no such key, or not of this tenant alone.
        :raises Conflict: it is revoked already.
        """
        if not 0 <= request.overlap_s <= _MAX_OVERLAP_S:  # refuses NaN too
            shown = f"{request.overlap_s:g}" if math.isfinite(request.overlap_s) else str(request.overlap_s)
            raise InvalidRequest(f"overlap_s is {shown}; expected 0 to {_MAX_OVERLAP_S:g}", field="overlap_s", got=shown)
        name, old = await self._found(request.key_id, request.tenant)
        if old.revoked:
            raise Conflict(f"key {old.key_id} is revoked; make a new one", key_id=old.key_id)
        made = await self._make(old, replaces=old.key_id)
        ends = (datetime.now(UTC) + timedelta(seconds=request.overlap_s)).isoformat(timespec="microseconds").replace("+00:00", "Z")

        def expire(key: ApiKey) -> ApiKey:
            if request.overlap_s == 0:
                return msgspec.structs.replace(key, revoked=True)
            return msgspec.structs.replace(key, expires_at=min(ends, key.expires_at or ends))

        await self.change(name, expire)
        log.info("key.rotated", key_id=old.key_id, new_key_id=made.key_id, overlap_s=request.overlap_s)
        return made

    async def _found(self, key_id: str, tenant: str) -> tuple[str, ApiKey]:
        """Its KV key, and the key as it stands. Another tenant's takes the same path as one that does not exist."""

        async def look() -> tuple[str, ApiKey] | None:
            keys = self._store.api_keys()
            name = next((name for name, key in keys if key.key_id == key_id and (not tenant or _is_own(key, tenant))), "")
            found = await self._store.live.get(name) if name else None
            return (name, state.decode_key(found.value)) if found is not None else None

        known = await self._store.changes.until(look, _SEEN_WITHIN_S)
        if known is None:
            raise NotFound(f"there is no key {key_id[:64]}", key_id=key_id[:64])
        return known

    async def revoke_all(self, tenant: str) -> None:
        """Of the bucket itself: the mirror may not show the newest yet."""
        for name in await self._store.live.keys(state.KEY_PREFIX):
            with contextlib.suppress(NotFound):
                await self.change(name, lambda key: _without_tenant(key, tenant) if tenant in key.tenants else key)

    async def change(self, name: str, decide: Callable[[ApiKey], ApiKey]) -> ApiKey:
        """:raises NotFound: the key is gone."""
        changed: ApiKey | None = None

        async def encode(entry: Entry | None) -> bytes | None:
            nonlocal changed
            changed = decide(state.decode_key(entry.value)) if entry else None
            return state.encode(changed) if changed is not None else None

        await self._store.change(self._store.live, name, encode)
        if changed is None:
            raise NotFound("there is no such key")
        return changed


def _scopes(names: tuple[str, ...]) -> tuple[Scope, ...]:
    """:raises InvalidRequest: none, or one that does not exist."""
    known = list(Scope)
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None or not names:
        expected = ", ".join(known)
        raise InvalidRequest(f"scopes: {'none given' if wrong is None else repr(wrong[:40])}; expected some of {expected}", field="scopes")
    return tuple(Scope(name) for name in dict.fromkeys(names))


def _is_own(key: ApiKey, tenant: str) -> bool:
    return key.tenants == (tenant,) and not key.gateway


def _without_tenant(key: ApiKey, tenant: str) -> ApiKey:
    """A key that speaks for nobody else is revoked."""
    left = tuple(name for name in key.tenants if name != tenant)
    return msgspec.structs.replace(key, tenants=left) if left else msgspec.structs.replace(key, revoked=True)
