"""What managers did, from where: told before an operation is carried out and when it has ended; and the whole audit, read page by page.

Steps in adapters' lives are told where they are announced (mounting.py).
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from ulid import ULID

from services.registry.audit_log import AuditLog
from services.registry.store import Store
from shared.bus import read_page
from shared.bus.follow import Stored
from shared.contracts import admin, audit
from shared.contracts.audit import AuditRecord, Phase
from shared.errors import InvalidRequest, NotFound, TenantryError

log = structlog.get_logger()

_LOOKING = ("list_", "show_", "get_")  # tags of operations that change nothing
_MADE = ("tenant_id", "key_id", "prefix", "replaces", "adapter_id", "version", "state", "digest")
_UNTOLD = frozenset({"type", "object", "wait_s"})
_TEXT_LIMIT = 200
_WHAT_LIMIT_BYTES = 4096
_SCAN_LIMIT = 5000  # messages looked at for one page
_PAGE_LIMIT = 1000
_LAST_YEAR = 9000  # beyond, a time may leave the calendar when it is moved between zones
_LOOK_AHEAD = 500  # messages behind a page, among which the outcome of an operation that it shows as asked may stand


class AuditService:
    def __init__(self, store: Store, writer: AuditLog) -> None:
        self._store = store
        self._log = writer

    async def carried_out(self, asked: admin.OnBehalf, carry_out: Callable[[Any], Awaitable[Any]]) -> Any:
        """The operation's result. It is not begun before it is told; what it came to is told before it is answered.

        :raises BusUnavailable: it cannot be told, so nothing was done. :raises TenantryError: the operation's own.
        """
        tag = str(type(asked.request).__struct_config__.tag)
        if tag.startswith(_LOOKING):
            return await carry_out(asked.request)
        tenant = tenant_of(asked.request)
        tenant_id = await self._id_of(tenant)
        begun = AuditRecord(
            id=str(ULID()),
            action=tag,
            phase=Phase.ASKED,
            who=asked.who,
            address=asked.address,
            tenant=tenant,
            what=summary(asked.request),
        )
        await self._log.tell(tenant_id, begun)
        try:
            result = await carry_out(asked.request)
        except TenantryError as error:
            refused = msgspec.structs.replace(begun, phase=Phase.REFUSED, error=error.code, note=error.message[:_TEXT_LIMIT])
            await self._ended(tenant_id, refused)
            raise
        except Exception:
            await self._ended(tenant_id, msgspec.structs.replace(begun, phase=Phase.FAILED, error="internal_error"))
            raise
        made = made_of(result)
        await self._ended(tenant_id or str(made.get("tenant_id", "")), msgspec.structs.replace(begun, phase=Phase.DONE, result=made))
        return result

    async def _ended(self, tenant_id: str, record: AuditRecord) -> None:
        """Without it the record that it was asked for stands, and says that much."""
        try:
            await self._log.tell(tenant_id, record)
        except TenantryError as error:
            log.error("audit.outcome_not_told", action=record.action, id=record.id, phase=record.phase, code=error.code)

    async def _id_of(self, tenant: str) -> str:
        try:
            return (await self._store.tenant(tenant)).tenant_id if tenant else ""
        except NotFound:
            return ""

    async def listed(self, request: audit.ListAudit) -> audit.AuditPage:
        """Oldest first from `since` (or the page before) on.

        :raises InvalidRequest: a time that is none, or a limit out of bounds. :raises NotFound: no such tenant.
        """
        if not 1 <= request.limit <= _PAGE_LIMIT:
            raise InvalidRequest(f"limit is {request.limit}; expected 1 to {_PAGE_LIMIT}", field="limit", got=request.limit)
        since_s, until_s = _seconds("since", request.since), _seconds("until", request.until)
        subject = audit.AUDIT_SUBJECTS[0]
        if request.own:
            subject = audit.audit_subject((await self._store.tenant(request.tenant)).tenant_id)
        lines: list[audit.AuditLine] = []
        ended: set[str] = set()  # operations that ended after what the page shows
        after, read, scanned, waiting = request.after, request.after, 0, True
        while waiting and scanned < _SCAN_LIMIT and len(lines) < request.limit:
            stored, waiting = await read_page(
                self._store.bus, audit.AUDIT_STREAM, subject, after=read, since_s=since_s, count=min(_PAGE_LIMIT, _SCAN_LIMIT - scanned)
            )
            if not stored:
                break
            for number, message in enumerate(stored):
                if until_s and message.stamp_ms >= until_s * 1000:
                    return audit.AuditPage(lines=_joined(lines, ended), next=0)
                after = message.sequence
                line = _line(message)
                if line is not None and _matches(line, request):
                    lines.append(_seen_by(line, own=request.own))
                    if len(lines) == request.limit:
                        waiting = waiting or message is not stored[-1]
                        ended |= _endings(stored[number + 1 :])
                        break
            read = stored[-1].sequence
            scanned += len(stored)
        if waiting and any(line.record.phase is Phase.ASKED and line.record.id not in ended for line in lines):
            ended |= _endings((await read_page(self._store.bus, audit.AUDIT_STREAM, subject, after=read, count=_LOOK_AHEAD))[0])
        return audit.AuditPage(lines=_joined(lines, ended), next=after if waiting else 0)


def tenant_of(request: Any) -> str:
    """The one tenant that an operation is about; empty: none, or several."""
    if isinstance(request, admin.CreateTenant | admin.UpdateTenant | admin.DeleteTenant):
        return request.name
    tenants = getattr(request, "tenants", ())
    return str(getattr(request, "tenant", "")) or (tenants[0] if len(tenants) == 1 else "")


def summary(request: Any) -> dict[str, Any]:
    """What was asked for: fields that say something, none of them long."""
    given: dict[str, Any] = msgspec.to_builtins(request)
    usual = {field.name: field.default for field in msgspec.structs.fields(request)}
    fields = {name: value for name, value in given.items() if name not in _UNTOLD and value != usual[name] and value not in ({}, [])}
    told: dict[str, Any] = {name: value[:_TEXT_LIMIT] if isinstance(value, str) else value for name, value in fields.items()}
    if len(msgspec.json.encode(told)) > _WHAT_LIMIT_BYTES:
        told = {name: value if isinstance(value, str | int | float) else f"{len(value)} entries" for name, value in told.items()}
    return told


def made_of(result: Any) -> dict[str, Any]:
    """The ids and names that an operation made or touched; never a secret."""
    views: list[Any] = result if isinstance(result, list) else [result]  # pyright: ignore[reportUnknownVariableType]
    made = [{name: value for name in _MADE if (value := getattr(view, name, "")) not in ("", 0)} for view in views[:20]]
    return made[0] if len(made) == 1 else ({"each": made} if made else {})


def _line(message: Stored) -> audit.AuditLine | None:
    try:
        record = audit.decode_record(message.data)
    except msgspec.MsgspecError as error:
        log.error("audit.record_unreadable", sequence=message.sequence, error=str(error))
        return None
    at = datetime.fromtimestamp(message.stamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return audit.AuditLine(at=at, record=record)


def _matches(line: audit.AuditLine, request: audit.ListAudit) -> bool:
    """An action may end in `*`: adapter.*"""
    wanted, action = request.action, line.record.action
    is_wanted = action.startswith(wanted[:-1]) if wanted.endswith("*") else wanted in ("", action)
    return is_wanted and (request.own or request.tenant in ("", line.record.tenant))


def _seen_by(line: audit.AuditLine, *, own: bool) -> audit.AuditLine:
    """From where its operator works is no tenant's business."""
    if own and line.record.who == audit.OPERATOR:
        return msgspec.structs.replace(line, record=msgspec.structs.replace(line.record, address=""))
    return line


def _endings(stored: list[Stored]) -> set[str]:
    """Ids of the operations whose outcome is among these."""
    lines = [line for message in stored if (line := _line(message)) is not None]
    return {line.record.id for line in lines if line.record.phase is not Phase.ASKED}


def _joined(lines: list[audit.AuditLine], ended: set[str]) -> tuple[audit.AuditLine, ...]:
    """One line for what was asked and how it ended, where it ended; and for what was told twice."""
    last = {line.record.id: number for number, line in enumerate(lines)}
    return tuple(
        line
        for number, line in enumerate(lines)
        if last[line.record.id] == number and not (line.record.phase is Phase.ASKED and line.record.id in ended)
    )


def _seconds(field: str, text: str) -> float:
    if not text:
        return 0.0
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise InvalidRequest(f"{field} is {text[:40]!r}; expected a time like 2026-11-30T12:00:00Z", field=field, got=text[:40]) from error
    if at.year > _LAST_YEAR:
        raise InvalidRequest(f"{field} is {text[:40]!r}; expected a time up to the year {_LAST_YEAR}", field=field, got=text[:40])
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
