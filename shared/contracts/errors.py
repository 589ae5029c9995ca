"""How an error crosses the bus."""

from typing import Any

import msgspec

from shared.errors import TenantryError, from_code


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    fields: dict[str, Any] = {}


def to_info(error: TenantryError) -> ErrorInfo:
    return ErrorInfo(code=error.code, message=error.message, fields=error.fields)


def to_error(info: ErrorInfo) -> TenantryError:
    return from_code(info.code, info.message, info.fields)
