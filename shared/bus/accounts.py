"""The part of a nats-server's configuration that says who may log in and what they reach.

The services share one account, which has JetStream. Each tenant's user stands alone in an account of its own, to which
a few subjects are lent (contracts/permissions.py). Subject permissions inside one account would not be enough: a client
chooses the reply subject of what it publishes, and the server answers there without asking whether that client may.
"""

import json
from collections.abc import Iterable

import msgspec

from shared.contracts.permissions import JETSTREAM_API, TENANT_JETSTREAM_API, Lent, Permissions

SERVICES_ACCOUNT = "TENANTRY"


class NatsUser(msgspec.Struct, frozen=True, kw_only=True):
    """`password` is the plain secret or its bcrypt hash; `password_variable` names a variable of the server's environment instead.

    None for permissions means everything (never for a tenant). `lent` is a tenant's: its user gets an account of its own.
    """

    name: str
    password: str = ""
    password_variable: str = ""
    permissions: Permissions | None = None
    lent: Lent | None = None


def accounts_block(users: Iterable[NatsUser]) -> str:
    """`accounts { ... }`, for a server's configuration file."""
    users = tuple(users)
    tenants = [user for user in users if user.lent is not None]
    exports = [entry for user in tenants for entry in _exports(user)]
    lines = [
        "accounts {",
        f"  {SERVICES_ACCOUNT} {{",
        "    jetstream: enabled",
        "    users: [",
        *(f"      {_user(user)}" for user in users if user.lent is None),
        "    ]",
        "    exports: [",
        *(f"      {entry}" for entry in exports),
        "    ]",
        "  }",
    ]
    for user in tenants:
        lines += [
            f"  {_account(user)} {{",
            f"    users: [ {_user(user)} ]",
            "    imports: [",
            *(f"      {entry}" for entry in _imports(user)),
            "    ]",
            "  }",
        ]
    return "\n".join([*lines, "}"])


def _account(user: NatsUser) -> str:
    return json.dumps(f"tenant_{user.name}")


def _exports(user: NatsUser) -> list[str]:
    assert user.lent is not None
    kinds = [("service", subject) for subject in user.lent.services] + [("stream", subject) for subject in user.lent.streams]
    return [f"{{ {kind}: {json.dumps(subject)}, accounts: [ {_account(user)} ] }}" for kind, subject in kinds]


def _imports(user: NatsUser) -> list[str]:
    """JetStream's own subjects get another name there: under their own they would mean the tenant's account, which has none."""
    assert user.lent is not None
    entries: list[str] = []
    for subject in user.lent.services:
        local = subject.replace(JETSTREAM_API, TENANT_JETSTREAM_API, 1)
        entries.append(f"{{ service: {{ account: {SERVICES_ACCOUNT}, subject: {json.dumps(subject)} }}, to: {json.dumps(local)} }}")
    entries += [f"{{ stream: {{ account: {SERVICES_ACCOUNT}, subject: {json.dumps(subject)} }} }}" for subject in user.lent.streams]
    return entries


def _user(user: NatsUser) -> str:
    password = f"${user.password_variable}" if user.password_variable else json.dumps(user.password)
    parts = [f"user: {json.dumps(user.name)}", f"password: {password}"]
    if user.permissions is not None:
        denied = f", deny: {json.dumps(list(user.permissions.publish_denied))}" if user.permissions.publish_denied else ""
        publish = json.dumps(list(user.permissions.publish))
        subscribe = json.dumps(list(user.permissions.subscribe))
        responses = "" if user.lent is not None else ", allow_responses: true"
        parts.append(f"permissions: {{ publish: {{ allow: {publish}{denied} }}, subscribe: {{ allow: {subscribe} }}{responses} }}")
    return "{ " + ", ".join(parts) + " }"
