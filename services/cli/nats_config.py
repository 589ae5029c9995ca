"""`tenantry nats-config`: users and permissions for a NATS that somebody else runs."""

from typing import Annotated

import typer

from services.cli.nats_users import SERVICE_PERMISSIONS
from services.cli.output import print_json
from shared.bus.accounts import NatsUser, accounts_block
from shared.contracts import permissions


def nats_config(
    tenant_ids: Annotated[list[str] | None, typer.Option("--tenant", help="Also a user for this tenant id; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the accounts block for an external nats-server.

    Passwords are variables that the server reads from its environment; bcrypt hashes are accepted too.
    """
    users = [
        NatsUser(name=name, password_variable=_variable(name), permissions=allowed)
        for name, allowed in SERVICE_PERMISSIONS.items()
        if name != "supervisor"
    ]
    for tenant_id in tenant_ids or []:
        allowed, lent = permissions.tenant(tenant_id), permissions.tenant_lent(tenant_id)
        users.append(NatsUser(name=tenant_id, password_variable=_variable(tenant_id), permissions=allowed, lent=lent))
    if as_json:
        print_json(users)
        return
    typer.echo("# include in nats-server's configuration; JetStream must be on and max_payload 8MB")
    typer.echo(accounts_block(users))


def _variable(user: str) -> str:
    return "TENANTRY_NATS_PASSWORD_" + user.upper().replace("-", "_")
