"""The conversation about what was done: who did what, from where, and how it ended. An append-only stream written by registries alone.

An action of a manager is told before it is carried out (ASKED) and when it has ended; a step in an adapter's life when it has
happened. When it was is the bus server's own stamp. The same id and phase twice is one: told again after a registry died.
"""

from enum import StrEnum
from typing import Any

import msgspec

from shared.contracts.subjects import ROOT, token

AUDIT_STREAM = "TENANTRY_AUDIT"
AUDIT_SUBJECTS = (f"{ROOT}.audit.*",)
CLUSTER = "_cluster"  # in a tenant_id's place: what concerns no tenant alone

OPERATOR = "operator"
REGISTRY = "registry"


def audit_subject(tenant_id: str) -> str:
    return f"{ROOT}.audit.{token(tenant_id or CLUSTER)}"


class Phase(StrEnum):
    ASKED = "asked"  # it is being carried out, or nobody lives to say how it ended
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"  # a fault of ours: the registry's log says which
    HAPPENED = "happened"  # a step in an adapter's life


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """No secrets: of a key its id and prefix, of an upload its digest."""

    id: str
    action: str  # an operation's name (create_tenant), adapter.<state>, canary.<what>, or onboard_adapter
    phase: Phase
    who: str  # operator | key <prefix> | tenant user <tenant> | registry | worker <id>
    address: str = ""  # of the client that asked; empty: the bus
    tenant: str = ""
    what: dict[str, Any] = {}  # what was asked for, or happened to what
    result: dict[str, Any] = {}  # ids and names that it made
    error: str = ""  # the refusal's stable code
    note: str = ""


class ListAudit(msgspec.Struct, frozen=True, kw_only=True, tag="list_audit"):
    """Oldest first, page by page. `own`: as the tenant itself sees it, which is what its own subject holds."""

    tenant: str = ""  # by name: an operator sees what earlier tenants of this name did, too
    own: bool = False
    action: str = ""  # one, or a beginning followed by *
    since: str = ""  # RFC 3339; without `after`
    until: str = ""
    after: int = 0  # the `next` of the page before
    limit: int = 100


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    at: str  # RFC 3339, UTC: the bus server's stamp
    record: AuditRecord


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next`: what to ask for `after` this page; 0: there is no more. A page may be short though there is: so much was looked at."""

    lines: tuple[AuditLine, ...] = ()
    next: int = 0


encode = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(AuditRecord).decode
