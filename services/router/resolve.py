"""Who asks, and what exactly answers: (credentials, tenant mark, model) -> one handle and the workers that hold it.

Purely from the table in memory; the one look-up of a request's life. Never reveals what another tenant has.
"""

import hashlib

import msgspec

from services.router.clock import seconds_of
from services.router.routes import PoolRoutes, RouteTable
from services.router.split import Asked, is_for_trial
from shared.contracts.adapters import Mount, PoolWorker
from shared.contracts.inference import Handle
from shared.contracts.state import ApiKey, RoutingDefault, Scope, Tenant
from shared.contracts.tenancy import GATEWAY_TENANT
from shared.errors import (
    AdapterNotFound,
    AdapterNotReady,
    BaseNotAllowed,
    InvalidKey,
    InvalidRequest,
    MissingKey,
    ScopeMissing,
    TenantNotAllowed,
    TenantRequired,
    WorkerUnavailable,
)
from shared.policy.lifecycle import AdapterState

_COMING = frozenset({AdapterState.ADMITTED, AdapterState.LOADING})
_GATEWAY = Tenant(tenant_id=GATEWAY_TENANT, name=GATEWAY_TENANT)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What a request resolved to, and the workers of the pool that may serve it."""

    handle: Handle
    workers: tuple[PoolWorker, ...]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /v1/models."""

    model: str
    handle: Handle


def secret_of(authorization: str, x_api_key: str) -> str:
    """The API key that a request carries, as OpenAI or as Anthropic clients send it.

    :raises MissingKey: neither header carries one.
    """
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if x_api_key.strip():
        return x_api_key.strip()
    raise MissingKey("no API key: send `Authorization: Bearer <key>` (or `x-api-key: <key>`)")


def authenticate(table: RouteTable, secret: str, scope: Scope = Scope.INFER) -> ApiKey:
    """:raises InvalidKey: unknown, revoked or expired (the answer does not say which). :raises ScopeMissing: it may not do this."""
    key = table.keys.get(hashlib.sha256(secret.encode()).hexdigest())
    if key is None or key.revoked or not key.tenants or (key.expires_at and _is_over(key.expires_at, table)):
        raise InvalidKey("the API key is not valid")
    if scope not in key.scopes:
        held = [each.value for each in key.scopes]
        raise ScopeMissing(
            f"this key has not the scope `{scope.value}`; it has {', '.join(held) or 'none'}", needed=scope.value, held=held
        )  # fmt: skip
    return key


def _is_over(expires_at: str, table: RouteTable) -> bool:
    """A time that cannot be read is over."""
    try:
        return table.clock.unix_s() >= seconds_of(expires_at)
    except ValueError:
        return True


def speaks_for(table: RouteTable, key: ApiKey, mark: str) -> Tenant:
    """The tenant of a request with this key and this value of the routing header ("" when absent).

    :raises TenantNotAllowed: the key may not speak for the tenant that the header names.
    :raises TenantRequired: a gateway key without a mark, where routing.default is reject.
    """
    name = mark.strip()
    if not name:
        if key.gateway:
            if table.routing.default is RoutingDefault.BASE_ONLY:
                return _GATEWAY
            raise TenantRequired(
                f"this key speaks for several tenants: name one in the header `{table.routing.header}`", header=table.routing.header
            )
        name = key.tenants[0]
    tenant = table.tenants.get(name) if name in table.speaks.get(key.key_id, ()) else None
    if tenant is None:
        raise TenantNotAllowed(f"this key may not speak for the tenant `{name[:64]}`", tenant=name[:64])
    return tenant


def resolve(table: RouteTable, secret: str, mark: str, model: str, asked: Asked | None = None) -> Route:
    """The handle for `model` ("" when absent) and the workers that hold it.

    `asked` decides between an alias's two versions while one is on trial; without it the stable one answers.

    :raises TenantryError: see authenticate, speaks_for.
    :raises AdapterNotFound: unknown, another tenant's, draining or unloaded: one text for all.
    :raises AdapterNotReady: mounted and still loading.
    :raises InvalidRequest: no default, or an ambiguous one: `choices`.
    :raises BaseNotAllowed: the base was named and this tenant may not use it.
    """
    tenant = speaks_for(table, authenticate(table, secret), mark)
    if not model or model == "default":
        return _default(table, tenant, asked)
    found = _adapter(table, tenant, model, asked)
    return _base(table, tenant, model) if found is None else found


def visible_models(table: RouteTable, secret: str, mark: str) -> list[ModelInfo]:
    """What the key may use now: the tenant's serving aliases, and the bases where allowed."""
    tenant = speaks_for(table, authenticate(table, secret), mark)
    found: list[ModelInfo] = []
    for pool in table.pools.values():
        for alias, adapter_id in sorted(pool.entry.aliases.get(tenant.name, {}).items()):
            mount = pool.entry.mounts.get(adapter_id)
            if mount is not None and mount.state is AdapterState.READY and mount.tenant_id == tenant.tenant_id:
                found.append(ModelInfo(model=alias, handle=pool.handle(mount)))
    if tenant.base_allowed:
        found += [ModelInfo(model=pool.base_label, handle=_base_handle(pool, tenant)) for pool in table.pools.values()]
    return found


def _adapter(table: RouteTable, tenant: Tenant, model: str, asked: Asked | None) -> Route | None:
    """The tenant's adapter of that name (`alias` or `alias@version`), None if it has none of the name."""
    alias, at, version = model.partition("@")
    for pool in table.pools.values():
        mounts = [mount for mount in pool.mounts.get(tenant.name, {}).get(alias, ()) if mount.tenant_id == tenant.tenant_id]
        if at:
            mounts = [mount for mount in mounts if str(mount.version) == version]
            serving = mounts
        else:
            adapter_id = pool.entry.aliases.get(tenant.name, {}).get(alias, "")
            if adapter_id and pool.trials and asked is not None:
                adapter_id = _split(pool, tenant, alias, asked) or adapter_id
            serving = [mount for mount in mounts if mount.adapter_id == adapter_id]
        for mount in serving:
            if mount.state is AdapterState.READY:
                return _route(pool, mount)
        if any(mount.state in _COMING and (at or not mount.on_trial) for mount in mounts):  # one on trial is not coming to the alias
            raise AdapterNotReady(f"the adapter `{model[:128]}` is loading", param="model", retry_after_s=1.0)
    return None


def _split(pool: PoolRoutes, tenant: Tenant, alias: str, asked: Asked) -> str:
    """The version on trial, if this request goes to it."""
    trial = pool.trials.get((tenant.name, alias))
    return trial[0].adapter_id if trial is not None and is_for_trial(trial[0], asked) else ""


def _route(pool: PoolRoutes, mount: Mount) -> Route:
    worker = pool.entry.workers.get(mount.worker_id)
    if worker is None:
        raise WorkerUnavailable("the worker that holds this adapter is not in its pool now", retry_after_s=1.0)
    return Route(handle=pool.handle(mount), workers=(worker,))


def _base(table: RouteTable, tenant: Tenant, model: str) -> Route:
    label = "" if _has_had(table, tenant, model) else model
    named = [pool for pool in table.pools.values() if pool.base_label == label or pool.entry.base == model]
    if not named:
        raise AdapterNotFound(f"the model `{model[:128]}` does not exist, or this key may not use it", param="model")
    if not tenant.base_allowed:
        raise BaseNotAllowed("this tenant may not use the base model by itself", param="model")
    identities = sorted({pool.entry.base for pool in named})
    if len(identities) > 1:
        raise InvalidRequest(f"`{model}` names several bases; use one of: {', '.join(identities)}", param="model", choices=identities)
    return _base_route(named, tenant)


def _has_had(table: RouteTable, tenant: Tenant, name: str) -> bool:
    """Whether the name has ever been an adapter's of this tenant: it never stands for a base again, least of all once that one is gone."""
    return any(name in pool.entry.versions.get(tenant.name, {}) for pool in table.pools.values())


def _base_route(pools: list[PoolRoutes], tenant: Tenant) -> Route:
    pool = next((pool for pool in pools if pool.entry.workers), None)
    if pool is None:
        raise WorkerUnavailable("no worker serves this base now", retry_after_s=1.0)
    return Route(handle=_base_handle(pool, tenant), workers=tuple(pool.entry.workers.values()))


def _base_handle(pool: PoolRoutes, tenant: Tenant) -> Handle:
    return Handle(tenant_id=tenant.tenant_id, tenant=tenant.name, pool_id=pool.entry.pool_id, base=pool.entry.base)


def _default(table: RouteTable, tenant: Tenant, asked: Asked | None) -> Route:
    """The adapter marked default, else the only one; for gateway requests without a mark, the base."""
    pools = list(table.pools.values())
    if tenant is _GATEWAY:
        identities = sorted({pool.entry.base for pool in pools})
        if len(identities) == 1:
            return _base_route(pools, tenant)
        raise InvalidRequest(_choose("no default base", identities), param="model", choices=identities)
    names = sorted(_names(pools, tenant))
    chosen = tenant.default_adapter or (names[0] if len(names) == 1 else "")
    if chosen:
        found = _adapter(table, tenant, chosen, asked)
        if found is None:
            raise AdapterNotFound(f"the default adapter `{chosen}` is not mounted", param="model")
        return found
    choices = names + (sorted({pool.base_label for pool in pools}) if tenant.base_allowed else [])
    why = "this tenant has no default adapter" if names else "this tenant has no adapter mounted"
    raise InvalidRequest(_choose(why, choices), param="model", choices=choices)


def _names(pools: list[PoolRoutes], tenant: Tenant) -> set[str]:
    """Names that serve or are about to."""
    return {
        name
        for pool in pools
        for name, mounts in pool.mounts.get(tenant.name, {}).items()
        if any(mount.state is AdapterState.READY or mount.state in _COMING for mount in mounts)
    }


def _choose(why: str, choices: list[str]) -> str:
    return f"{why}: name one in `model`: {', '.join(choices)}" if choices else f"{why}, and nothing else may be used"
