"""`tenantry nats-config`: users and permissions for a NATS that somebody else runs."""

import json
from typing import Annotated

import typer

from services.cli.nats_users import SERVICE_PERMISSIONS
from services.cli.output import print_json
from shared.contracts import permissions
from shared.contracts.permissions import Permissions


def nats_config(
    tenant_ids: Annotated[list[str] | None, typer.Option("--tenant", help="Also a user for this tenant id; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the authorization block for an external nats-server.

    Passwords are variables that the server reads from its environment; bcrypt hashes are accepted too.
    """
    users = {name: allowed for name, allowed in SERVICE_PERMISSIONS.items() if name != "supervisor"}
    users |= {tenant_id: permissions.tenant(tenant_id) for tenant_id in tenant_ids or []}
    if as_json:
        print_json(users)
        return
    typer.echo(authorization(users))


def authorization(users: dict[str, Permissions]) -> str:
    """The block's text, for a server's configuration file."""
    lines = [
        "# include in nats-server's configuration; JetStream must be on and max_payload 8MB",
        "authorization {",
        "  users = [",
    ]
    for name, allowed in users.items():
        variable = "TENANTRY_NATS_PASSWORD_" + name.upper().replace("-", "_")
        lines.append(f"    {{ user: {json.dumps(name)}, password: ${variable}, permissions: {{")
        lines.append("      publish: { allow: [")
        lines += [f"        {json.dumps(subject)}" for subject in allowed.publish]
        lines.append("      ] }, subscribe: { allow: [")
        lines += [f"        {json.dumps(subject)}" for subject in allowed.subscribe]
        lines.append("      ] }, allow_responses: true } }")
    lines += ["  ]", "}"]
    return "\n".join(lines)
