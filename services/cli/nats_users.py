"""Who may log in to the bus: one user per service, one per tenant that asked for one; each with its permissions."""

from collections.abc import Iterable, Mapping

from shared.bus import Entry
from shared.bus.accounts import NatsUser
from shared.contracts import permissions
from shared.contracts.state import TENANT_PREFIX, Tenant, decode_tenant

SERVICE_PERMISSIONS = {
    "router": permissions.ROUTER,
    "registry": permissions.REGISTRY,
    "worker": permissions.WORKER,
    "supervisor": permissions.SUPERVISOR,
}


def service_users(passwords: Mapping[str, str]) -> tuple[NatsUser, ...]:
    return tuple(NatsUser(name=name, password=passwords[name], permissions=allowed) for name, allowed in SERVICE_PERMISSIONS.items())


def tenant_users(tenants: Iterable[Tenant]) -> tuple[NatsUser, ...]:
    """A tenant's user is named by its id; only the hash of its password is known."""
    wanted = sorted((tenant for tenant in tenants if tenant.nats_password_bcrypt), key=lambda tenant: tenant.tenant_id)
    return tuple(
        NatsUser(
            name=tenant.tenant_id,
            password=tenant.nats_password_bcrypt,
            permissions=permissions.tenant(tenant.tenant_id),
            lent=permissions.tenant_lent(tenant.tenant_id),
        )
        for tenant in wanted
    )


def tenants_in(entries: Mapping[str, Entry]) -> list[Tenant]:
    """The tenant records among a mirror's entries of the STATE bucket."""
    return [decode_tenant(entry.value) for key, entry in entries.items() if key.startswith(TENANT_PREFIX)]
