"""An adapter's way in over HTTP: the archive staged, the fields as one command, the registry's answer; the same for a version on trial."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog
from fastapi import Request
from fastapi.responses import Response

from services.router.admin.answers import answer
from services.router.admin.registry_client import RegistryClient
from services.router.admin.tenant_door import tenant_of
from services.router.admin.uploads import Upload, received, stage, unstage
from services.router.crowd import Crowd
from services.router.settings import RouterSettings
from shared.bus import Bus, BusUnavailable
from shared.contracts.admin import AddAdapter
from shared.errors import InvalidRequest, NotPermitted, RegistryUnavailable, TenantryError
from shared.policy.limits import MAX_BYTES

log = structlog.get_logger()

FIELDS = frozenset({"base", "pool_id", "ceiling_bytes", "drain_first", "make_default", "request", "wait_s"})
_MAX_WAIT_S = 3600.0

Fields = dict[str, Any]
T = TypeVar("T")
CommandOf = Callable[[Fields], AddAdapter]


def openapi_of(fields: frozenset[str]) -> dict[str, Any]:
    """How the request's body is described: FastAPI does not read it."""
    described = (
        "The archive (.tar, .tar.gz, .zip): the form's `file`, or the whole body. Without one, the newest artifact already uploaded under"
        f" this tenant and name is mounted. The query's (or form's) other fields: {', '.join(sorted(fields))}"
    )
    form = {"schema": {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}}}
    whole = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"description": described, "content": {"multipart/form-data": form, "application/octet-stream": whole}}}


class Adding:
    def __init__(self, registry: RegistryClient, bus: Bus, settings: RouterSettings) -> None:
        self._registry = registry
        self._bus = bus
        self._settings = settings
        self._uploads = Crowd("uploads", settings.tenant_uploads_at_once)  # each takes disk here until it is staged

    async def received(self, request: Request, command_of: CommandOf) -> Response:
        """Reads the request, then adds what it holds."""
        own = tenant_of(request.scope)
        if not own:
            return await self._received(request, command_of)
        self._uploads.enter(own)
        try:
            return await self._received(request, command_of)
        finally:
            self._uploads.leave(own)

    async def _received(self, request: Request, command_of: CommandOf) -> Response:
        async with received(request, self._settings.upload_limit_bytes) as upload:
            return await self.add(request, upload, command_of(dict(request.query_params) | upload.fields))

    async def add(self, request: Request, upload: Upload, command: AddAdapter) -> Response:
        if command.ceiling_bytes is not None and tenant_of(request.scope):
            raise NotPermitted("ceiling_bytes is the operator's to set", field="ceiling_bytes")
        if upload.path is None:
            return answer(await self._registry.ask(command, command.wait_s), 201)
        staged = await stage(self._bus, upload.path)
        try:
            return answer(await self._registry.ask(msgspec.structs.replace(command, object=staged), command.wait_s), 201)
        except RegistryUnavailable:
            await self._take_back(staged)
            raise

    async def _take_back(self, staged: str) -> None:
        """Best effort: the registry also clears what nobody takes."""
        try:
            await unstage(self._bus, staged)
        except (BusUnavailable, TenantryError) as error:
            log.warning("upload.left_in_staging", object=staged, error=error.message)


def command_from(fields: Fields, tenant: str, name: str) -> AddAdapter:
    """:raises InvalidRequest: an unknown field, or a value of the wrong kind."""
    given = {key: value for key, value in fields.items() if key not in {"tenant", "name"}}
    refuse_unknown(given, FIELDS)
    command = converted(given | {"type": "add_adapter", "tenant": tenant, "name": name}, AddAdapter)
    if not 0 <= command.wait_s <= _MAX_WAIT_S:
        raise InvalidRequest(f"wait_s: expected 0 to {_MAX_WAIT_S:g}", param="wait_s")
    if command.ceiling_bytes is not None and not 0 <= command.ceiling_bytes <= MAX_BYTES:
        raise InvalidRequest(f"ceiling_bytes: expected 0 to {MAX_BYTES}", param="ceiling_bytes")
    return command


def refuse_unknown(fields: Fields, known: frozenset[str]) -> None:
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0][:80]!r}; known are: {', '.join(sorted(known))}", param=unknown[0][:80])


def converted(values: Fields, kind: type[T]) -> T:
    """:raises InvalidRequest: which field is of the wrong kind."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        param = str(error).rpartition("`$.")[2].rstrip("`")
        raise InvalidRequest(f"a field of the upload is wrong: {error}", param=param) from error
